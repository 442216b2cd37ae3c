// How numbers are rounded to eight bits, with one scale for several.
#pragma once
#include "types.cuh"

// Numbers whose maximum magnitude is below this are written as zeros: the inverse would overflow.
#define LEAST 1e-30f

// What a thread has seen of the numbers of one scale. A maximum ignores NaN, so NaN is tracked
// separately.
struct Magnitude {
    float most, not_finite;
    __device__ void see(const float* x) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            most = fmaxf(most, fabsf(x[i]));
            not_finite = fmaf(x[i], 0.0f, not_finite);
        }
    }
    // The maximum; infinite if a number is not finite.
    __device__ float bound() const { return not_finite == 0 ? most : bits_to_float(0x7f800000); }
};

// A number is about `scale` times its eight bits, which are the number times `inverse`, rounded.
struct Steps {
    float scale, inverse;
};

// `most`: the maximum magnitude, which becomes `top`. If it is infinite, the scale is NaN, so that it
// shows in the logits.
__device__ inline Steps steps_of(float most, float top) {
    bool finite = most < bits_to_float(0x7f800000);
    return {!finite ? bits_to_float(0x7fc00000) : most < LEAST ? 0.0f : most / top, most < LEAST || !finite ? 0.0f : top / most};
}

// Eight numbers in INT8.
__device__ inline u64 to_int8(const float* x, float inverse) {
    u32 words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) words[i / 4] |= (float_to_bits(fmaf(x[i], inverse, 12582912.0f)) & 0xff) << i % 4 * 8;
    return u64(words[0]) | u64(words[1]) << 32;
}
