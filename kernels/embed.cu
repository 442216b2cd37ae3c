// Copies rows of a table, multiplied by `scale`; one warp per row.
//
// WIDTH: values per row, a multiple of 8. table: [ids][WIDTH] BF16. tokens: [rows], each an id, or
// IS_DRAWN and an index in `drawn`. The ids `first`, `second` and `third`, or NONE, are read as the id
// `read_as`. out: [rows][WIDTH].
#include "ptx.cuh"
#include "types.cuh"
#include "drawn.cuh"

#define ROWS 4

extern "C" __global__ void __launch_bounds__(ROWS * 32)
    embed(const Bf16* table, const u32* tokens, const Drawn* drawn, Bf16* out, int rows, float scale, u32 read_as, u32 first, u32 second,
          u32 third) {
    int row = int(blockIdx.x) * ROWS + int(threadIdx.x) / 32;
    if (row >= rows) return;
    u32 token = tokens[row];
    if (token & IS_DRAWN) token = drawn[token & ~IS_DRAWN].token;
    if (token == first || token == second || token == third) token = read_as;
    const Vec16* from = (const Vec16*)(table + u64(token) * WIDTH);
    Vec16* to = (Vec16*)(out + u64(row) * WIDTH);
    for (int i = int(threadIdx.x) % 32; i < WIDTH / 8; i += 32) {
        float x[8];
        unpack(from[i], x);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= scale;
        to[i] = pack(x);
    }
}
