// Where heads lie in rows of queries, keys and values, and in KV blocks.
//
// HEADS, KV_HEADS, HEAD_DIM, BLOCK, STORE: as in rope_store.cu. ROW_HEADS: heads of a row, which begins
// with the queries; in a layer that stores nothing it has no others. BLOCK_BYTES, BLOCK_SCALES: from a
// block's keys (or values, or scales of either) to those of the next block, where layers of several
// shapes share a pool, or a block holds several layers (docs/decisions/103). A layer's own begin at the
// addresses that kernels are given.
//
// LATENT: 1 if a token has one key that all heads share, whose first VALUE_DIM numbers are its value, too (docs/decisions/104): KV_HEADS are
// then groups of query heads, each of which reads it. Rows have queries alone, and there are no values and scales.
#pragma once
#include "types.cuh"

#define SIZE (STORE == 2 ? 2 : 1)
// Bytes of a head's keys, or of its values, in a block.
#define HEAD_BYTES (BLOCK * HEAD_DIM * SIZE)
#ifndef ROW_HEADS
#define ROW_HEADS (LATENT ? HEADS : HEADS + 2 * KV_HEADS)
#endif
#ifndef LATENT
#define LATENT 0
#endif
#ifndef BLOCK_BYTES
#define IS_ALONE 1
#define BLOCK_BYTES (KV_HEADS * HEAD_BYTES)
#define BLOCK_SCALES (KV_HEADS * BLOCK)
#else
#define IS_ALONE 0
#endif

// Where the keys of key-value head `head` begin in block `block`, and so do its values; and where the
// scales of either do.
__device__ inline u64 head_at(u32 block, int head) {
#if LATENT
    head = 0;
#endif
    return IS_ALONE ? (u64(block) * KV_HEADS + head) * HEAD_BYTES : u64(block) * BLOCK_BYTES + head * HEAD_BYTES;
}
__device__ inline u64 scales_at(u32 block, int head) {
    return IS_ALONE ? (u64(block) * KV_HEADS + head) * BLOCK : u64(block) * BLOCK_SCALES + head * BLOCK;
}
