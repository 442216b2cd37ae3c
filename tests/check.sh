#!/usr/bin/env bash
# Every check there is, in one command: format, lints, docs, schemas, unit and end-to-end tests, tests with real services.
#
#   tests/check.sh [--no-skips]
#
# Needs Rust (rustup) on Debian or Ubuntu; takes what else it needs by itself: a C compiler, OpenSSL's headers and Python's
# venv from the system's packages (as root or through sudo, only where they are missing), pyarrow, DuckDB and other readers into
# .venv/ of this checkout, Kafka and MinIO into .services/ (see tests/services/services.py). Tests whose service cannot be had are
# listed by name at the end and count as skipped; with --no-skips, as CI runs it, they fail the run. What the processor cannot do is
# listed all the same, and fails nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
skips_fail=""
case "${1:-}" in
    "") ;;
    --no-skips) skips_fail=yes ;;
    *) echo "unknown: $1"; exit 2 ;;
esac

began=()
say() {
    printf '\n== %s (%s)\n' "$*" "$(date +%H:%M:%S)"
    began+=("$SECONDS ${1%%[,:]*}")
}

install_packages() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
}

say "tools"
command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs"; exit 1; }
command -v cc >/dev/null && command -v c++ >/dev/null && command -v make >/dev/null || install_packages build-essential
command -v pkg-config >/dev/null && pkg-config --exists openssl || install_packages pkg-config libssl-dev
python3 -c 'import venv, ensurepip' 2>/dev/null || install_packages python3 python3-venv
rustup component add rustfmt clippy >/dev/null 2>&1 || true   # a no-op where they are there; absent: the next lines say so
[ -x .venv/bin/python ] || python3 -m venv .venv
cmp -s tests/requirements.txt .venv/requirements.txt || {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
    cp tests/requirements.txt .venv/requirements.txt
}
.venv/bin/python tests/machine_code.py --install

say "format"
cargo fmt --check

say "services: fetch and build, beside what follows"
# Building MinIO takes minutes, once, in part waiting for modules; rustc leaves a core idle now and then.
prepared=$(mktemp)
(renice -n 19 $BASHPID > /dev/null && exec python3 tests/services/services.py prepare) > "$prepared" 2>&1 &
preparing=$!
trap 'kill $preparing 2> /dev/null; rm -f "$prepared"' EXIT

say "build and lints"
# The program among them: a `cargo build` before it would compile a dozen crates twice, since tests want more of their features. Our crates
# are linted while they are compiled, benchmarks among them.
export RUSTC_WORKSPACE_WRAPPER="$PWD/tests/lints.py"
cargo test --profile checked --locked --features faults --no-run --tests --bench kernels --bench engine

say "licences and sources"
if command -v cargo-deny >/dev/null; then
    cargo deny --locked --offline check licenses bans sources
else
    echo "cargo-deny is not installed, so deny.toml was not checked: cargo install cargo-deny"
fi

say "services: start"
prepared_well=0
wait $preparing || prepared_well=$?
cat "$prepared"
rm "$prepared"
[ "$prepared_well" = 0 ] || exit "$prepared_well"
work=$(mktemp -d)
log=$work/log
export GRISTMILL_TEST_SKIPS=$work/skips
touch "$GRISTMILL_TEST_SKIPS"
tidy() {
    for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done
    for set in first second; do python3 tests/services/services.py down --dir "$work/$set"; done
    rm -rf "$work"
}
trap tidy EXIT
trap 'exit 130' INT TERM
for set in first second; do python3 tests/services/services.py up --dir "$work/$set"; done

status=0
export PYTHON="$PWD/.venv/bin/python"
# with SET COMMAND...: runs it with the addresses of one of the two sets of services.
with() (
    eval "$(python3 tests/services/services.py env --dir "$work/$1")"
    "${@:2}"
)
# All of them, whatever fails.
tests() { cargo test --profile checked --locked --features faults --no-fail-fast "$@" 2>&1; }

beside=()
say "tests, kernels in the emulator beside them (shown at the end)"
# The emulator computes for many minutes and waits for nothing: it takes what the others leave.
set -m   # jobs beside have process groups of their own, so that all of each can be ended
(renice -n 19 $BASHPID > /dev/null && tests --test all cuda_ > "$work/kernels") &
beside+=($!)
set +m
# Most tests wait for programs and timers, so one more than the two cores runs at a time.
with first tests --lib --bins --test all -- --test-threads=3 --skip cuda_ | tee "$log" || status=$?
# Fault tests kill and stop the services that they share, so they run one at a time: in two halves, each with services of its own.
say "fault tests in two halves, docs and their examples beside them (shown when they are done)"
half=(failpoints kills limits lost_queues membership orders pauses)
set -m
with first tests --test faults -- --test-threads=1 "${half[@]/#/faults::}" > "$work/half" &
beside+=($!)
with second tests --test faults -- --test-threads=1 $(printf -- '--skip faults::%s ' "${half[@]}") > "$work/other-half" &
beside+=($!)
# Fault tests leave most of the time of both cores.
(renice -n 19 $BASHPID > /dev/null && RUSTDOC="$PWD/tests/lints.py" tests --doc > "$work/docs") &
beside+=($!)
set +m
for job in "${beside[@]}"; do wait "$job" || status=$?; done
say "done"
cat "$work"/{docs,half,other-half,kernels} | tee -a "$log"

# How long each part took, and the first lines of each failure: what stands far above is cut off where a log is kept in part.
printf '\n'
for ((part = 0; part + 1 < ${#began[@]}; part++)); do
    printf '%5d s  %s\n' $((${began[part + 1]%% *} - ${began[part]%% *})) "${began[part]#* }"
done
awk '/^---- .* ----$/ { left = 12; print "" } /^failures:$/ { left = 0 } left-- > 0' "$log"

# One closing line over all test programs. A test that noted itself as skipped has passed for cargo, but checked nothing.
printf '\n'
sort -u "$GRISTMILL_TEST_SKIPS" | sed 's/^/skipped: /'
if [ -n "$skips_fail" ] && grep -qv ': this machine has no ' "$GRISTMILL_TEST_SKIPS"; then
    echo "tests were skipped for want of a service: --no-skips takes that for a failure"
    status=1
fi
awk -v skips="$(awk -F ': ' '{ print $1 }' "$GRISTMILL_TEST_SKIPS" | sort -u | wc -l)" '
    /^test result:/ { p += $4; f += $6; s += $8 }
    END { printf "\ntotal: %d passed, %d failed, %d skipped\n", p - skips, f, s + skips }' "$log"
exit "$status"
