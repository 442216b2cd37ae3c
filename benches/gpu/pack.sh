#!/bin/bash
# Builds the program and packs it for a machine without Rust: benches/gpu/pack.sh, then target/gpu/gristmill.tar.xz goes along with a
# checkout, and `benches/gpu/check target/gpu/gristmill.tar.xz OUT` runs there. It holds the program, which commit it is of, and the
# libraries that it needs besides glibc, for a machine that lacks them.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --locked
folder=target/gpu/gristmill
rm -rf "$folder"
mkdir -p "$folder/lib"
strip -o "$folder/gristmill" target/release/gristmill
ldd "$folder/gristmill" | awk '$1 ~ /^lib(ssl|crypto|z|gcc_s)\./ { print $3 }' | xargs -r cp -L -t "$folder/lib"
commit=$(git rev-parse --short HEAD)
git diff --quiet HEAD || commit="$commit, changed"
echo "$commit" > "$folder/commit"
tar -C "$folder" -c gristmill lib commit | xz -T0 -6 > target/gpu/gristmill.tar.xz
size=$(stat -c %s target/gpu/gristmill.tar.xz)
echo "target/gpu/gristmill.tar.xz: $((size >> 20)) MiB, commit $commit"
[ "$size" -lt $((55 << 20)) ] || { echo "more than 55 MiB"; exit 1; }
