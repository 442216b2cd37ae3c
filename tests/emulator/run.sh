#!/bin/bash
# Runs kernels in the emulator against references in doubles, in every format: tests/emulator/run.sh. Needs a C++ compiler alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

# run PROGRAM MACRO...: builds it with these macros and runs it.
run() {
    local program=$1
    shift
    g++ -O2 -std=c++17 -Wno-psabi "${@/#/-D}" -I tests/emulator -I kernels/common "tests/emulator/$program.cpp" tests/emulator/emulator.cpp -o "$built/program"
    "$built/program"
}

for format in 0 1 2; do
    run linear FORMAT=$format
    for consumers in 1 2; do run linear FORMAT=$format CONSUMERS=$consumers; done
    for width in 64 896 4864; do run rows OUTPUT=$format WIDTH=$width; done
    for warps in 1 4; do
        for dim in 64 128; do run attention STORE=$format ROW_WARPS=$warps HEAD_DIM=$dim; done
    done
done
run sample
