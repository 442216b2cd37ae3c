// Scales the INT32 accumulators of an INT8 matmul that cuBLASLt computed, and adds the bias, as
// linear.cu does with its own.
//
// sums: [rows][columns]. The other parameters are linear.cu's. A thread block computes 512 columns
// of a row, two per thread.
#define FORMAT 0
#define WIDE 0
#include "ptx.cuh"
#include "linear.cuh"

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS)
    scale_sums(const int* sums, const float* row_scales, const float* column_scales, const Bf16* bias, Bf16* y, int columns, int stride) {
    int row = int(blockIdx.x), column = int(blockIdx.y * THREADS + threadIdx.x) * 2;
    if (column >= columns) return;
    const int* from = sums + u64(row) * columns + column;
    write_pair(y + u64(row) * stride, column, columns, from[0], column + 1 < columns ? from[1] : 0, row_scales[row], column_scales, bias);
}
