// Number formats in memory, and arithmetic on them. No header of CUDA is needed, because NVRTC
// brings none.
#pragma once

// A function that is not inlined: the kernel has one copy of it.
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

// Two BF16 in a word, `low` in its lower half.
__device__ inline u32 to_bf16_pair(float low, float high) {
    return u32(to_bf16(low).bits) | u32(to_bf16(high).bits) << 16;
}

// Eight BF16 of a vector. By value: for a reference, the compiler makes four loads of 32 bits.
__device__ inline void unpack(Vec16 from, float* to) {
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = widen(Bf16{u16(from.words[i / 2] >> i % 2 * 16)});
}

__device__ inline Vec16 pack(const float* from) {
    Vec16 to;
#pragma unroll
    for (int i = 0; i < 4; i++) to.words[i] = to_bf16_pair(from[2 * i], from[2 * i + 1]);
    return to;
}
