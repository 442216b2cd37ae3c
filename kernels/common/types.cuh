// Numbers as they lie in memory, and arithmetic on them. No header of CUDA's is needed: NVRTC brings none.
#pragma once

// A function of which a kernel has one copy.
#ifdef __CUDACC__
#define NOINLINE __noinline__
#else
#define NOINLINE
#endif

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Sixteen bytes, loaded and stored at once.
struct alignas(16) Vec16 {
    u32 words[4];
};

// BF16: the upper half of an F32.
struct Bf16 {
    u16 bits;
};

__device__ inline float widen(Bf16 x) {
    return bits_to_float(u32(x.bits) << 16);
}

// Ties to even.
__device__ inline Bf16 to_bf16(float x) {
    return Bf16{float_to_bf16(x)};
}

__device__ inline float round_bf16(float x) {
    return widen(to_bf16(x));
}

// Two in a word, `low` in its lower half.
__device__ inline u32 to_bf16_pair(float low, float high) {
    return u32(to_bf16(low).bits) | u32(to_bf16(high).bits) << 16;
}
