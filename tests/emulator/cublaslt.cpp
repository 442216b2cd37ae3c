// Stands in for NVIDIA's libcublasLt: products as the device asks for them, by plain loops, when they are asked for, after all that the
// driver has been asked for before. It knows what gristmill uses, refuses the rest, and is as strict as the library about types,
// alignment and attributes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>
#include <dlfcn.h>
#include "card.h"
#include "emulator.h"
#include "ptx.cuh"

namespace {

enum Status { DONE = 0, INVALID = 7, UNSUPPORTED = 15 };
enum Type { F32 = 0, I8 = 3, I32 = 10, BF16 = 14, E4M3 = 28 };
enum Attribute { TRANSPOSE_A = 3, EPILOGUE = 7, BIAS = 8, SCALES_A = 17, SCALES_B = 18, SCALE_MODE_A = 31, SCALE_MODE_B = 32 };
const unsigned COMPUTE_F32 = 68, COMPUTE_I32 = 72, OUTER_VECTORS = 3, WITH_BIAS = 4;

struct Product {
    unsigned compute, scale;
    std::map<unsigned, uint64_t> attributes;
    uint64_t of(unsigned attribute) const {
        auto found = attributes.find(attribute);
        return found == attributes.end() ? 0 : found->second;
    }
};
struct Layout { unsigned type; uint64_t rows, columns; int64_t stride; };
struct Preference { uint64_t workspace; };
struct Algorithm { uint64_t words[8]; };
struct Found { Algorithm algorithm; size_t workspace; int status; float waves; int reserved[4]; };

size_t size_of(unsigned type) {
    return type == F32 || type == I32 ? 4 : type == BF16 ? 2 : 1;
}

int handle;

// What EMULATOR_FAIL asks this call for, else DONE.
int asked(const char* name) {
    static int calls;
    const Settings& s = settings();
    return s.failing == name && ++calls == s.failing_call ? s.failing_code : DONE;
}

// Does what waits in the driver: a status of its own means that the card is lost.
int settled() {
    static const auto settle = (int (*)())dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), "emulator_settle");
    const int EXECUTION_FAILED = 13;
    return settle && settle() == SUCCESS ? DONE : EXECUTION_FAILED;
}

// Can it compute this?
Status check(const Product& p, const Layout& a, const Layout& b, const Layout& d) {
    if (p.of(TRANSPOSE_A) != 1) return UNSUPPORTED;
    if (a.rows != b.rows || a.columns != d.rows || b.columns != d.columns || a.type != b.type) return INVALID;
    if (a.stride < (int64_t)a.rows || b.stride < (int64_t)b.rows || d.stride < (int64_t)d.rows) return INVALID;
    for (const Layout* matrix : {&a, &b, &d})
        if (matrix->stride * size_of(matrix->type) % 16) return UNSUPPORTED;
    bool scaled = p.of(SCALE_MODE_A) || p.of(SCALE_MODE_B), biased = p.of(EPILOGUE) == WITH_BIAS;
    if (biased != (p.of(BIAS) != 0)) return INVALID;
    switch (a.type) {
    case I8: return p.compute == COMPUTE_I32 && p.scale == I32 && d.type == I32 && !scaled && !biased ? DONE : UNSUPPORTED;
    case E4M3:
        if (settings().card != 90) return UNSUPPORTED;
        if (p.of(SCALE_MODE_A) != OUTER_VECTORS || p.of(SCALE_MODE_B) != OUTER_VECTORS || !p.of(SCALES_A) || !p.of(SCALES_B))
            return UNSUPPORTED;
        return p.compute == COMPUTE_F32 && p.scale == F32 && d.type == BF16 && a.rows % 16 == 0 && d.rows % 16 == 0 ? DONE
                                                                                                                 : UNSUPPORTED;
    case BF16:
        return p.compute == COMPUTE_F32 && p.scale == F32 && (d.type == BF16 || d.type == F32) && !scaled ? DONE : UNSUPPORTED;
    default: return UNSUPPORTED;
    }
}

float bf16(const void* at, size_t i) {
    uint32_t bits = uint32_t(((const uint16_t*)at)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A matrix's numbers in F32, column after column without gaps: INT8 and its products up to 2^24 are exact.
std::vector<float> widened(const void* from, const Layout& m) {
    std::vector<float> to(m.rows * m.columns);
    for (uint64_t column = 0; column < m.columns; column++)
        for (uint64_t row = 0; row < m.rows; row++) {
            size_t i = column * m.stride + row;
            to[column * m.rows + row] = m.type == I8     ? float(((const signed char*)from)[i])
                                        : m.type == E4M3 ? e4m3_to_float(((const unsigned char*)from)[i])
                                                         : bf16(from, i);
        }
    return to;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() {
    return 130000;
}

const char* cublasLtGetStatusString(int status) {
    return status == UNSUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}

int cublasLtCreate(void** created) {
    *created = &handle;
    return DONE;
}

int cublasLtDestroy(void* destroyed) {
    return destroyed == &handle ? DONE : INVALID;
}

int cublasLtMatmulDescCreate(Product** created, unsigned compute, unsigned scale) {
    *created = new Product{compute, scale, {}};
    return DONE;
}

int cublasLtMatmulDescDestroy(Product* destroyed) {
    delete destroyed;
    return DONE;
}

int cublasLtMatmulDescSetAttribute(Product* product, unsigned attribute, const void* from, size_t size) {
    bool is_address = attribute == BIAS || attribute == SCALES_A || attribute == SCALES_B;
    bool is_known = is_address || attribute == TRANSPOSE_A || attribute == EPILOGUE || attribute == SCALE_MODE_A || attribute == SCALE_MODE_B;
    if (!is_known || size != (is_address ? 8 : 4)) return INVALID;
    uint64_t value = 0;
    std::memcpy(&value, from, size);
    product->attributes[attribute] = value;
    return DONE;
}

int cublasLtMatrixLayoutCreate(Layout** created, unsigned type, uint64_t rows, uint64_t columns, int64_t stride) {
    *created = new Layout{type, rows, columns, stride};
    return DONE;
}

int cublasLtMatrixLayoutDestroy(Layout* destroyed) {
    delete destroyed;
    return DONE;
}

int cublasLtMatmulPreferenceCreate(Preference** created) {
    *created = new Preference{0};
    return DONE;
}

int cublasLtMatmulPreferenceDestroy(Preference* destroyed) {
    delete destroyed;
    return DONE;
}

int cublasLtMatmulPreferenceSetAttribute(Preference* preference, unsigned attribute, const void* from, size_t size) {
    // Workspace, and what parts of sums are kept in.
    if (attribute == 1 && size == 8) {
        std::memcpy(&preference->workspace, from, size);
        return DONE;
    }
    return attribute == 3 && size == 4 ? DONE : INVALID;
}

// Small products are offered in two ways, so that one is measured against the other.
int cublasLtMatmulAlgoGetHeuristic(void* with, const Product* product, const Layout* a, const Layout* b, const Layout* c, const Layout* d,
                                   const Preference* preference, int most, Found* found, int* count) {
    *count = 0;
    if (int status = asked(__func__)) return status;
    if (with != &handle || !preference || most < 1) return INVALID;
    if (std::memcmp(c, d, sizeof *c)) return INVALID;
    if (Status status = check(*product, *a, *b, *d)) return status;
    *count = most > 1 && a->rows * d->rows * d->columns < 1 << 18 ? 2 : 1;
    for (int i = 0; i < *count; i++) found[i] = Found{{{uint64_t(i + 1)}}, 0, DONE, 1, {}};
    return DONE;
}

int cublasLtMatmul(void* with, const Product* product, const void* alpha, const void* a, const Layout* a_layout, const void* b,
                   const Layout* b_layout, const void* beta, const void* c, const Layout* c_layout, void* d, const Layout* d_layout,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    if (int status = asked(__func__)) return status;
    if (with != &handle || !workspace || !workspace_bytes || !stream || c != d || c_layout != d_layout) return INVALID;
    if (algorithm->words[0] < 1 || algorithm->words[0] > 2) return INVALID;
    if (Status status = check(*product, *a_layout, *b_layout, *d_layout)) return status;
    for (const void* matrix : {a, b, (const void*)d})
        if (!matrix || uintptr_t(matrix) % 16) return INVALID;
    uint32_t factors[2];
    std::memcpy(&factors[0], alpha, 4);
    std::memcpy(&factors[1], beta, 4);
    if (factors[0] != (product->scale == I32 ? 1u : float_to_bits(1.0f)) || factors[1] != 0) return UNSUPPORTED;
    if (int status = settled()) return status;
    uint64_t m = d_layout->rows, n = d_layout->columns, k = a_layout->rows;
    std::vector<float> left = widened(a, *a_layout), right = widened(b, *b_layout);
    auto scales_a = (const float*)product->of(SCALES_A), scales_b = (const float*)product->of(SCALES_B);
    auto bias = (const void*)product->of(BIAS);
    for (uint64_t column = 0; column < n; column++)
        for (uint64_t row = 0; row < m; row++) {
            const float *x = &left[row * k], *y = &right[column * k];
            // Sixteen sums side by side, which a compiler computes at once.
            float sums[16] = {};
            uint64_t i = 0;
            for (; i + 16 <= k; i += 16)
                for (int j = 0; j < 16; j++) sums[j] += x[i + j] * y[i + j];
            double sum = 0;
            for (float part : sums) sum += part;
            for (; i < k; i++) sum += double(x[i]) * y[i];
            size_t at = column * d_layout->stride + row;
            if (a_layout->type == E4M3) sum *= double(scales_a[row]) * scales_b[column];
            if (bias) sum += bf16(bias, row);
            if (d_layout->type == I32) ((int*)d)[at] = int(sum);
            else if (d_layout->type == F32) ((float*)d)[at] = float(sum);
            else ((uint16_t*)d)[at] = float_to_bf16(float(sum));
        }
    return DONE;
}

}  // extern "C"
