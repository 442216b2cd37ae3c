#!/bin/bash
# Kernels on a card of compute capability 9.0: benches/gpu/first.sh OUT. Needs nvcc; writes OUT/first.txt and the cubins.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1
nvcc=${NVCC:-nvcc}
mkdir -p "$out/cubins"

# cubin NAME KERNEL MACRO...
cubin() {
    local name=$1 kernel=$2
    shift 2
    "$nvcc" -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -cubin "${@/#/-D}" -I kernels/common -o "$out/cubins/$name.cubin" "kernels/$kernel.cu"
}

format=0
for word in int8 fp8 bf16; do
    cubin "linear_$word" linear FORMAT=$format &
    for consumers in 1 2; do cubin "linear_sm90_${word}_$consumers" linear_sm90 FORMAT=$format CONSUMERS=$consumers & done
    cubin "attention_${word}_1" attention STORE=$format ROW_WARPS=1 HEADS=32 KV_HEADS=8 HEAD_DIM=128 BLOCK=64 WINDOW=0 &
    format=$((format + 1))
    wait
done
[ "${ONLY_CUBINS:-}" ] && exit
"$nvcc" -std=c++17 -O2 -o "$out/first" benches/gpu/first.cu -lcuda
"$out/first" "$out/cubins" | tee "$out/first.txt"
