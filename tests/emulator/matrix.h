// Matrices of a number format, for programs that compare products with doubles. FORMAT 0: INT8, 1: E4M3, 2: BF16.
#pragma once
#include <cstdlib>
#include "check.h"

// Bytes of a number.
const int SIZE = FORMAT == 2 ? 2 : 1;

static double element(const u8* row, int k) {
#if FORMAT == 0
    return i8(row[k]);
#elif FORMAT == 1
    return e4m3_to_float(row[k]);
#else
    return widen(((const Bf16*)row)[k]);
#endif
}

static u8* random_matrix(int rows, int bytes) {
    u8* matrix = check::guarded<u8>(size_t(rows) * bytes);
    for (int i = 0; i < rows * bytes / SIZE; i++) {
#if FORMAT == 0
        matrix[i] = u8(std::rand() >> 8);
#elif FORMAT == 1
        matrix[i] = float_to_e4m3(check::number() * 2);
#else
        ((Bf16*)matrix)[i] = to_bf16(check::number() / 2);
#endif
    }
    return matrix;
}
