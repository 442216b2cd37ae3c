// Sorts rows by expert, and cuts each expert's rows into tiles of a grouped product; one thread block
// per expert. Rows of one expert stay in the order of their tokens.
//
// chosen: [entries] experts, of which each token has `per_token`. tokens: [entries], the token of each
// sorted row. rows: for each entry of `chosen`, its sorted row. tiles: at least entries / tile_rows +
// the number of experts that have rows; *tile_count: the number of tiles, ordered by expert.
// Shared memory: 4 bytes per expert.
#include "ptx.cuh"
#include "types.cuh"
#include "experts.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)

extern "C" __global__ void __launch_bounds__(THREADS)
    sort_rows(const u32* chosen, u32* tokens, u32* rows, RowTile* tiles, u32* tile_count, int entries, int per_token, int tile_rows) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 found[WARPS];
    u32* counts = (u32*)shared;
    u32 experts = gridDim.x, expert = blockIdx.x;
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    // A warp looks at neighbouring entries.
    int share = (entries + THREADS - 1) / THREADS * 32, from = warp * share, to = from + share < entries ? from + share : entries;

    // All blocks count the rows of all experts.
    for (u32 i = threadIdx.x; i < experts; i += THREADS) counts[i] = 0;
    __syncthreads();
    u32 own = 0;
    for (int first = from; first < to; first += 32) {
        bool exists = first + lane < to;
        u32 of = exists ? chosen[first + lane] : 0;
        if (exists) add_shared(counts + of, 1u);
        own += bits_set(vote(exists && of == expert));
    }
    if (lane == 0) found[warp] = own;
    __syncthreads();

    // Rows and tiles of the experts before, in the halves of a word.
    u64 before = 0;
    for (u32 e = lane; e < expert; e += 32) before += counts[e] | u64((counts[e] + tile_rows - 1) / tile_rows) << 32;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) before += shuffle_xor(before, lanes);
    u32 first_row = u32(before), first_tile = u32(before >> 32), count = counts[expert];
    u32 own_tiles = (count + tile_rows - 1) / tile_rows;
    for (u32 i = threadIdx.x; i < own_tiles; i += THREADS) {
        u32 first = i * tile_rows, end = first + tile_rows < count ? first + tile_rows : count;
        tiles[first_tile + i] = RowTile{expert, first_row + first, first_row + end};
    }
    if (expert == experts - 1 && threadIdx.x == 0) *tile_count = first_tile + own_tiles;

    u32 row = first_row;
    for (int w = 0; w < warp; w++) row += found[w];
    for (int first = from; first < to; first += 32) {
        int entry = first + lane;
        bool is_own = entry < to && chosen[entry] == expert;
        u32 votes = vote(is_own);
        if (is_own) {
            u32 at = row + bits_set(votes & ((1u << lane) - 1));
            tokens[at] = u32(entry / per_token);
            rows[entry] = at;
        }
        row += bits_set(votes);
    }
}
