#!/bin/bash
# Builds the program and packs it for a machine without Rust: benches/gpu/pack.sh, then target/gpu/gristmill.xz and target/gpu/commit
# go along with a checkout, and `benches/gpu/check target/gpu/gristmill.xz OUT` runs there.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --locked
mkdir -p target/gpu
strip -o target/gpu/gristmill target/release/gristmill
xz -T0 -6 -f -k target/gpu/gristmill
rm target/gpu/gristmill
commit=$(git rev-parse --short HEAD)
git diff --quiet HEAD || commit="$commit, changed"
echo "$commit" > target/gpu/commit
size=$(stat -c %s target/gpu/gristmill.xz)
echo "target/gpu/gristmill.xz: $((size >> 20)) MiB, commit $commit"
[ "$size" -lt $((55 << 20)) ] || { echo "more than 55 MiB"; exit 1; }
