// add_norm.cu, gated.cu, quantize.cu, embed.cu and random_weights.cu against doubles.
#include "ptx.cuh"
#include "types.cuh"
#include "../../kernels/add_norm.cu"
#include "../../kernels/gated.cu"
#include "../../kernels/quantize.cu"
#include "../../kernels/embed.cu"
#include "../../kernels/random_weights.cu"
#include "check.h"

const int COUNT = 5;
const float EPS = 1e-5f;

static Bf16* random_rows(int rows) {
    Bf16* x = check::guarded<Bf16>(size_t(rows) * WIDTH);
    for (int i = 0; i < rows * WIDTH; i++) x[i] = to_bf16(check::number() * 3);
    return x;
}

// Where kernels write.
struct Output {
    u8* bytes = check::guarded<u8>(size_t(COUNT) * WIDTH * (OUTPUT == 2 ? 2 : 1));
    float* scales = check::guarded<float>(COUNT);
};

static double written(const Output& out, int row, int i) {
    size_t at = size_t(row) * WIDTH + i;
#if OUTPUT == 0
    return double(i8(out.bytes[at])) * out.scales[row];
#elif OUTPUT == 1
    return double(e4m3_to_float(out.bytes[at])) * out.scales[row];
#else
    return widen(((const Bf16*)out.bytes)[at]);
#endif
}

// Errors of a row that was rounded to BF16 `roundings` times: half a step of 2^-7 each. INT8 adds half a step of 1/127 of the row's
// largest; E4M3 half a step of 2^-3 of the number, or of 2^-9 below its smallest power, where 448 is the largest. What is left of
// 2 % is for the largest and for roundings of F32.
static void add_errors(check::Worst& worst, const Output& out, int row, const std::vector<double>& want, int roundings) {
    double largest = 0;
    for (double x : want) largest = std::max(largest, std::fabs(x));
    for (int i = 0; i < WIDTH; i++) {
        double x = std::fabs(want[i]), allowed = roundings * x / 256;
        if (OUTPUT == 0) allowed += largest / 127 / 2;
        if (OUTPUT == 1) allowed += std::max(x / 16, largest / 448 / 1024);
        worst.add(written(out, row, i) - want[i], 1.02 * allowed + 1e-30);
    }
}

static std::vector<double> sum_of(const Bf16* residual, const Bf16* delta, int row) {
    std::vector<double> sum;
    for (int i = 0; i < WIDTH; i++) {
        float x = widen(residual[size_t(row) * WIDTH + i]);
        sum.push_back(delta ? round_bf16(x + widen(delta[size_t(row) * WIDTH + i])) : x);
    }
    return sum;
}

static std::vector<double> normed(std::vector<double> row, const Bf16* weight) {
    double squares = 0;
    for (double x : row) squares += x * x;
    for (int i = 0; i < WIDTH; i++) row[i] *= widen(weight[i]) / std::sqrt(squares / WIDTH + EPS);
    return row;
}

static void check_add_norm() {
    const Bf16 *before = random_rows(COUNT), *some_delta = random_rows(COUNT), *weight = random_rows(1);
    const u32 picked_rows[] = {3, 1};
    for (const Bf16* delta : {some_delta, (const Bf16*)nullptr})
        for (const u32* picked : {(const u32*)nullptr, picked_rows}) {
            Output out;
            Bf16* residual = check::guarded<Bf16>(size_t(COUNT) * WIDTH);
            std::copy(before, before + size_t(COUNT) * WIDTH, residual);
            int rows = picked ? 2 : COUNT;
            check::run(add_norm, rows, 1, THREADS, 0, 3, residual, delta, weight, picked, EPS, out.bytes, out.scales);
            check::Worst worst;
            for (int row = 0; row < rows; row++)
                add_errors(worst, out, row, normed(sum_of(before, delta, picked ? picked[row] : row), weight), 2);
            bool right = true;
            for (int row = 0; row < COUNT; row++) {
                std::vector<double> want = sum_of(before, picked ? nullptr : delta, row);
                for (int i = 0; i < WIDTH; i++) right &= widen(residual[size_t(row) * WIDTH + i]) == want[i];
            }
            check::expect(worst.fine() && right, "add_norm%s%s: %.2f of the error allowed, residual %s", delta ? "" : " of nothing",
                          picked ? " of picked rows" : "", worst.part, right ? "right" : "wrong");
        }
}

static void check_gated() {
    const Bf16* pairs = random_rows(2 * COUNT);
    Output out;
    check::run(gated, COUNT, 1, THREADS, 0, 5, pairs, out.bytes, out.scales);
    check::Worst worst;
    for (int row = 0; row < COUNT; row++) {
        const Bf16 *gate = pairs + size_t(row) * 2 * WIDTH, *up = gate + WIDTH;
        std::vector<double> want;
        for (int i = 0; i < WIDTH; i++) want.push_back(widen(gate[i]) / (1 + std::exp(-double(widen(gate[i])))) * widen(up[i]));
        add_errors(worst, out, row, want, 2);
    }
    check::expect(worst.fine(), "gated: %.2f of the error allowed", worst.part);
}

static void check_quantize() {
    Bf16* x = random_rows(COUNT);
    Output out;
    check::run(quantize, COUNT, 1, THREADS, 0, 6, x, out.bytes, out.scales);
    check::Worst worst;
    for (int row = 0; row < COUNT; row++) add_errors(worst, out, row, sum_of(x, nullptr, row), 0);
    check::expect(worst.fine(), "quantize: %.2f of the error allowed", worst.part);

    x[1 * WIDTH + WIDTH - 1] = Bf16{0x7fc0};
    x[2 * WIDTH] = Bf16{0xff80};
    std::fill(x + 3 * WIDTH, x + 4 * WIDTH, Bf16{0});
    check::run(quantize, COUNT, 1, THREADS, 0, 6, x, out.bytes, out.scales);
    if (OUTPUT == 2) return;
    bool right = out.scales[0] > 0 && std::isnan(out.scales[1]) && std::isnan(out.scales[2]) && out.scales[3] == 0;
    check::expect(right, "scales of a row, with NaN, with infinity, of zeros: %g %g %g %g", out.scales[0], out.scales[1], out.scales[2],
                  out.scales[3]);
}

static void check_embed() {
    const Bf16* table = random_rows(9);
    const u32 ids[COUNT] = {0, 8, 7, 7, 2};
    const Drawn drawn[] = {{8}, {2}};
    const u32 tokens[COUNT] = {0, IS_DRAWN | 0, 7, 7, IS_DRAWN | 1};
    Bf16* out = check::guarded<Bf16>(size_t(COUNT) * WIDTH);
    check::run(embed, (COUNT + ROWS - 1) / ROWS, 1, ROWS * 32, 0, 1, table, tokens, drawn, out, COUNT);
    bool same = true;
    for (int i = 0; i < COUNT; i++) same &= !std::memcmp(out + size_t(i) * WIDTH, table + size_t(ids[i]) * WIDTH, WIDTH * 2);
    check::expect(same, "embed");
}

// What src/device/random.rs gives for this seed, and for none beyond the end.
static void check_random_weights() {
    const int MADE = 4104;
    Bf16* out = check::guarded<Bf16>(MADE);
    check::run(random_weights, 3, 1, 256, 0, 1, out, u64(7), u64(1) << 33, u64(MADE), 0.5f);
    int wrong = 0;
    for (int i = 0; i < MADE; i++) {
        u64 z = 7 + ((u64(1) << 33) + i + 1) * 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        wrong += std::fabs(widen(out[i]) - 0.5 * (double((z ^ z >> 31) >> 40) / (1 << 23) - 1)) > 0.5 / 256;
    }
    check::expect(wrong == 0, "random weights: %d wrong", wrong);
}

int main() {
    check_add_norm();
    check_gated();
    check_quantize();
    check_embed();
    check_random_weights();
    return check::verdict();
}
