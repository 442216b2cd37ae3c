// Shared by the kernels of linear operations: types of accumulators and results, and how accumulators
// become results.
//
// FORMAT: 0 INT8, 1 FP8 (E4M3), 2 BF16, 4 codes of four bits, whose sums are scaled before they come
// here. WIDE: 0 for results in BF16, 1 for F32.
#pragma once
#include "types.cuh"

// Whether a result is a sum times the scales of its row and its column.
#define SCALED (FORMAT < 2)

#if FORMAT == 0
typedef int Sum;
#else
typedef float Sum;
#endif

#if WIDE
typedef float Result;
#else
typedef Bf16 Result;
#endif

// Writes results `column` (even, below `columns`) and `column` + 1 of a row of y at once; a row has
// memory for an even number of values.
__device__ inline void write_pair(Result* y_row, int column, int columns, Sum low, Sum high, float row_scale,
                                  const float* column_scales, const Bf16* bias) {
    float values[2] = {float(low), float(high)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (column + i >= columns) continue;
#if SCALED
        values[i] *= row_scale * column_scales[column + i];
#endif
        if (bias) values[i] += widen(bias[column + i]);
    }
#if WIDE
    *(u64*)(y_row + column) = u64(float_to_bits(values[0])) | u64(float_to_bits(values[1])) << 32;
#else
    *(u32*)(y_row + column) = to_bf16_pair(values[0], values[1]);
#endif
}
