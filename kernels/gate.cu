// out *= sigmoid(gates), which is how some models gate the results of attention.
//
// gates, out: `vectors` vectors of eight BF16, one per thread.
#include "ptx.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) gate(const Bf16* gates, Bf16* out, int vectors) {
    int at = int(blockIdx.x * 256 + threadIdx.x);
    if (at >= vectors) return;
    float gate[8], x[8];
    unpack(((const Vec16*)gates)[at], gate);
    unpack(((const Vec16*)out)[at], x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] /= 1.0f + expf(-gate[i]);
    ((Vec16*)out)[at] = pack(x);
}
