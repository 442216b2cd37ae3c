// recurrent.cu, keep_inputs.cu and gate.cu against doubles.
//
// KIND and sizes: see recurrent.cu.
#include "ptx.cuh"
#include "types.cuh"
#include "../../kernels/recurrent.cu"
#include "../../kernels/keep_inputs.cu"
#include "../../kernels/gate.cu"
#include "check.h"

typedef std::vector<double> Numbers;

const float EPS = 1e-5f;
const Bf16 NOT_A_NUMBER = {0x7fc0};
const int STATE = (CONV - 1) * CHANNELS + VALUES * KEY_DIM;
// Slots are longer than what kernels use of them.
const int STRIDE = STATE + 3, SLOTS = 4;

struct Weights {
    float *conv, *conv_bias, *decays, *decay_bias, *skips, *norm;
};

static float* numbers(int count, float scale) {
    float* x = check::guarded<float>(count);
    for (int i = 0; i < count; i++) x[i] = check::number() * scale;
    return x;
}

static Bf16* random_rows(int tokens) {
    Bf16* rows = check::guarded<Bf16>(size_t(tokens) * WIDTH);
    for (int i = 0; i < tokens * WIDTH; i++) rows[i] = to_bf16(check::number() * 3);
    return rows;
}

static double gated(double x) {
    return x / (1 + std::exp(-x));
}

// The channel of the convolution at a token of a sequence that begins with these rows.
static double convolved(const Bf16* rows, const Weights& w, int token, int place) {
    int channel = place - CONV_AT;
    double sum = w.conv_bias ? w.conv_bias[channel] : 0;
    for (int tap = 0; tap < CONV; tap++) {
        int at = token - (CONV - 1) + tap;
        if (at >= 0) sum += double(widen(rows[size_t(at) * WIDTH + place])) * w.conv[channel * CONV + tap];
    }
    return gated(sum);
}

// The formulas of src/device/recurrent.rs over a whole sequence, before the norm of Mamba-2: [tokens][VALUES].
static Numbers expected(const Bf16* rows, int tokens, const Weights& w) {
    Numbers out(size_t(tokens) * VALUES);
    for (int head = 0; head < VALUE_HEADS; head++) {
        std::vector<Numbers> state(KEY_DIM, Numbers(VALUE_DIM));
        for (int token = 0; token < tokens; token++) {
            const Bf16* row = rows + size_t(token) * WIDTH;
            Numbers query(KEY_DIM), key(KEY_DIM), read(VALUE_DIM);
            double query_squares = 0, key_squares = 0;
            for (int i = 0; i < KEY_DIM; i++) {
                int place = head / (VALUE_HEADS / KEY_HEADS) * KEY_DIM + i;
                query[i] = convolved(rows, w, token, Q_AT + place);
                key[i] = convolved(rows, w, token, K_AT + place);
                query_squares += query[i] * query[i];
                key_squares += key[i] * key[i];
            }
            if (KIND == 0)
                for (int i = 0; i < KEY_DIM; i++) {
                    query[i] /= std::sqrt(query_squares + 1e-6) * std::sqrt(double(KEY_DIM));
                    key[i] /= std::sqrt(key_squares + 1e-6);
                }
            double time = std::log1p(std::exp(double(widen(row[A_AT + head])) + w.decay_bias[head]));
            double decay = std::exp(-std::exp(double(w.decays[head])) * time), squares = 0;
            for (int d = 0; d < VALUE_DIM; d++) {
                double value = convolved(rows, w, token, V_AT + head * VALUE_DIM + d), seen = 0, change = time * value;
                for (int i = 0; i < KEY_DIM; i++) {
                    state[i][d] *= decay;
                    seen += state[i][d] * key[i];
                }
#if KIND == 0
                change = (value - seen) / (1 + std::exp(-double(widen(row[B_AT + head]))));
#endif
                for (int i = 0; i < KEY_DIM; i++) {
                    state[i][d] += key[i] * change;
                    read[d] += state[i][d] * query[i];
                }
                if (KIND == 1) read[d] += value * w.skips[head];
                squares += read[d] * read[d];
            }
            for (int d = 0; d < VALUE_DIM; d++) {
                if (KIND == 0) read[d] *= w.norm[d] / std::sqrt(squares / VALUE_DIM + EPS);
                out[size_t(token) * VALUES + head * VALUE_DIM + d] = read[d] * gated(widen(row[Z_AT + head * VALUE_DIM + d]));
            }
        }
    }
    return out;
}

// Runs a step, of whose sequences some have earlier tokens.
static std::vector<Bf16> run(const Bf16* rows, const std::vector<Sequence>& steps, const Weights& w, float* states, unsigned seed) {
    Sequence* sequences = check::guarded<Sequence>(steps.size());
    std::copy(steps.begin(), steps.end(), sequences);
    int tokens = 0;
    for (const Sequence& sequence : steps) tokens += int(sequence.tokens);
    Bf16* out = check::guarded<Bf16>(size_t(tokens) * VALUES);
    check::run(recurrent, unsigned(steps.size()), VALUE_HEADS, THREADS, 0, seed, rows, sequences, w.conv, w.conv_bias, w.decays,
               w.decay_bias, w.skips, w.norm, EPS, states, STRIDE, out);
    if (CONV > 1)
        check::run(keep_inputs, unsigned(steps.size()), (CHANNELS + 255) / 256, 256, 0, seed, rows, sequences, states, WIDTH, CONV_AT,
                   CHANNELS, STRIDE);
    return std::vector<Bf16>(out, out + size_t(tokens) * VALUES);
}

static bool same(const Bf16* a, const Bf16* b, size_t count) {
    return std::memcmp(a, b, count * sizeof(Bf16)) == 0;
}

// Two sequences, whole and cut in steps, in slots that hold nonsense before.
static void check_sequences(const Weights& w) {
    const int FIRST = 47, SECOND = 9;
    const Bf16* rows = random_rows(FIRST + SECOND);
    float* states = check::guarded<float>(SLOTS * STRIDE);
    std::fill(states, states + SLOTS * STRIDE, NAN);
    auto untouched = [&](int slot, int from) {
        bool stay = true;
        for (int i = from; i < STRIDE; i++) stay &= std::isnan(states[slot * STRIDE + i]);
        return stay;
    };
    std::vector<Bf16> whole = run(rows, {{0, FIRST, 2, 1}, {FIRST, SECOND, 0, 1}}, w, states, 3);
    bool stay = untouched(1, 0) && untouched(3, 0) && untouched(0, STATE) && untouched(2, STATE);
    check::Worst worst;
    for (int first : {0, FIRST}) {
        int tokens = first ? SECOND : FIRST;
        Numbers want = expected(rows + size_t(first) * WIDTH, tokens, w);
        double largest = 0;
        for (double x : want) largest = std::max(largest, std::fabs(x));
        // Half a step of BF16, and roundings of F32.
        for (size_t i = 0; i < want.size(); i++)
            worst.add(widen(whole[size_t(first) * VALUES + i]) - want[i], std::fabs(want[i]) / 256 + 2e-5 * largest);
    }
    check::expect(worst.fine() && stay, "whole sequences: %.2f of the error allowed, other memory %s", worst.part,
                  stay ? "stays" : "changes");

    // The first one in steps of some tokens, of one, of fewer than the convolution sees, of more than have their gates at once; the second one beside it, in the other order.
    std::fill(states, states + SLOTS * STRIDE, NAN);
    std::vector<Bf16> cut;
    int at = 0, step = 0;
    for (int tokens : {1, 7, 1, 2, 36}) {
        std::vector<Sequence> sequences = {{0, u32(tokens), 1, u32(at == 0)}};
        const Bf16* from = rows + size_t(at) * WIDTH;
        if (step == 2) {
            Bf16* both = check::guarded<Bf16>(size_t(SECOND + tokens) * WIDTH);
            std::copy(rows + size_t(FIRST) * WIDTH, rows + size_t(FIRST + SECOND) * WIDTH, both);
            std::copy(from, from + size_t(tokens) * WIDTH, both + size_t(SECOND) * WIDTH);
            from = both;
            sequences = {{0, SECOND, 3, 1}, {SECOND, u32(tokens), 1, 0}};
        }
        std::vector<Bf16> out = run(from, sequences, w, states, 5 + step);
        if (step == 2) {
            check::expect(same(&out[0], &whole[size_t(FIRST) * VALUES], size_t(SECOND) * VALUES), "the same bits beside another sequence");
            out.erase(out.begin(), out.begin() + SECOND * VALUES);
        }
        cut.insert(cut.end(), out.begin(), out.end());
        at += tokens;
        step++;
        if (step == 3) {
            // What a fork begins with.
            std::copy(states + STRIDE, states + 2 * STRIDE, states);
            std::vector<Bf16> fork = run(rows + size_t(at) * WIDTH, {{0, 2, 0, 0}}, w, states, 4);
            check::expect(same(&fork[0], &whole[size_t(at) * VALUES], 2 * VALUES), "the same bits from a copied slot");
        }
    }
    check::expect(at == FIRST && same(&cut[0], &whole[0], size_t(FIRST) * VALUES), "the same bits however tokens are cut");
}

// A value that is not a number shows in what its head writes from there on, and nowhere else.
static void check_not_finite(const Weights& w) {
    const int TOKENS = 5;
    Bf16* rows = random_rows(TOKENS);
    rows[2 * WIDTH + V_AT] = NOT_A_NUMBER;
    float* states = check::guarded<float>(SLOTS * STRIDE);
    std::vector<Bf16> out = run(rows, {{0, TOKENS, 0, 1}}, w, states, 6);
    bool shows = true, stays = true;
    for (int token = 0; token < TOKENS; token++)
        for (int i = 0; i < VALUES; i++) {
            bool is_nan = std::isnan(widen(out[size_t(token) * VALUES + i]));
            if (token >= 2 && (KIND == 0 ? i < VALUE_DIM : i == 0)) shows &= is_nan;
            if (token < 2 || i >= VALUE_DIM) stays &= !is_nan;
        }
    check::expect(shows && stays, "NaN of a value %s, others %s", shows ? "shows" : "is lost", stays ? "stay" : "have it, too");
}

// A decay near 1 is as exact as F32 has it, and one far from it is not lost.
static void check_decays() {
    check::Worst worst;
    for (double x : {0.0, 1e-9, 1e-6, 1e-4, 0.01, 0.3, 0.49, 0.51, 1.0, 20.0, 80.0})
        worst.add(decay_of(float(x)) - std::exp(-double(float(x))), std::exp(-x) * (x < 0.5 ? 0x1.1p-24 : 0x1p-22) + 1e-45);
    check::expect(worst.fine(), "decays: %.2f of the error allowed", worst.part);
}

static void check_gate() {
    const int VECTORS = 259;
    Bf16 *gates = check::guarded<Bf16>(VECTORS * 8), *out = check::guarded<Bf16>(VECTORS * 8);
    for (int i = 0; i < VECTORS * 8; i++) gates[i] = to_bf16(check::number() * 9), out[i] = to_bf16(check::number());
    gates[0] = to_bf16(-3e38f);
    gates[VECTORS * 8 - 1] = NOT_A_NUMBER;
    std::vector<Bf16> before(out, out + VECTORS * 8);
    check::run(gate, 2, 1, 256, 0, 3, gates, out, VECTORS);
    check::Worst worst;
    for (int i = 0; i < VECTORS * 8 - 1; i++) {
        double want = widen(before[i]) / (1 + std::exp(-double(widen(gates[i]))));
        worst.add(widen(out[i]) - want, 1.02 * std::fabs(want) / 256 + 1e-37);
    }
    bool shows = std::isnan(widen(out[VECTORS * 8 - 1]));
    check::expect(worst.fine() && shows, "gate: %.2f of the error allowed, NaN %s", worst.part, shows ? "shows" : "is lost");
}

int main() {
    Weights w = {numbers(CHANNELS * CONV, 1), numbers(CHANNELS, 0.5f), numbers(VALUE_HEADS, 2), numbers(VALUE_HEADS, 1),
                 numbers(VALUE_HEADS, 2), numbers(VALUE_DIM, 2)};
    check_sequences(w);
    w.conv_bias = nullptr;
    check_sequences(w);
    check_not_finite(w);
    check_decays();
    check_gate();
    return check::verdict();
}
