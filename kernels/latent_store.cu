// Completes the queries of latent attention (docs/decisions/104), and stores each token's key: the latent
// after its norm, then the part that rotates. One warp per query head of a token, and one for its key.
//
// HEADS, RANK, PLAIN_DIM, ROPE_DIM (even): numbers of query heads, of a latent, and of the parts of a query
// that stay and that rotate. BLOCK, BLOCK_BYTES: tokens of a block, and bytes from a block's keys to the
// next one's.
// queries: [tokens][HEADS][PLAIN_DIM + ROPE_DIM] BF16. latents: [tokens][RANK + ROPE_DIM] BF16. qkv:
// [tokens][HEADS][RANK + ROPE_DIM] BF16, in which head_linear.cu has written the first RANK numbers of each head.
// rotations: [positions][cosines, sines: ROPE_DIM]. slots: [tokens], block * BLOCK + offset in the block.
// norm: [RANK] F32. keys: [block][offset][RANK + ROPE_DIM] BF16.
//
// Dimension d is paired with d + ROPE_DIM / 2: (a, b) -> (a cos - b sin, b cos + a sin).
#include "ptx.cuh"
#include "types.cuh"

#define WARPS 4
#define HALF (ROPE_DIM / 2)
#define KEPT (RANK + ROPE_DIM)

__device__ inline void rotate(const Bf16* from, const float* rotation, Bf16* to) {
    for (int d = int(threadIdx.x) % 32; d < HALF; d += 32) {
        float a = widen(from[d]), b = widen(from[HALF + d]), cos = rotation[d], sin = rotation[HALF + d];
        to[d] = to_bf16(a * cos - b * sin);
        to[HALF + d] = to_bf16(b * cos + a * sin);
    }
}

__device__ inline void normalise(const Bf16* from, const float* weight, float eps, Bf16* to) {
    float squares = 0;
    for (int d = int(threadIdx.x) % 32; d < RANK; d += 32) squares = fmaf(widen(from[d]), widen(from[d]), squares);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) squares += shuffle_xor(squares, lanes);
    float scale = 1.0f / sqrtf(squares / RANK + eps);
    for (int d = int(threadIdx.x) % 32; d < RANK; d += 32) to[d] = to_bf16(widen(from[d]) * scale * weight[d]);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    latent_store(const Bf16* queries, const Bf16* latents, Bf16* qkv, const float* rotations, const u32* positions, const u32* slots,
                 const float* norm, float eps, void* keys) {
    int token = int(blockIdx.x), head = int(blockIdx.y) * WARPS + int(threadIdx.x) / 32;
    const float* rotation = rotations + u64(positions[token]) * ROPE_DIM;
    if (head < HEADS) {
        u64 row = u64(token) * HEADS + head;
        rotate(queries + row * (PLAIN_DIM + ROPE_DIM) + PLAIN_DIM, rotation, qkv + row * KEPT + RANK);
    } else if (head == HEADS) {
        const Bf16* latent = latents + u64(token) * KEPT;
        Bf16* key = (Bf16*)((u8*)keys + u64(slots[token] / BLOCK) * BLOCK_BYTES) + slots[token] % BLOCK * KEPT;
        normalise(latent, norm, eps, key);
        rotate(latent + RANK, rotation, key + RANK);
    }
}
