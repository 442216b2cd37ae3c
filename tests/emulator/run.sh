#!/bin/bash
# Runs kernels in the emulator against references in doubles, in every format: tests/emulator/run.sh [--quick] [PROGRAM]..., of encodings,
# reports, linear, coded, experts, rows, recurrent, attention, latents, sample and client (the libraries that stand in for NVIDIA's). Needs a
# C++ compiler alone. Fails where an error is larger than its check says. --quick, as every run of the tests has it, leaves out shapes
# (`slow`) whose code others run, too, and runs others in one of the three formats (`turns`): a third of the time.
set -euo pipefail
cd "$(dirname "$0")/../.."
quick=""
[ "${1:-}" != --quick ] || { quick=yes; shift; }
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
failed=0
flags=(-O2 -std=c++17 -Wno-psabi)
g++ "${flags[@]}" -c tests/emulator/emulator.cpp -o "$built/emulator.o"

# run PROGRAM MACRO...: builds it with these macros and runs it.
run() {
    local program=$1
    shift
    echo "$program $*"
    g++ "${flags[@]}" "${@/#/-D}" -I tests/emulator -I kernels/common "tests/emulator/$program.cpp" "$built/emulator.o" -o "$built/program"
    "$built/program" || failed=1
}

# One that --quick leaves out.
slow() { [ -n "$quick" ] || "$@"; }

# turns NUMBER FORMAT COMMAND...: one that --quick runs in a single format only; numbers that follow each other have different ones.
turns() {
    local number=$1 format=$2
    shift 2
    if [ -z "$quick" ] || [ $((number % 3)) = "$format" ]; then "$@"; fi
}

linear() {
    for format in 0 1 2; do
        for wide in 0 1; do run linear FORMAT=$format WIDE=$wide; done
        turns 0 $format run linear FORMAT=$format WIDE=1 COLUMNS=32 CONSUMERS=1
        turns 1 $format run linear FORMAT=$format WIDE=0 COLUMNS=32 CONSUMERS=2
        run linear FORMAT=$format WIDE=1 COLUMNS=256 CONSUMERS=1
        turns 2 $format run linear FORMAT=$format WIDE=0 COLUMNS=256 CONSUMERS=2
        for columns in 64 128; do
            slow run linear FORMAT=$format WIDE=1 COLUMNS=$columns CONSUMERS=1
            slow run linear FORMAT=$format WIDE=0 COLUMNS=$columns CONSUMERS=2
        done
    done
}

experts() {
    for format in 0 1 2; do run experts FORMAT=$format; done
}

coded() {
    run coded ROWS=16 GROUP_STEPS=1 GROUP=32
    run coded ROWS=64 GROUP_STEPS=2 GROUP=64
    run coded ROWS=128 GROUP_STEPS=4 GROUP=128
    run coded ROWS=16 GROUP_STEPS=0 GROUP=8
    slow run coded ROWS=64 GROUP_STEPS=0 GROUP=24
    run coded ROWS=128 GROUP_STEPS=0 GROUP=96
    slow run coded ROWS=128 GROUP_STEPS=1 GROUP=16
    run coded ROWS=16 GROUP_STEPS=3 GROUP=256
    slow run coded ROWS=64 GROUP_STEPS=8 GROUP=264
    # Sums that do not fit in a mantissa.
    slow run coded ROWS=16 GROUP_STEPS=70 GROUP=2240
    slow run coded ROWS=16 GROUP_STEPS=4 GROUP=512
}

rows() {
    for format in 0 1 2; do
        run rows OUTPUT=$format WIDTH=8 THREADS=128 DELTA_NORM=1 ACTIVATION=1 CENTERED=1 SCALED=1
        slow run rows OUTPUT=$format WIDTH=904 THREADS=128 DELTA_NORM=0 ACTIVATION=0 CENTERED=1
        run rows OUTPUT=$format WIDTH=4864 THREADS=256 DELTA_NORM=0 ACTIVATION=2 CENTERED=1 SCALED=1
        run rows OUTPUT=$format WIDTH=1856 THREADS=128 DELTA_NORM=0 ACTIVATION=3
        slow run rows OUTPUT=$format WIDTH=28672 THREADS=1024 DELTA_NORM=0 ACTIVATION=1
        run rows OUTPUT=$format WIDTH=65536 THREADS=1024 DELTA_NORM=1 ACTIVATION=0
    done
}

# recurrent_shape KIND KEY_HEADS VALUE_HEADS KEY_DIM VALUE_DIM CONV LANES THREADS
recurrent_shape() {
    run recurrent KIND=$1 KEY_HEADS=$2 VALUE_HEADS=$3 KEY_DIM=$4 VALUE_DIM=$5 CONV=$6 LANES=$7 THREADS=$8
}

recurrent() {
    # Heads of published models, and some that fill no warp.
    recurrent_shape 0 1 2 128 128 4 4 512
    recurrent_shape 0 2 6 10 7 3 32 224
    recurrent_shape 0 3 3 9 80 4 4 320
    slow recurrent_shape 0 1 1 24 300 1 1 320
    recurrent_shape 1 1 3 128 64 4 8 512
    slow recurrent_shape 1 2 4 128 80 4 4 320
    recurrent_shape 1 2 4 10 4 2 32 128
    slow recurrent_shape 1 1 2 256 64 4 8 512
}

attention() {
    # The bits of 2.0f.
    local cap=1073741824
    for store in 0 1 2; do
        run attention STORE=$store HEADS=8 KV_HEADS=2 HEAD_DIM=64 BLOCK=64 ROW_WARPS=4
        turns 0 $store run attention STORE=$store HEADS=16 KV_HEADS=1 HEAD_DIM=32 BLOCK=64 ROW_WARPS=1 SINKS=1
        slow run attention STORE=$store HEADS=6 KV_HEADS=2 HEAD_DIM=80 BLOCK=64 ROW_WARPS=2 WINDOW=100
        turns 1 $store run attention STORE=$store HEADS=5 KV_HEADS=1 HEAD_DIM=96 BLOCK=32 ROW_WARPS=1 WINDOW=33
        turns 2 $store run attention STORE=$store HEADS=7 KV_HEADS=1 HEAD_DIM=128 BLOCK=64 ROW_WARPS=1 SOFT_CAP=$cap
        slow run attention STORE=$store HEADS=2 KV_HEADS=2 HEAD_DIM=128 BLOCK=64 ROW_WARPS=4
        turns 3 $store run attention STORE=$store HEADS=8 KV_HEADS=1 HEAD_DIM=256 BLOCK=64 ROW_WARPS=4 STAGES=1 SOFT_CAP=$cap WINDOW=64
        # Heads that two warps share, in blocks of two layers and of another shape (for INT8: where scales take the other's room, too).
        turns 1 $store run attention STORE=$store HEADS=4 KV_HEADS=1 HEAD_DIM=512 BLOCK=64 ROW_WARPS=2 STAGES=1 STAGE_TOKENS=32 VALUE_NORM=1 BLOCK_BYTES=131072 BLOCK_SCALES=128
        turns 2 $store run attention STORE=$store HEADS=6 KV_HEADS=2 HEAD_DIM=288 BLOCK=64 ROW_WARPS=1 STAGES=1 STAGE_TOKENS=32 WINDOW=100 SINKS=1 SOFT_CAP=$cap
        turns 0 $store run attention STORE=$store HEADS=8 KV_HEADS=1 HEAD_DIM=512 BLOCK=64 ROW_WARPS=4 STAGES=2 STAGE_TOKENS=32 QUERIES_ALONE=1 BLOCK_BYTES=262144 BLOCK_SCALES=192
        run attention SM90=1 STORE=$store HEADS=8 KV_HEADS=2 HEAD_DIM=64 BLOCK=64 ROW_WARPS=4
        slow run attention SM90=1 STORE=$store HEADS=16 KV_HEADS=1 HEAD_DIM=32 BLOCK=64 ROW_WARPS=8
        slow run attention SM90=1 STORE=$store HEADS=10 KV_HEADS=2 HEAD_DIM=80 BLOCK=64 ROW_WARPS=4 WINDOW=100
        turns 4 $store run attention SM90=1 STORE=$store HEADS=8 KV_HEADS=1 HEAD_DIM=96 BLOCK=64 ROW_WARPS=4 WINDOW=33 SOFT_CAP=$cap SINKS=1
        turns 5 $store run attention SM90=1 STORE=$store HEADS=7 KV_HEADS=1 HEAD_DIM=112 BLOCK=64 ROW_WARPS=12
        slow run attention SM90=1 STORE=$store HEADS=7 KV_HEADS=1 HEAD_DIM=128 BLOCK=64 ROW_WARPS=4 SOFT_CAP=$cap
        turns 6 $store run attention SM90=1 STORE=$store HEADS=16 KV_HEADS=1 HEAD_DIM=128 BLOCK=64 ROW_WARPS=4 STAGES=2
        slow run attention SM90=1 STORE=$store HEADS=2 KV_HEADS=2 HEAD_DIM=128 BLOCK=64 ROW_WARPS=8
    done
}

latents() {
    run latents HEADS=5 RANK=144 PLAIN_DIM=24 ROPE_DIM=16 VALUES=40
    slow run latents HEADS=16 RANK=512 PLAIN_DIM=128 ROPE_DIM=64 VALUES=128
    run attention STORE=2 LATENT=1 HEADS=8 KV_HEADS=2 HEAD_DIM=576 VALUE_DIM=512 BLOCK=64 ROW_WARPS=2 STAGES=1 STAGE_TOKENS=32 BLOCK_BYTES=147456 BLOCK_SCALES=0
    run attention STORE=2 LATENT=1 HEADS=6 KV_HEADS=1 HEAD_DIM=48 VALUE_DIM=32 BLOCK=64 ROW_WARPS=4 STAGES=2 BLOCK_BYTES=12288 BLOCK_SCALES=0
    slow run attention STORE=2 LATENT=1 HEADS=20 KV_HEADS=1 HEAD_DIM=576 VALUE_DIM=512 BLOCK=64 ROW_WARPS=1 STAGES=2 STAGE_TOKENS=32 BLOCK_BYTES=147456 BLOCK_SCALES=0
}

sample() {
    run sample
}

reports() { run reports; }

encodings() {
    run encodings STORE=2 HEADS=8 KV_HEADS=2 HEAD_DIM=64 BLOCK=64
    sed '/#include "ptx.cuh"/d' kernels/common/hopper.cuh > "$built/hopper_itself.cuh"
    echo "encodings DEVICE"
    g++ "${flags[@]}" -DDEVICE -I "$built" tests/emulator/encodings.cpp -o "$built/program"
    "$built/program" || failed=1
}

client() {
    echo client
    tests/emulator/build.sh "$built/lib"
    g++ -O2 -std=c++17 tests/emulator/client.cpp -o "$built/client"
    "$built/client" "$built/lib" || failed=1
}

for part in "${@:-encodings reports linear coded experts rows recurrent attention latents sample client}"; do
    for name in $part; do "$name"; done
done
exit $failed
