// As many products as a card can do, of numbers that never leave the multiprocessor: the ceiling that linear.cu and linear_sm90.cu are
// measured against.
//
// FORMAT: 0 INT8, 1 FP8 (E4M3), 2 BF16. WARPGROUPS: 0 for `mma.sync`, 1 for Hopper's `wgmma` (sm_90a). A warp of a block of 8 does
// `rounds` times eight products of 16 x 8 sums; a warpgroup of a block of 2 `rounds` times eight of 64 x 128; over 32 bytes each.
// out: [blocks][256], so that nothing is left out as useless.
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

// Bits that look random, of finite numbers.
__device__ inline u32 number(u32 i) {
    return i * 2654435761u & (FORMAT == 1 ? 0xbfbfbfbfu : FORMAT == 2 ? 0xbf7fbf7fu : ~0u);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) peak(u32* out, int rounds) {
    DYNAMIC_SHARED(dynamic);
    Sum total = 0;
#if WARPGROUPS
    u8* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    // 64 rows of 128 bytes, then 128, of numbers: zeros take less power, and are multiplied faster than any model's.
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
