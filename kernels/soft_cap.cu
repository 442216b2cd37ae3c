// Replaces logits by cap tanh(logit / cap), in place (Gemma 2, 2024).
//
// logits: [rows][stride] F32, of which the first `ids` of a row are used. stride: a multiple of 16.
// A thread block computes 1024 values of a row, four neighbours per thread; the last of them may
// lie beyond `ids`.
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
        // Infinite values stay, too, so that sampling finds them.
        if (fabsf(x) < bits_to_float(0x7f800000)) four.words[i] = float_to_bits(cap * tanhf(x / cap));
    }
    *place = four;
}
