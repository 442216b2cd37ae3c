#!/usr/bin/env bash
# Every check there is, in one command: format, lints, docs, schemas, unit and end-to-end tests.
#
# Needs Rust (rustup) on Debian or Ubuntu; takes what else it needs by itself: a C compiler and Python's venv from the
# system's packages (as root or through sudo, only where they are missing), pyarrow and DuckDB into .venv/ of this checkout.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

install_packages() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
}

say "tools"
command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs"; exit 1; }
command -v cc >/dev/null && command -v c++ >/dev/null || install_packages build-essential
python3 -c 'import venv, ensurepip' 2>/dev/null || install_packages python3 python3-venv
rustup component add rustfmt clippy >/dev/null 2>&1 || true   # a no-op where they are there; absent: the next lines say so
[ -x .venv/bin/python ] || python3 -m venv .venv
cmp -s tests/requirements.txt .venv/requirements.txt || {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
    cp tests/requirements.txt .venv/requirements.txt
}

say "format"
cargo fmt --check

say "build"
cargo build --release --locked

say "lints"
cargo clippy --release --locked --all-targets --quiet -- -D warnings

say "docs"
RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --no-deps --quiet

say "tests"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
PYTHON="$PWD/.venv/bin/python" cargo test --release --locked 2>&1 | tee "$log" || status=$?

# One closing line over all test binaries.
awk '/^test result:/ { p += $4; f += $6; s += $8 } END { printf "\ntotal: %d passed, %d failed, %d skipped\n", p, f, s }' "$log"
exit "$status"
