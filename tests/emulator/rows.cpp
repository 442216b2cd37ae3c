// add_norm.cu, gated.cu, gate_input.cu, add_inputs.cu, quantize.cu, norm_heads.cu, embed.cu, soft_cap.cu and random_weights.cu against
// doubles.
#include "ptx.cuh"
#include "types.cuh"
#include "../../kernels/add_norm.cu"
#include "../../kernels/gated.cu"
#include "../../kernels/gate_input.cu"
#include "../../kernels/quantize.cu"
#include "../../kernels/norm_heads.cu"
#include "../../kernels/embed.cu"
#include "../../kernels/soft_cap.cu"
#include "../../kernels/random_weights.cu"
#undef WARPS
#include "../../kernels/add_inputs.cu"
#include "check.h"

const int COUNT = 5;
const float EPS = 1e-5f;
// Of a sum with SCALED.
const float FACTOR = 0.3f;
const Bf16 NOT_A_NUMBER = {0x7fc0}, MINUS_INFINITY = {0xff80};

static Bf16* random_rows(int rows) {
    Bf16* x = check::guarded<Bf16>(size_t(rows) * WIDTH);
    for (int i = 0; i < rows * WIDTH; i++) x[i] = to_bf16(check::number() * 3);
    return x;
}

static float* random_weight() {
    float* weight = check::guarded<float>(WIDTH);
    for (int i = 0; i < WIDTH; i++) weight[i] = check::number() * 3;
    return weight;
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

// Whether a row tells that something in it was not finite: by its scale, in BF16 by a number.
static bool tells(const Output& out, int row) {
    if (OUTPUT != 2) return std::isnan(out.scales[row]);
    bool finite = true;
    for (int i = 0; i < WIDTH; i++) finite &= std::isfinite(written(out, row, i));
    return !finite;
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

// A row less its mean, where the kernel is asked for that.
static std::vector<double> centered(std::vector<double> row) {
#if CENTERED
    double total = 0;
    for (double x : row) total += x;
    for (double& x : row) x -= total / WIDTH;
#endif
    return row;
}

// A row of a norm, not rounded.
static std::vector<double> normed(std::vector<double> row, const float* weight) {
    double squares = 0;
    for (double x : row) squares += x * x;
    for (int i = 0; i < WIDTH; i++) row[i] *= weight[i] / std::sqrt(squares / WIDTH + EPS);
    return row;
}

static std::vector<double> row_of(const Bf16* x, int row) {
    std::vector<double> to;
    for (int i = 0; i < WIDTH; i++) to.push_back(widen(x[size_t(row) * WIDTH + i]));
    return to;
}

// What a row of the residual becomes, rounded where the kernel rounds.
static std::vector<double> sum_of(const Bf16* residual, const Bf16* delta, const float* delta_weight, int row) {
    std::vector<double> x = row_of(residual, row);
    if (!delta) return x;
    std::vector<double> d = row_of(delta, row);
#if DELTA_NORM
    d = normed(d, delta_weight);
    for (int i = 0; i < WIDTH; i++) d[i] = round_bf16(float(d[i]));
#endif
    for (int i = 0; i < WIDTH; i++) x[i] = round_bf16(float(x[i] + d[i]));
    if (SCALED)
        for (double& y : x) y = round_bf16(float(y) * FACTOR);
    return x;
}

static void check_add_norm() {
    const Bf16 *before = random_rows(COUNT), *some_delta = random_rows(COUNT);
    const float *weight = random_weight(), *delta_weight = DELTA_NORM ? random_weight() : nullptr;
    const u32 picked_rows[] = {3, 1};
    for (const Bf16* delta : {some_delta, (const Bf16*)nullptr}) {
        if (DELTA_NORM && !delta) continue;
        for (const u32* picked : {(const u32*)nullptr, picked_rows}) {
            Output out;
            Bf16* residual = check::guarded<Bf16>(size_t(COUNT) * WIDTH);
            std::copy(before, before + size_t(COUNT) * WIDTH, residual);
            int rows = picked ? 2 : COUNT;
            check::run(add_norm, rows, 1, THREADS, 0, 3, residual, delta, delta_weight, weight, picked, EPS, FACTOR, out.bytes, out.scales);
            check::Worst worst;
            for (int row = 0; row < rows; row++)
                add_errors(worst, out, row, normed(centered(sum_of(before, delta, delta_weight, picked ? picked[row] : row)), weight), 1 + DELTA_NORM);
            // The kernel's scale of a delta's norm is off by some 2^-23: where that lies near the middle between two numbers of BF16,
            // it rounds the other way. One in some 2^14 does.
            int others = 0;
            bool right = true;
            for (int row = 0; row < COUNT; row++) {
                std::vector<double> got = row_of(residual, row), want = sum_of(before, picked ? nullptr : delta, delta_weight, row);
                std::vector<double> old = row_of(before, row);
                for (int i = 0; i < WIDTH; i++) {
                    others += got[i] != want[i];
                    right &= std::fabs(got[i] - want[i]) <= (std::fabs(want[i]) + std::fabs(want[i] - old[i])) / 100;
                }
            }
            right &= others <= (DELTA_NORM ? 1 + COUNT * WIDTH / 2000 : 0);
            check::expect(worst.fine() && right, "add_norm%s%s: %.2f of the error allowed, residual %s", delta ? "" : " of nothing",
                          picked ? " of picked rows" : "", worst.part, right ? "right" : "wrong");
        }
    }

    Bf16 *residual = random_rows(COUNT), *delta = random_rows(COUNT);
    delta[1 * WIDTH + WIDTH - 1] = NOT_A_NUMBER;
    delta[2 * WIDTH] = MINUS_INFINITY;
    residual[3 * WIDTH] = MINUS_INFINITY;
    std::fill(delta + 4 * WIDTH, delta + 5 * WIDTH, Bf16{0});
    Output out;
    check::run(add_norm, COUNT, 1, THREADS, 0, 3, residual, delta, delta_weight, weight, nullptr, EPS, FACTOR, out.bytes, out.scales);
    bool right = !tells(out, 0) && tells(out, 1) && tells(out, 2) && tells(out, 3) && !tells(out, 4);
    check::expect(right, "add_norm of NaN and infinity");
}

const float ALPHA = 1.702f, LIMIT = 2;

static double activated(double x) {
    const double pi = std::acos(-1.0);
    if (ACTIVATION == 3) return std::max(x, 0.0);
    if (ACTIVATION == 2) x = std::min(x, double(LIMIT));
    return ACTIVATION == 1 ? x / 2 * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)))
                           : x / (1 + std::exp(-x * (ACTIVATION == 2 ? ALPHA : 1.0)));
}

static double factor(double up) {
    return ACTIVATION == 2 ? std::max(-double(LIMIT), std::min(up, double(LIMIT))) + 1 : up;
}

static void check_gated() {
    Bf16* pairs = random_rows(2 * COUNT);
    // A row without gates has its up projection alone.
    const size_t stride = GATES + WIDTH;
    // Gates far out, some of which have a cube that F32 has not.
    const float far[8] = {-3e38f, -1e15f, -1e4f, -20, -5, 0, 20, 1e15f};
    for (int i = 0; i < 8; i++) pairs[(COUNT - 1) * stride + i] = to_bf16(far[i]);
    Output out;
    check::run(gated, COUNT, 1, THREADS, 0, 5, pairs, out.bytes, out.scales, ALPHA, LIMIT);
    check::Worst worst;
    for (int row = 0; row < COUNT; row++) {
        const Bf16 *gate = pairs + row * stride, *up = gate + GATES;
        std::vector<double> want;
        for (int i = 0; i < WIDTH; i++) want.push_back(activated(widen(gate[i])) * factor(widen(up[i])));
        add_errors(worst, out, row, want, ACTIVATION == 2 ? 3 : 2);
    }
    check::expect(worst.fine(), "gated: %.2f of the error allowed", worst.part);

    pairs[1 * stride + WIDTH - 1] = NOT_A_NUMBER;
    pairs[2 * stride] = MINUS_INFINITY;
    pairs[4 * stride - 1] = MINUS_INFINITY;
    check::run(gated, COUNT, 1, THREADS, 0, 5, pairs, out.bytes, out.scales, ALPHA, LIMIT);
    // An infinite up that is bounded is finite.
    bool right = !tells(out, 0) && tells(out, 1) && tells(out, 2) && tells(out, 3) == (ACTIVATION != 2) && !tells(out, 4);
    check::expect(right, "gated of NaN and infinity");
}

static double gelu(double x) {
    const double pi = std::acos(-1.0);
    return x / 2 * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
}

// The second of three parts of each row.
static void check_gate_input() {
    const int stride = 3 * WIDTH;
    Bf16 *gates = random_rows(COUNT), *inputs = random_rows(3 * COUNT);
    const float far[8] = {-3e38f, -1e15f, -1e4f, -20, -5, 0, 20, 1e15f};
    for (int i = 0; i < 8; i++) gates[size_t(COUNT - 1) * WIDTH + i] = to_bf16(far[i]);
    Output out;
    check::run(gate_input, COUNT, 1, THREADS, 0, 5, gates, inputs + WIDTH, stride, out.bytes, out.scales);
    check::Worst worst;
    for (int row = 0; row < COUNT; row++) {
        std::vector<double> want;
        for (int i = 0; i < WIDTH; i++)
            want.push_back(gelu(widen(gates[size_t(row) * WIDTH + i])) * widen(inputs[size_t(row) * stride + WIDTH + i]));
        add_errors(worst, out, row, want, 2);
    }
    check::expect(worst.fine(), "gate_input: %.2f of the error allowed", worst.part);
    gates[1 * WIDTH + WIDTH - 1] = NOT_A_NUMBER;
    inputs[2 * stride + WIDTH] = NOT_A_NUMBER;
    inputs[3 * stride + 2 * WIDTH] = NOT_A_NUMBER;
    check::run(gate_input, COUNT, 1, THREADS, 0, 5, gates, inputs + WIDTH, stride, out.bytes, out.scales);
    // Another layer's part does not count.
    bool right = !tells(out, 0) && tells(out, 1) && tells(out, 2) && !tells(out, 3);
    check::expect(right, "gate_input of NaN");
}

static void check_add_inputs() {
    const int layers = 3, parts = COUNT * layers;
    Bf16 *projected = random_rows(parts), *inputs = random_rows(parts);
    const std::vector<Bf16> old(inputs, inputs + size_t(parts) * WIDTH);
    const float* weight = random_weight();
    projected[size_t(7) * WIDTH + WIDTH - 1] = NOT_A_NUMBER;
    check::run(add_inputs, (parts + WARPS - 1) / WARPS, 1, WARPS * 32, 0, 4, projected, weight, inputs, parts, WIDTH, EPS, FACTOR);
    check::Worst worst;
    bool right = true;
    for (int part = 0; part < parts; part++) {
        std::vector<double> normed_part = normed(row_of(projected, part), weight), before = row_of(old.data(), part);
        for (int i = 0; i < WIDTH; i++) {
            double is = widen(inputs[size_t(part) * WIDTH + i]), want = (before[i] + normed_part[i]) * FACTOR;
            // Half a step of what is added, and of the sum and of the product, each.
            double allowed = 1.02 * (std::fabs(normed_part[i]) * FACTOR + 2 * std::fabs(want)) / 256 + 1e-30;
            if (part == 7)
                right &= std::isnan(is);
            else
                worst.add(is - want, allowed);
        }
    }
    check::expect(worst.fine() && right, "add_inputs: %.2f of the error allowed, NaN %s", worst.part, right ? "shows" : "is lost");
}

static void check_quantize() {
    Bf16* x = random_rows(COUNT);
    Output out;
    check::run(quantize, COUNT, 1, THREADS, 0, 6, x, out.bytes, out.scales);
    check::Worst worst;
    for (int row = 0; row < COUNT; row++) add_errors(worst, out, row, row_of(x, row), 0);
    check::expect(worst.fine(), "quantize: %.2f of the error allowed", worst.part);

    x[1 * WIDTH + WIDTH - 1] = NOT_A_NUMBER;
    x[2 * WIDTH] = MINUS_INFINITY;
    std::fill(x + 3 * WIDTH, x + 4 * WIDTH, Bf16{0});
    check::run(quantize, COUNT, 1, THREADS, 0, 6, x, out.bytes, out.scales);
    if (OUTPUT == 2) return;
    bool right = out.scales[0] > 0 && std::isnan(out.scales[1]) && std::isnan(out.scales[2]) && out.scales[3] == 0;
    check::expect(right, "scales of a row, with NaN, with infinity, of zeros: %g %g %g %g", out.scales[0], out.scales[1], out.scales[2],
                  out.scales[3]);
}

// Heads in the middle of longer rows, which stay as they are on both sides.
static void check_norm_heads() {
    const int before = 16, stride = before + WIDTH + 8;
    Bf16* rows = check::guarded<Bf16>(size_t(COUNT) * stride);
    for (int i = 0; i < COUNT * stride; i++) rows[i] = to_bf16(check::number() * 3);
    rows[stride + before + WIDTH - 1] = NOT_A_NUMBER;
    const std::vector<Bf16> old(rows, rows + size_t(COUNT) * stride);
    const float* weight = random_weight();
    check::run(norm_heads, COUNT, 1, THREADS, 0, 3, rows + before, weight, EPS, stride);
    check::Worst worst;
    bool stay = true, tells = true;
    for (int row = 0; row < COUNT; row++) {
        const size_t first = size_t(row) * stride;
        std::vector<double> want;
        for (int i = 0; i < WIDTH; i++) want.push_back(widen(old[first + before + i]));
        want = normed(want, weight);
        for (int i = 0; i < WIDTH; i++) {
            double is = widen(rows[first + before + i]);
            if (row == 1)
                tells &= std::isnan(is);
            else
                worst.add(is - want[i], 1.02 * std::fabs(want[i]) / 256 + 1e-30);
        }
        for (int i = 0; i < stride; i++)
            if (i < before || i >= before + WIDTH) stay &= rows[first + i].bits == old[first + i].bits;
    }
    check::expect(worst.fine() && stay && tells, "norm_heads: %.2f of the error allowed, NaN %s, neighbours %s", worst.part,
                  tells ? "shows" : "is lost", stay ? "stay" : "change");
}

static void check_embed() {
    Bf16* table = random_rows(9);
    const u32 ids[COUNT] = {0, 8, 7, 7, 2};
    const Drawn drawn[] = {{8}, {2}};
    const u32 tokens[COUNT] = {0, IS_DRAWN | 0, 7, 7, IS_DRAWN | 1};
    Bf16* out = check::guarded<Bf16>(size_t(COUNT) * WIDTH);
    const u32 none = ~0u;
    auto run = [&](float scale, u32 read_as, u32 first, u32 second, u32 third) {
        check::run(embed, (COUNT + ROWS - 1) / ROWS, 1, ROWS * 32, 0, 1, table, tokens, drawn, out, COUNT, scale, read_as, first, second, third);
    };
    run(1, 5, none, none, none);
    bool same = true;
    for (int i = 0; i < COUNT; i++) same &= !std::memcmp(out + size_t(i) * WIDTH, table + size_t(ids[i]) * WIDTH, WIDTH * 2);
    check::expect(same, "embed");
    // Tokens that are read as another one, drawn or not.
    for (u32 id : {8, 7, 2}) {
        run(1, 5, id == 8 ? id : 6, id == 7 ? id : 4, id == 2 ? id : 3);
        for (int i = 0; i < COUNT; i++)
            same &= !std::memcmp(out + size_t(i) * WIDTH, table + size_t(ids[i] == id ? 5 : ids[i]) * WIDTH, WIDTH * 2);
    }
    check::expect(same, "embed of tokens that are read as another one");

    const float scale = 59.87f;
    table[7 * WIDTH] = NOT_A_NUMBER;
    table[8 * WIDTH + WIDTH - 1] = MINUS_INFINITY;
    run(scale, 5, none, none, none);
    check::Worst worst;
    for (int row = 0; row < COUNT; row++) {
        std::vector<double> is = row_of(out, row), from = row_of(table, int(ids[row]));
        for (int i = 0; i < WIDTH; i++)
            if (std::isfinite(from[i])) worst.add(is[i] - from[i] * scale, 1.02 * std::fabs(from[i] * scale) / 256);
    }
    bool stay = std::isnan(widen(out[2 * WIDTH])) && out[1 * WIDTH + WIDTH - 1].bits == MINUS_INFINITY.bits;
    check::expect(worst.fine() && stay, "embed scaled: %.2f of the error allowed, NaN and infinity %s", worst.part,
                  stay ? "stay" : "are lost");
}

static void check_soft_cap() {
    const int rows = 3, ids = 2085, stride = 2096;
    const float cap = 30;
    float *logits = check::guarded<float>(rows * stride), special[] = {NAN, INFINITY, -INFINITY, -3e38f, 3e38f, 1e-30f};
    for (int i = 0; i < rows * stride; i++) logits[i] = check::number() * 100;
    // One row begins with them, one ends.
    std::copy(special, special + 6, logits);
    std::copy(special, special + 6, logits + 2 * stride + ids - 6);
    const std::vector<float> before(logits, logits + rows * stride);
    check::run(soft_cap, rows, (ids + 1023) / 1024, 256, 0, 2, logits, cap, ids, stride);
    check::Worst worst;
    bool stay = true;
    for (int row = 0; row < rows; row++)
        for (int at = row * stride; at < row * stride + ids; at++) {
            double x = before[at], want = cap * std::tanh(x / cap);
            if (std::isfinite(x))
                worst.add(logits[at] - want, 0x1p-21 * std::fabs(want));
            else
                stay &= std::memcmp(&logits[at], &before[at], 4) == 0;
        }
    check::expect(worst.fine() && stay, "soft_cap: %.2f of the error allowed, NaN and infinity %s", worst.part,
                  stay ? "stay" : "are lost");
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
    check_gate_input();
    check_add_inputs();
    check_quantize();
    check_norm_heads();
    check_embed();
    check_soft_cap();
    check_random_weights();
    return check::verdict();
}
