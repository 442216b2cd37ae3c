// linear.cu, or linear_sm90.cu where CONSUMERS says of how many warpgroups, against products in doubles.
#ifdef CONSUMERS
#include "hopper.cuh"
#include "../../kernels/linear_sm90.cu"
static const int BLOCK_THREADS = THREADS;
#else
#include "ptx.cuh"
#include "../../kernels/linear.cu"
#endif
#include "matrix.h"

struct Case {
    int rows, columns, bytes;
};

static float* random_scales(int count) {
    float* scales = check::guarded<float>(count);
    for (int i = 0; i < count; i++) scales[i] = std::fabs(check::number()) / 127;
    return scales;
}

static Bf16* random_bias(int count) {
    Bf16* bias = check::guarded<Bf16>(count);
    for (int i = 0; i < count; i++) bias[i] = to_bf16(check::number());
    return bias;
}

static void launch(const u8* x, const u8* w, const float* row_scales, const float* column_scales, const Bf16* bias, Result* y,
                   Case c, int stride, unsigned seed) {
#ifdef CONSUMERS
    auto map = [&](const u8* data, int rows, int box_rows) {
        return TensorMap{{u64(data), u64(rows), u64(c.bytes / SIZE), u64(c.bytes), u64(128 / SIZE), u64(box_rows), u64(SIZE)}};
    };
    check::run(linear_sm90, 2, 1, BLOCK_THREADS, STAGES * STAGE_BYTES + 1024, seed, map(x, c.rows, ROWS), map(w, c.columns, COLUMNS),
               row_scales, column_scales, bias, y, c.rows, c.columns, c.bytes, stride);
#else
    check::run(linear, (c.rows + TILE_ROWS - 1) / TILE_ROWS, (c.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, THREADS, TILE_SHARED_BYTES, seed, x, w,
               row_scales, column_scales, bias, y, c.rows, c.columns, c.bytes, stride);
#endif
}

static double number_of(float x) {
    return x;
}

static double number_of(Bf16 x) {
    return widen(x);
}

// Sums of products, and of their magnitudes, of all rows and columns.
struct Sums {
    std::vector<double> sums, magnitudes;
};

static Sums sums_of(const u8* x, const u8* w, Case c) {
    int terms = c.bytes / SIZE;
    auto widened = [&](const u8* matrix, int rows) {
        std::vector<double> all(size_t(rows) * terms);
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < terms; k++) all[size_t(row) * terms + k] = element(matrix + size_t(row) * c.bytes, k);
        return all;
    };
    std::vector<double> a = widened(x, c.rows), b = widened(w, c.columns);
    Sums of;
    for (int row = 0; row < c.rows; row++)
        for (int column = 0; column < c.columns; column++) {
            double sum = 0, magnitude = 0;
            for (int k = 0; k < terms; k++) {
                double product = a[size_t(row) * terms + k] * b[size_t(column) * terms + k];
                sum += product;
                magnitude += std::fabs(product);
            }
            of.sums.push_back(sum);
            of.magnitudes.push_back(magnitude);
        }
    return of;
}

// The worst error of y. Allowed is half a step of the result, 2^-8 of it in BF16, and an F32 rounding of 2^-24 for each number that
// is added up, and for the four operations that follow; sums of INT8 are whole numbers.
static check::Worst errors(const Sums& of, const float* row_scales, const float* column_scales, const Bf16* bias, const Result* y,
                           Case c, int stride) {
    check::Worst worst;
    for (int row = 0; row < c.rows; row++)
        for (int column = 0; column < c.columns; column++) {
            size_t at = size_t(row) * c.columns + column;
            double scale = FORMAT == 2 ? 1.0 : double(row_scales[row]) * column_scales[column];
            double added = bias ? widen(bias[column]) : 0.0;
            double want = of.sums[at] * scale + added;
            double roundings = (FORMAT == 0 ? 0 : c.bytes / SIZE) + 4;
            double allowed =
                (WIDE ? 0 : std::fabs(want) / 256) + roundings * 0x1p-24 * (of.magnitudes[at] * scale + std::fabs(added)) + 1e-30;
            worst.add(number_of(y[size_t(row) * stride + column]) - want, allowed);
        }
    return worst;
}

static void check_case(Case c) {
    const u8* x = random_matrix(c.rows, c.bytes);
    const u8* w = random_matrix(c.columns, c.bytes);
    const Sums of = sums_of(x, w, c);
    const float* row_scales = random_scales(c.rows);
    const float* column_scales = random_scales(c.columns);
    const Bf16* some = random_bias(c.columns);
    int stride = (c.columns + 15) / 16 * 16;
    Result* y = check::guarded<Result>(size_t(c.rows) * stride);
    const std::pair<unsigned, const Bf16*> launches[] = {{0, nullptr}, {1, some}, {6, some}, {7, nullptr}};
    for (auto [seed, bias] : launches) {
        // NaN, in either format.
        std::memset((void*)y, 0xff, size_t(c.rows) * stride * sizeof(Result));
        launch(x, w, row_scales, column_scales, bias, y, c, stride, seed);
        check::Worst worst = errors(of, row_scales, column_scales, bias, y, c, stride);
        check::expect(worst.fine(), "linear format %d wide %d, %d x %d x %d, %s, seed %u: %.2f of the error allowed", FORMAT, WIDE,
                      c.rows, c.columns, c.bytes, bias ? "bias" : "no bias", seed, worst.part);
    }
}

// Less and more than a tile, and one; more stages than are there at once, in blocks that take several tiles.
static std::vector<Case> cases() {
#ifdef CONSUMERS
    return {{1, 16, 16},
            {3, 1, 32},
            {ROWS - 1, COLUMNS + 1, 144},
            {ROWS + 2, COLUMNS - 3, 272},
            {ROWS, COLUMNS, 128},
            {9, COLUMNS * 4 + 9, (STAGES + 1) * STAGE + 16}};
#else
    return {{1, 16, 16}, {3, 1, 32}, {9, 131, 144}, {130, 144, 400}, {128, 128, 128}, {37, 265, 1040}};
#endif
}

int main() {
    for (Case c : cases()) check_case(c);
    return check::verdict();
}
