// y = x W^T, scaled by row and column, plus bias, on Hopper (sm_90a): what linear.cu says, by products of warpgroups.
//
// FORMAT, WIDE: see linear.cuh. CONSUMERS: warpgroups that multiply, each 64 rows x 128 columns of y. x, w: maps of the matrices,
// boxes of 128 bytes of ROWS and COLUMNS of their rows, swizzled over 128 bytes. The other parameters are linear.cu's.
//
// A warpgroup of its own has the tensor memory accelerator fill stages of 128 bytes of each row, as fast as they become free. Blocks
// stay and take tile after tile; those of the same columns of W follow each other, so that W is read once.
#include "hopper.cuh"
#include "linear.cuh"

#define ROWS (CONSUMERS * 64)
#define COLUMNS 128
#define STAGE 128
#define A_BYTES (ROWS * STAGE)
#define B_BYTES (COLUMNS * STAGE)
#define STAGES (CONSUMERS == 1 ? 8 : 6)
#define THREADS (128 + CONSUMERS * 128)

__device__ inline void multiply_stage(Sum (&sums)[64], const u8* a, const u8* b, bool add) {
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
    // Tiles start on 1024 bytes.
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
                    // The first time round nobody has to leave.
                    barrier_wait(&empty[at], (turn / STAGES + 1) % 2);
                    barrier_expect(&full[at], A_BYTES + B_BYTES);
                    u8* to = shared + at * (A_BYTES + B_BYTES);
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
        Sum sums[64];
#if FORMAT == 1
        float partial[64];
#pragma unroll
        for (int i = 0; i < 64; i++) sums[i] = 0;
#endif
        for (int s = 0; s < stages; s++, turn++) {
            int at = turn % STAGES;
            barrier_wait(&full[at], turn / STAGES % 2);
            const u8* a = shared + at * (A_BYTES + B_BYTES) + part * STAGE;
            const u8* b = shared + at * (A_BYTES + B_BYTES) + A_BYTES;
            products_begin();
#if FORMAT == 1
            // FP8's accumulator keeps about 14 bits: sums of a stage move to F32 (see linear.cu).
            multiply_stage(partial, a, b, false);
            products_end();
            products_wait<0>();
            if (lane == 0) barrier_arrive(&empty[at]);
#pragma unroll
            for (int i = 0; i < 64; i++) sums[i] += partial[i];
#else
            multiply_stage(sums, a, b, s > 0);
            products_end();
            // The stage before has been read once its products are done.
            products_wait<1>();
            if (s > 0 && lane == 0) barrier_arrive(&empty[(turn + STAGES - 1) % STAGES]);
#endif
        }
#if FORMAT != 1
        products_wait<0>();
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
        // Products of the next tile take whole warps.
        __syncwarp();
    }
}
