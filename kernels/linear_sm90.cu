// y = x W^T, scaled by row and column, plus bias, on Hopper (sm_90a): the function of linear.cu,
// with `wgmma`.
//
// FORMAT, WIDE: see linear.cuh. COLUMNS: 32, 64, 128 or 256. CONSUMERS: warpgroups that multiply, 1
// or 2, each 64 rows x COLUMNS columns of y. x, w: tensor maps of the matrices, with boxes of 128
// bytes of ROWS rows of x and of COLUMNS rows of W, swizzled over 128 bytes. The other parameters
// are linear.cu's.
//
// A separate warpgroup lets the tensor memory accelerator fill stages of 128 bytes of each row, as
// soon as they become free. Thread blocks are persistent and compute one tile after another; tiles
// with the same columns of W follow each other, so that W is read once.
//
// How the best tile is estimated, in cycles of a multiprocessor: the products of a stage take ROWS
// * COLUMNS / 32. The stage is written to shared memory once and read by the products, at 128 bytes
// per cycle, which takes (ROWS + COLUMNS) + CONSUMERS * (64 + COLUMNS): as long as the products for
// 128 x 256, longer for all other tiles. The loads are 128 * (COLUMNS + existing rows of x) bytes,
// at no more than some 50 bytes per cycle, and at fewer the more multiprocessors load. So large
// tiles are best for many rows, and as many tiles as multiprocessors for few rows. A tile costs its
// number of stages times the longest of these three times, plus 1,000 to 2,000 cycles to begin and
// end.
//
// Stages are summed in the same order for all COLUMNS and CONSUMERS, so the tile may depend on the
// number of rows.
#include "hopper.cuh"
#include "linear.cuh"

#define ROWS (CONSUMERS * 64)
#define STAGE 128
#define A_BYTES (ROWS * STAGE)
#define B_BYTES (COLUMNS * STAGE)
#define STAGE_BYTES (A_BYTES + B_BYTES)
// As many stages as fit into a block's 227 KiB, less 2 KiB for barriers and alignment: 4 of 128 x
// 256 to 14 of 64 x 64. At most 16, which hold 64 KiB of W with the narrowest tile: to keep memory
// busy, a multiprocessor needs some 40 KiB of loads in flight.
#define FITTING ((225 << 10) / STAGE_BYTES)
#define STAGES (FITTING < 16 ? FITTING : 16)
#define THREADS (128 + CONSUMERS * 128)

template <int N> __device__ inline void multiply_stage(Sum (&sums)[N], const u8* a, const u8* b, bool add) {
    u64 from = tile_descriptor(a), with = tile_descriptor(b);
#pragma unroll
    for (int k = 0; k < STAGE / 32; k++) {
        int keep = add || k > 0;
#if FORMAT == 0
        products(sums, from + k * 2, with + k * 2, keep);
#elif FORMAT == 1
        products(E4m3{}, sums, from + k * 2, with + k * 2, keep);
#else
        products(Bf16Pairs{}, sums, from + k * 2, with + k * 2, keep);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* row_scales,
                const float* column_scales, const Bf16* bias, Result* y, int rows, int columns, int bytes, int stride) {
    DYNAMIC_SHARED(dynamic);
    // Tiles are aligned to 1024 bytes.
    u8* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    __shared__ Barrier full[STAGES], empty[STAGES];
    int row_tiles = (rows + ROWS - 1) / ROWS, tiles = row_tiles * ((columns + COLUMNS - 1) / COLUMNS);
    int stages = (bytes + STAGE - 1) / STAGE;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], CONSUMERS * 4);
        }
        barriers_made();
    }
    __syncthreads();

    int group = int(threadIdx.x) / 128;
    if (group == 0) {
        registers_fewer<40>();
        if (threadIdx.x == 0) {
            int turn = 0;
            for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
                int row = tile % row_tiles * ROWS, column = tile / row_tiles * COLUMNS;
                for (int s = 0; s < stages; s++, turn++) {
                    int at = turn % STAGES;
                    // In the first round, the stages are empty: there is nobody to wait for.
                    barrier_wait(&empty[at], (turn / STAGES + 1) % 2);
                    barrier_expect(&full[at], STAGE_BYTES);
                    u8* to = shared + at * STAGE_BYTES;
                    int from = s * STAGE / (FORMAT == 2 ? 2 : 1);
                    copy_box(to, &x, from, row, &full[at]);
                    copy_box(to + A_BYTES, &w, from, column, &full[at]);
                }
            }
        }
        return;
    }
    registers_more<CONSUMERS == 1 ? 240 : 232>();
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4, part = (group - 1) * 64;
    int turn = 0;
    for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
        Sum sums[COLUMNS / 2];
#if FORMAT == 1
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0;
#endif
        for (int s = 0; s < stages; s++, turn++) {
            int at = turn % STAGES;
            barrier_wait(&full[at], turn / STAGES % 2);
            const u8* a = shared + at * STAGE_BYTES + part * STAGE;
            const u8* b = shared + at * STAGE_BYTES + A_BYTES;
#if FORMAT == 1
            // FP8's accumulator keeps about 14 bits, so the sums of a stage move to F32 (see
            // linear.cu). They move 128 columns at a time, because the registers do not hold a
            // second set of 256. While one warpgroup adds, the other multiplies.
            const int most = COLUMNS < 128 ? COLUMNS : 128;
#pragma unroll
            for (int column = 0; column < COLUMNS; column += most) {
                float partial[most / 2];
                products_begin(partial);
                multiply_stage(partial, a, b + column * STAGE, false);
                products_end();
                products_done(partial);
                if (column + most == COLUMNS && lane == 0) barrier_arrive(&empty[at]);
#pragma unroll
                for (int i = 0; i < most / 2; i++) sums[column / 2 + i] += partial[i];
            }
#else
            products_begin(sums);
            multiply_stage(sums, a, b, s > 0);
            products_end();
            // When its products are done, the previous stage is no longer read.
            products_wait<1>();
            if (s > 0 && lane == 0) barrier_arrive(&empty[(turn + STAGES - 1) % STAGES]);
#endif
        }
#if FORMAT != 1
        products_done(sums);
        if (lane == 0) barrier_arrive(&empty[(turn + STAGES - 1) % STAGES]);
#endif
        int first_row = tile % row_tiles * ROWS + part + warp * 16 + lane / 4, first_column = tile / row_tiles * COLUMNS;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first_row + half * 8;
            if (row >= rows) continue;
            float row_scale = FORMAT == 2 ? 1.0f : row_scales[row];
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                int column = first_column + n * 8 + lane % 4 * 2;
                if (column >= columns) continue;
                write_pair(y + u64(row) * stride, column, columns, sums[n * 4 + half * 2], sums[n * 4 + half * 2 + 1], row_scale,
                           column_scales, bias);
            }
        }
        // All lanes of a warp must take part in the products of the next tile.
        __syncwarp();
    }
}
