// As many matmul instructions as a card can execute, on operands that never leave the
// multiprocessor: the ceiling with which linear.cu and linear_sm90.cu are compared.
//
// FORMAT: 0 INT8, 1 FP8 (E4M3), 2 BF16. WARPGROUPS: 0 for `mma.sync`, 1 for Hopper's `wgmma`
// (sm_90a). Per round, each of the 8 warps of a block issues eight products of 16 x 8 values; with
// WARPGROUPS, each of the 2 warpgroups issues eight of 64 x 128. Every product sums over 32 bytes.
// out: [blocks][256], written so that the compiler does not remove the products.
#if WARPGROUPS
#include "hopper.cuh"
#else
#include "ptx.cuh"
#endif
#include "types.cuh"

#define THREADS 256
#define AT_ONCE 8

#if FORMAT == 0
typedef int Sum;
#else
typedef float Sum;
#endif

// Pseudorandom bits that are finite numbers in every format.
__device__ inline u32 number(u32 i) {
    return i * 2654435761u & (FORMAT == 1 ? 0xbfbfbfbfu : FORMAT == 2 ? 0xbf7fbf7fu : ~0u);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) peak(u32* out, int rounds) {
    DYNAMIC_SHARED(dynamic);
    Sum total = 0;
#if WARPGROUPS
    u8* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    // Operands: 64 rows of 128 bytes, then 128 rows. Not zeros: these take less power, and would be
    // multiplied faster than any model's numbers.
    for (int i = int(threadIdx.x); i < 192 * 128 / 4; i += THREADS) ((u32*)shared)[i] = number(u32(i));
    stores_before_products();
    __syncthreads();
    unsigned long long a = tile_descriptor(shared), b = tile_descriptor(shared + 64 * 128);
    Sum sums[64] = {};
    for (int round = 0; round < rounds; round++) {
        products_begin(sums);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#if FORMAT == 0
            products(sums, a + i % 4 * 2, b + i % 4 * 2, 1);
#elif FORMAT == 1
            products(E4m3{}, sums, a + i % 4 * 2, b + i % 4 * 2, 1);
#else
            products(Bf16Pairs{}, sums, a + i % 4 * 2, b + i % 4 * 2, 1);
#endif
        }
        products_end();
        products_done(sums);
    }
#pragma unroll
    for (int i = 0; i < 64; i++) total += sums[i];
#else
    (void)dynamic;
    Sum sums[AT_ONCE][4] = {};
    u32 a[4], b[2];
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[i] = number(threadIdx.x * 8 + i);
#pragma unroll
    for (u32 i = 0; i < 2; i++) b[i] = number(threadIdx.x * 8 + 4 + i);
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#if FORMAT == 0
            multiply(sums[i], a, b);
#elif FORMAT == 1
            multiply(E4m3{}, sums[i], a, b);
#else
            multiply(Bf16Pairs{}, sums[i], a, b);
#endif
        }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
#endif
    out[blockIdx.x * THREADS + threadIdx.x] = u32(total);
}
