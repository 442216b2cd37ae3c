// quantize_groups.cu, coded_linear.cu and grouped_coded_linear.cu: against doubles, and to the bit against sums of groups in F32, in
// their order. GROUP: columns of a group of quantize_groups.cu. GROUP_STEPS: see coded_tile.cuh.
#include "ptx.cuh"
#include "types.cuh"
namespace grouping {
#include "../../kernels/quantize_groups.cu"
const int GROUPING_THREADS = THREADS, GROUPING_PADDED = PADDED, GROUPS_AT_ONCE = THREADS / LANES;
}  // namespace grouping
#undef THREADS
#undef PADDED
#undef VECTORS
#undef LANES
#include "../../kernels/coded_linear.cu"
#include "../../kernels/grouped_coded_linear.cu"
#include "check.h"

// Columns of a step of a product.
const int STEP = 32;

template <class T, class Make> static T* filled(size_t count, const Make& make) {
    T* to = check::guarded<T>(count);
    for (size_t i = 0; i < count; i++) to[i] = make();
    return to;
}

static void check_quantized(int rows, int groups) {
    using namespace grouping;
    const int width = groups * GROUP;
    Bf16* x = check::guarded<Bf16>(size_t(rows) * width);
    // Groups have magnitudes of their own, so another group's scale would not do.
    for (int i = 0; i < rows * width; i++) x[i] = to_bf16(check::number() * float(1 + i / GROUP % 3 * 20));
    // A group of zeros; the last group of all is not finite, and no other one shows it.
    for (int i = 0; i < GROUP; i++) x[i] = Bf16{0};
    x[rows * width - 1] = to_bf16(rows % 2 ? INFINITY : NAN);
    u8* out = check::guarded<u8>(size_t(rows) * groups * GROUPING_PADDED);
    float* scales = check::guarded<float>(size_t(rows) * groups);
    std::memset(out, 0x55, size_t(rows) * groups * GROUPING_PADDED);
    check::run(quantize_groups, (rows * groups + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE, 1, GROUPING_THREADS, 0, 3, x, out, scales, rows, groups);
    bool right = true;
    for (int row = 0; row < rows; row++)
        for (int g = 0; g < groups; g++) {
            const Bf16* from = x + size_t(row) * width + g * GROUP;
            const i8* bytes = (const i8*)out + (size_t(row) * groups + g) * GROUPING_PADDED;
            float most = 0, scale = scales[size_t(g) * rows + row];
            for (int i = 0; i < GROUP; i++) most = std::fmax(most, std::fabs(widen(from[i])));
            if (row == rows - 1 && g == groups - 1) {
                right &= std::isnan(scale);
                continue;
            }
            right &= scale == most / 127.0f;
            for (int i = 0; i < GROUPING_PADDED; i++) {
                double want = i < GROUP && most > 0 ? widen(from[i]) / double(scale) : 0;
                right &= std::fabs(bytes[i] - want) <= 0.5001;
            }
        }
    check::expect(right, "quantize_groups of %d, %d x %d", GROUP, rows, groups);
}

// A matrix of codes, as a checkpoint has it, and as the kernels read it.
struct Matrix {
    int columns, groups, step_group, depth;
    std::vector<u8> codes, zeros;
    std::vector<float> factors;
    u8* packed;
    u32* records;

    // `steps`: of a row.
    Matrix(int columns, int steps, bool has_zeros) : columns(columns), depth(steps * STEP) {
        step_group = GROUP_STEPS ? GROUP_STEPS : steps;
        groups = steps / step_group;
        int panels = (columns + 7) / 8, units = (depth + 127) / 128;
        packed = check::guarded<u8>(size_t(panels) * units * 512);
        std::memset(packed, 0, size_t(panels) * units * 512);
        records = check::guarded<u32>(size_t(panels) * groups * 10);
        std::memset(records, 0, size_t(panels) * groups * 40);
        for (int c = 0; c < columns; c++) {
            for (int g = 0; g < groups; g++) {
                factors.push_back(check::number() / 8);
                // Both ends, too.
                zeros.push_back(u8(!has_zeros ? 8 : (c + g) % 5 == 0 ? 0 : (c + g) % 5 == 1 ? 15 : std::rand() >> 8 & 15));
                u32* record = records + (size_t(c / 8) * groups + g) * 10;
                record[c % 8] = float_to_bits(factors.back());
                ((u8*)(record + 8))[c % 8] = zeros.back();
            }
            for (int k = 0; k < depth; k++) {
                codes.push_back(u8((c + k) % 11 == 0 ? 15 : std::rand() >> 8 & 15));
                int step = k / STEP, at = k % STEP;
                int lane = c % 8 * 4 + at % 16 / 4;
                u8* unit = packed + (size_t(c / 8) * units + step / 4) * 512;
                unit[lane * 16 + step % 4 * 4 + at % 4] |= u8(codes.back() << (at / 16 * 4));
            }
        }
    }

    double weight(int column, int k) const {
        size_t group = size_t(column) * groups + k / STEP / step_group;
        return (double(codes[size_t(column) * depth + k]) - zeros[group]) * factors[group];
    }
};

// Rows in INT8, and the scales of their groups.
struct Activations {
    int rows, bytes;
    u8* x;
    float* scales;

    // The last row has no number in its first group. A row that is one group may end within a step.
    Activations(int rows, const Matrix& w) : rows(rows), bytes(GROUP_STEPS ? w.depth : w.depth - 16) {
        x = filled<u8>(size_t(rows) * bytes, [] {
            i8 byte = i8(std::rand() >> 8);
            return u8(byte == -128 ? -127 : byte);
        });
        scales = filled<float>(size_t(rows) * w.groups, [] { return std::fabs(check::number()) / 127; });
        if (rows > 1) scales[rows - 1] = NAN;
    }
};

// Holds a result against sums of `row` of x and `column` of w.
static bool is_right(float is, const Activations& a, int row, const Matrix& w, int column, float bias, check::Worst& worst) {
    const i8* x = (const i8*)a.x + size_t(row) * a.bytes;
    double want = bias, magnitude = std::fabs(bias);
    float sum = 0;
    int width = w.step_group * STEP;
    for (int g = 0; g < w.groups; g++) {
        size_t at = size_t(column) * w.groups + g;
        float scale = a.scales[size_t(g) * a.rows + row];
        int products = 0;
        for (int k = g * width; k < (g + 1) * width && k < a.bytes; k++) {
            products += x[k] * (w.codes[size_t(column) * w.depth + k] - w.zeros[at]);
            double product = x[k] * w.weight(column, k) * scale;
            want += product;
            magnitude += std::fabs(product);
        }
        sum = std::fma(float(products), w.factors[at] * scale, sum);
    }
    if (std::isnan(want)) return std::isnan(is);
    worst.add(is - want, std::fabs(want) / 256 + (2 * w.groups + 4) * 0x1p-24 * magnitude + 1e-30);
    return is == widen(to_bf16(bias == 0 ? sum : sum + bias));
}

static void check_linear(int rows, int columns, int steps, bool has_zeros) {
    const Matrix w(columns, steps, has_zeros);
    const Activations a(rows, w);
    int stride = (columns + 15) / 16 * 16;
    const Bf16* some = filled<Bf16>(columns, [] { return to_bf16(check::number()); });
    Bf16* y = check::guarded<Bf16>(size_t(rows) * stride);
    const std::pair<unsigned, const Bf16*> launches[] = {{0, nullptr}, {1, some}, {6, some}, {7, nullptr}};
    for (auto [seed, bias] : launches) {
        std::memset((void*)y, 0xff, size_t(rows) * stride * 2);
        check::run(coded_linear, (rows + ROWS - 1) / ROWS, (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, THREADS, STAGES * CODED_STAGE_BYTES, seed,
                   a.x, w.packed, w.records, a.scales, bias, y, rows, columns, a.bytes, w.groups, stride);
        check::Worst worst;
        bool right = true;
        for (int row = 0; row < rows; row++)
            for (int c = 0; c < columns; c++)
                right &= is_right(widen(y[size_t(row) * stride + c]), a, row, w, c, bias ? widen(bias[c]) : 0.0f, worst);
        check::expect(right && worst.fine(), "coded_linear, %d x %d x %d, %d groups, %s, %s, seed %u: %s, %.2f of the error allowed", rows, columns,
                      w.depth, w.groups, has_zeros ? "zero points" : "none", bias ? "bias" : "no bias", seed, right ? "same bits" : "WRONG BITS",
                      worst.part);
    }
}

// Rows of three experts, one of which has none, another one more than a tile.
static void check_grouped(int columns, int steps) {
    const int counts[] = {3, 0, ROWS + 2};
    const Matrix w(3 * columns, steps, true);
    int sorted = counts[0] + counts[2], most = sorted / ROWS + 3, tokens = sorted / 2 + 1;
    const Bf16* some = filled<Bf16>(3 * columns, [] { return to_bf16(check::number()); });
    RowTile* tiles = check::guarded<RowTile>(most);
    u32* count = check::guarded<u32>(1);
    u32* picked = check::guarded<u32>(sorted);
    std::vector<u32> expert_of;
    *count = 0;
    for (u32 e = 0; e < 3; e++)
        for (int done = 0; done < counts[e];) {
            u32 first = u32(expert_of.size()), size = u32(std::min(ROWS, counts[e] - done));
            tiles[(*count)++] = RowTile{e, first, first + size};
            for (u32 i = 0; i < size; i++) expert_of.push_back(e);
            done += int(size);
        }
    for (int i = 0; i < sorted; i++) picked[i] = u32((i * 7 + 3) % tokens);
    Bf16* y = check::guarded<Bf16>(size_t(sorted) * columns);
    for (bool is_picked : {true, false}) {
        const Activations a(is_picked ? tokens : sorted, w);
        const Bf16* bias = is_picked ? some : nullptr;
        std::memset((void*)y, 0xff, size_t(sorted) * columns * 2);
        check::run(grouped_coded_linear, most, (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, THREADS, STAGES * CODED_STAGE_BYTES, is_picked ? 6 : 1,
                   a.x, w.packed, w.records, a.scales, bias, y, tiles, count, is_picked ? picked : nullptr, a.rows, columns, a.bytes, w.groups);
        check::Worst worst;
        bool right = true;
        for (int row = 0; row < sorted; row++)
            for (int c = 0; c < columns; c++) {
                int feature = int(expert_of[row]) * columns + c;
                right &= is_right(widen(y[size_t(row) * columns + c]), a, is_picked ? int(picked[row]) : row, w, feature,
                                  bias ? widen(bias[feature]) : 0.0f, worst);
            }
        check::expect(right && worst.fine(), "grouped_coded_linear, %d rows x %d x %d, %d groups, %s: %s, %.2f of the error allowed", sorted, columns,
                      w.depth, w.groups, is_picked ? "picked" : "sorted", right ? "same bits" : "WRONG BITS", worst.part);
    }
}

int main() {
    check_quantized(1, 1);
    check_quantized(5, 7);
    check_quantized(2, 64);
    // Steps of a row: less than a unit, units and a part of one, and more units than there are stages.
    const int group = GROUP_STEPS ? GROUP_STEPS : 1;
    check_linear(1, 16, group, true);
    check_linear(3, 1, group * 2, false);
    check_linear(ROWS - 1, TILE_COLUMNS + 9, group * 5, true);
    check_linear(ROWS + 2, TILE_COLUMNS - 3, group * 3, false);
    check_linear(ROWS, TILE_COLUMNS, group * 4, true);
    check_linear(9, TILE_COLUMNS * 2 + 3, (4 * STAGES / group + 2) * group, true);
    check_grouped(48, group * 3);
    check_grouped(TILE_COLUMNS + 16, group * 4);
    return check::verdict();
}
