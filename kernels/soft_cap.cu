// Logits become cap tanh(logit / cap), in place (Gemma 2, 2024).
//
// logits: [rows][stride] F32, of which the first `ids` of a row count. stride: a multiple of 16. A block takes 1024 numbers of a
// row, a thread four side by side, the last of which may be none that count.
#include "ptx.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) soft_cap(float* logits, float cap, int ids, int stride) {
    int at = int(blockIdx.y * 256 + threadIdx.x) * 4;
    if (at >= ids) return;
    Vec16* place = (Vec16*)(logits + u64(blockIdx.x) * stride + at);
    Vec16 four = *place;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x = bits_to_float(four.words[i]);
        // What is not finite stays, infinity too: sampling must see it.
        if (fabsf(x) < bits_to_float(0x7f800000)) four.words[i] = float_to_bits(cap * tanhf(x / cap));
    }
    *place = four;
}
