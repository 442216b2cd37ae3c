// Instructions that C++ cannot express, one function each. Tests replace this file by a version
// that a CPU runs.
#pragma once

// Shared memory whose size is set by the launch.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ inline float bits_to_float(unsigned int bits) {
    return __uint_as_float(bits);
}

__device__ inline unsigned int float_to_bits(float x) {
    return __float_as_uint(x);
}

__device__ inline unsigned short float_to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

#if __CUDA_ARCH__ >= 890
// Converts to two E4M3, `low` in the lower byte; values beyond 448 become 448.
__device__ inline unsigned short floats_to_e4m3(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

__device__ inline float shuffle_xor(float x, int lanes) {
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}

__device__ inline unsigned long long shuffle_xor(unsigned long long x, int lanes) {
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}

// The value of the lane that is this many lanes before; the lane's own value if there is none.
__device__ inline unsigned long long shuffle_up(unsigned long long x, int lanes) {
    return __shfl_up_sync(0xffffffffu, x, lanes);
}

// A bit per lane of the warp, which is set where `x` is true.
__device__ inline unsigned int vote(bool x) {
    return __ballot_sync(0xffffffffu, x);
}

// Number of bits that are set.
__device__ inline int bits_set(unsigned int x) {
    return __popc(x);
}

__device__ inline float add_toward_zero(float a, float b) {
    return __fadd_rz(a, b);
}

// 2^x, with a relative error of at most 2^-22; results below 2^-126 are 0.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same number, which the compiler must treat as a new one: it cannot reuse earlier results
// computed from it.
__device__ inline int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Number of bits up to the highest one that is set.
__device__ inline int bit_length(unsigned long long x) {
    return 64 - __clzll((long long)x);
}

// Returns the previous value.
__device__ inline unsigned int add_shared(unsigned int* to, unsigned int x) {
    return atomicAdd(to, x);
}

// The sum may be read only after a barrier. Cards add 64 bits in shared memory by a retry loop, but
// 32 bits in one instruction, so each half is added separately.
__device__ inline void add_shared(unsigned long long* to, unsigned long long x) {
    unsigned int low = (unsigned int)x, high = (unsigned int)(x >> 32);
    unsigned int* halves = (unsigned int*)to;
    if (atomicAdd(halves, low) + low < low) high++;
    if (high > 0) atomicAdd(halves + 1, high);
}

// The shared memory address of a pointer.
__device__ inline unsigned int shared_address(const void* pointer) {
    return (unsigned int)__cvta_generic_to_shared(pointer);
}

// Begins to copy 16 bytes to shared memory; writes zeros if `bytes` is 0 instead of 16.
__device__ inline void copy_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

// As copy_async, four bytes.
__device__ inline void copy_word_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

// Makes a group of all copies that this thread has begun since the last call.
__device__ inline void copy_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `LEFT` of this thread's groups are unfinished.
template <int LEFT> __device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four matrices of 8 rows of 16 bytes, whose rows lanes 0 to 7, 8 to 15, 16 to 23, 24 to 31 point to. Lane l gets bytes
// 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each.
__device__ inline void load_matrices(unsigned int (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// As load_matrices, of matrices of 8 x 8 numbers of 16 bits that are transposed: a lane gets two neighbours of a column.
__device__ inline void load_transposed(unsigned int (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a b of a warp: 16 x 32 times 32 x 8 bytes, or 16 x 16 times 16 x 8 BF16. With g = lane / 4
// and t = lane % 4: a[0] and a[2] belong to row g, a[1] and a[3] to row g + 8. a[0], a[1] and b[0]
// are the row's (for b, column g's) bytes from 4 t on, the others the bytes 16 further. c[0], c[1]
// are row g, columns 2 t and 2 t + 1; c[2], c[3] are the same of row g + 8. (PTX ISA, "Matrix
// Fragments for mma.m16n8k32".)
__device__ inline void multiply(int (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

struct E4m3 {};
struct Bf16Pairs {};

#if __CUDA_ARCH__ >= 890
__device__ inline void multiply(E4m3, float (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

__device__ inline void multiply(Bf16Pairs, float (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
