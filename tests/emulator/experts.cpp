// router.cu, choose_experts.cu, sort_rows.cu, scale_rows.cu, grouped_linear.cu and combine_experts.cu against doubles.
#include "ptx.cuh"
#include "types.cuh"
#include "experts.cuh"
#define WIDE 0
namespace routing {
#include "../../kernels/router.cu"
const int ROUTER_THREADS = WARPS * 32, ROUTER_ROWS = ROWS, ROUTER_EXPERTS = WARPS * COLUMNS;
}  // namespace routing
#undef WARPS
#undef ROWS
#undef COLUMNS
namespace choice {
#include "../../kernels/choose_experts.cu"
const int CHOICE_ROWS = WARPS;
}  // namespace choice
#undef WARPS
namespace sorting {
#include "../../kernels/sort_rows.cu"
const int SORT_THREADS = THREADS;
}  // namespace sorting
#undef THREADS
#undef WARPS
namespace scaling {
#include "../../kernels/scale_rows.cu"
const int SCALE_THREADS = THREADS;
}  // namespace scaling
#undef THREADS
namespace combining {
#include "../../kernels/combine_experts.cu"
const int COMBINE_THREADS = THREADS;
}  // namespace combining
#undef THREADS
#include "../../kernels/grouped_linear.cu"
#include "matrix.h"

const Bf16 NOT_A_NUMBER = {0x7fc0};

static float* random_floats(size_t count, bool positive) {
    float* to = check::guarded<float>(count);
    for (size_t i = 0; i < count; i++) to[i] = positive ? std::fabs(check::number()) / 127 : check::number();
    return to;
}

static Bf16* random_bf16(size_t count) {
    Bf16* to = check::guarded<Bf16>(count);
    for (size_t i = 0; i < count; i++) to[i] = to_bf16(check::number());
    return to;
}

static void check_router(int rows, int experts, int width) {
    using namespace routing;
    const Bf16 *x = random_bf16(size_t(rows) * width), *some = random_bf16(experts);
    const float* w = random_floats(size_t(experts) * width, false);
    float* logits = check::guarded<float>(size_t(rows) * experts);
    for (const Bf16* bias : {some, (const Bf16*)nullptr}) {
        check::run(router, (rows + ROUTER_ROWS - 1) / ROUTER_ROWS, (experts + ROUTER_EXPERTS - 1) / ROUTER_EXPERTS, ROUTER_THREADS, 0, 3, x, w,
                   bias, logits, rows, experts, width);
        check::Worst worst;
        for (int row = 0; row < rows; row++)
            for (int e = 0; e < experts; e++) {
                double want = bias ? widen(bias[e]) : 0, magnitude = std::fabs(want);
                for (int k = 0; k < width; k++) {
                    double product = double(widen(x[size_t(row) * width + k])) * w[size_t(e) * width + k];
                    want += product;
                    magnitude += std::fabs(product);
                }
                worst.add(logits[size_t(row) * experts + e] - want, (width / 32 + 6) * 0x1p-24 * magnitude);
            }
        check::expect(worst.fine(), "router %d x %d x %d: %.2f of the error allowed", rows, experts, width, worst.part);
    }
}

// The experts that a row chooses, by sorting.
static std::vector<u32> choice_of(const float* logits, int experts, int per_token) {
    std::vector<u32> order;
    for (int e = 0; e < experts; e++) order.push_back(e);
    std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return logits[a] > logits[b]; });
    order.resize(per_token);
    std::sort(order.begin(), order.end());
    return order;
}

static void check_choice(int rows, int experts, int per_token) {
    using namespace choice;
    // A row has one logit more, which is none of the experts'.
    const int stride = experts + 1;
    float* logits = check::guarded<float>(size_t(rows) * stride);
    // Of few values, so that many are equal.
    for (int i = 0; i < rows * stride; i++) logits[i] = i % stride == experts ? 100 : std::round(check::number() * 8);
    const float *some = random_floats(experts, false), *some_factors = random_floats(experts, false);
    u32* chosen = check::guarded<u32>(size_t(rows) * per_token);
    float* weights = check::guarded<float>(size_t(rows) * per_token);
    auto run = [&](const float* correction, int sigmoid, int renormalized, float scale, const float* factors) {
        check::run(choose_experts, (rows + CHOICE_ROWS - 1) / CHOICE_ROWS, 1, CHOICE_ROWS * 32, 0, 3, logits, correction, chosen, weights,
                   rows, experts, stride, per_token, sigmoid, renormalized, scale, factors, 1, 1, 1);
    };
    for (int form = 0; form < 8; form++) {
        const int sigmoid = form / 2 % 2, renormalized = form % 2;
        const float *correction = form >= 4 ? some : nullptr, scale = form >= 4 ? 2.5f : 1;
        const float* factors = form % 4 == 1 ? some_factors : nullptr;
        run(correction, sigmoid, renormalized, scale, factors);
        check::Worst worst;
        bool right = true;
        for (int row = 0; row < rows; row++) {
            const float* of = logits + size_t(row) * stride;
            double all = 0;
            for (int e = 0; e < experts; e++) all += std::exp(double(of[e]));
            std::vector<double> scores;
            std::vector<float> ranked(of, of + experts);
            for (int e = 0; e < experts; e++) {
                scores.push_back(sigmoid ? 1 / (1 + std::exp(-double(of[e]))) : std::exp(double(of[e])) / all);
                if (correction) ranked[e] = float(scores[e]) + correction[e];
            }
            std::vector<u32> want = choice_of(ranked.data(), experts, per_token);
            double sum = 0;
            for (u32 e : want) sum += scores[e];
            for (int i = 0; i < per_token; i++) {
                size_t at = size_t(row) * per_token + i;
                right &= chosen[at] == want[i];
                double weight = scores[want[i]] / (renormalized ? sum : 1) * scale * (factors ? factors[want[i]] : 1);
                worst.add(weights[at] - weight, 1e-6 * std::fabs(weight));
            }
        }
        check::expect(right && worst.fine(), "choice of %d of %d, %d rows, form %d: %s, %.2f of the error allowed", per_token, experts, rows,
                      form, right ? "right" : "wrong", worst.part);
    }
    // A number that is none shows in all weights, and no expert is chosen twice.
    const float bad[] = {NAN, -NAN, INFINITY, bits_to_float(0x7fffffff)};
    for (float value : bad) {
        for (int e = 0; e < experts; e++) logits[e] = value;
        logits[(rows - 1) * stride + experts - 1] = value;
        for (int renormalized : {0, 1}) {
            run(nullptr, 0, renormalized, 1, nullptr);
            bool right = true;
            for (int i = 0; i < per_token; i++) {
                right &= chosen[i] == u32(i) && std::isnan(weights[i]);
                right &= std::isnan(weights[(rows - 1) * per_token + i]);
                right &= i == 0 || chosen[(rows - 1) * per_token + i] > chosen[(rows - 1) * per_token + i - 1];
            }
            check::expect(right, "choice of %d of %d among logits of %g", per_token, experts, value);
        }
    }
}

// Groups of experts, of which a row uses those of some.
struct Groups {
    int count, chosen, best;
};

// Scores that experts of groups that are not chosen have none above.
static std::vector<float> scores_in_groups(const float* scores, int experts, Groups groups) {
    const int size = experts / groups.count;
    std::vector<float> sums;
    for (int g = 0; g < groups.count; g++) {
        std::vector<float> own(scores + g * size, scores + (g + 1) * size);
        std::sort(own.begin(), own.end(), [](float a, float b) { return a > b; });
        float sum = 0;
        for (int i = 0; i < groups.best; i++) sum += own[i];
        sums.push_back(sum);
    }
    std::vector<u32> chosen = choice_of(sums.data(), groups.count, groups.chosen);
    std::vector<float> left(experts, -INFINITY);
    for (u32 g : chosen) std::copy(scores + g * size, scores + (g + 1) * size, left.begin() + g * size);
    return left;
}

static void check_groups(int rows, int experts, int per_token, Groups groups) {
    using namespace choice;
    float* logits = check::guarded<float>(size_t(rows) * experts);
    const float* some = random_floats(experts, false);
    u32* chosen = check::guarded<u32>(size_t(rows) * per_token);
    float* weights = check::guarded<float>(size_t(rows) * per_token);
    auto run = [&](const float* correction, int sigmoid) {
        check::run(choose_experts, (rows + CHOICE_ROWS - 1) / CHOICE_ROWS, 1, CHOICE_ROWS * 32, CHOICE_ROWS * groups.count * 4, 3, logits,
                   correction, chosen, weights, rows, experts, experts, per_token, sigmoid, 1, 2.5f, nullptr, groups.count, groups.chosen, groups.best);
    };
    for (int form = 0; form < 4; form++) {
        const int sigmoid = form % 2;
        const float* correction = form >= 2 ? some : nullptr;
        // Of few values, so that many experts and groups are equal: exactly where there are no corrections.
        for (int i = 0; i < rows * experts; i++) logits[i] = std::round(check::number() * 3);
        run(correction, sigmoid);
        check::Worst worst;
        bool right = true;
        for (int row = 0; row < rows; row++) {
            const float* of = logits + size_t(row) * experts;
            // In F32 as the kernel computes them, since what is nearly equal may be ranked either way.
            float largest = *std::max_element(of, of + experts), all = 0;
            std::vector<float> lanes(32), scores;
            for (int e = 0; e < experts; e++) lanes[e % 32] += numerator(of[e], largest, sigmoid);
            for (int step = 16; step > 0; step /= 2)
                for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
            all = lanes[0];
            for (int e = 0; e < experts; e++) scores.push_back(chosen_by(of[e], correction ? correction + e : nullptr, largest, sigmoid ? 1 : all, sigmoid));
            std::vector<float> left = scores_in_groups(scores.data(), experts, groups);
            std::vector<u32> want = choice_of(left.data(), experts, per_token);
            double sum = 0;
            auto score = [&](u32 e) { return sigmoid ? 1 / (1 + std::exp(-double(of[e]))) : std::exp(double(of[e])); };
            for (u32 e : want) sum += score(e);
            for (int i = 0; i < per_token; i++) {
                size_t at = size_t(row) * per_token + i;
                right &= chosen[at] == want[i];
                double weight = score(want[i]) / sum * 2.5;
                worst.add(weights[at] - weight, 1e-6 * weight);
            }
        }
        check::expect(right && worst.fine(), "choice of %d of %d in %d of %d groups, form %d: %s, %.2f of the error allowed", per_token, experts,
                      groups.chosen, groups.count, form, right ? "right" : "wrong", worst.part);
    }
    // Numbers that are none show in all weights, and no expert is chosen twice.
    for (float value : {NAN, -NAN, INFINITY}) {
        for (int i = 0; i < rows * experts; i++) logits[i] = i % 3 == 0 ? value : 1;
        run(some, 1);
        bool right = true;
        for (int i = 0; i < rows * per_token; i++) {
            right &= chosen[i] < u32(experts) && (i % per_token == 0 || chosen[i] > chosen[i - 1]);
            right &= std::isnan(weights[i]) == std::isnan(value);
        }
        check::expect(right, "choice in groups among logits of %g", value);
    }
}

// Rows that are sorted by expert, as sort_rows.cu gives them.
struct Sorted {
    u32 *tokens, *rows, *tile_count;
    RowTile* tiles;
    int entries, tiles_most;
};

static Sorted sorted(const std::vector<u32>& choices, int experts, int per_token, int tile_rows) {
    using namespace sorting;
    int entries = int(choices.size()), most = entries / tile_rows + (experts < entries ? experts : entries);
    Sorted to{check::guarded<u32>(entries), check::guarded<u32>(entries), check::guarded<u32>(1), check::guarded<RowTile>(most), entries, most};
    u32* chosen = check::guarded<u32>(entries);
    std::copy(choices.begin(), choices.end(), chosen);
    check::run(sort_rows, experts, 1, SORT_THREADS, experts * 4, 5, chosen, to.tokens, to.rows, to.tiles, to.tile_count, entries, per_token,
               tile_rows);
    return to;
}

static std::vector<u32> random_choices(int tokens, int experts, int per_token) {
    std::vector<u32> all;
    for (int t = 0; t < tokens; t++) {
        std::vector<float> logits;
        for (int e = 0; e < experts; e++) logits.push_back(check::number());
        std::vector<u32> own = choice_of(logits.data(), experts, per_token);
        all.insert(all.end(), own.begin(), own.end());
    }
    return all;
}

static void check_sorting(const char* name, const std::vector<u32>& choices, int experts, int per_token) {
    const int tile_rows = 8;
    Sorted is = sorted(choices, experts, per_token, tile_rows);
    std::vector<u32> order;
    for (u32 i = 0; i < choices.size(); i++) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return choices[a] < choices[b]; });
    bool right = true;
    for (u32 row = 0; row < order.size(); row++)
        right &= is.rows[order[row]] == row && is.tokens[row] == order[row] / per_token;
    u32 tile = 0, row = 0;
    for (int e = 0; e < experts; e++) {
        u32 end = row + u32(std::count(choices.begin(), choices.end(), u32(e)));
        for (; row < end; tile++) {
            u32 to = row + tile_rows < end ? row + tile_rows : end;
            const RowTile& is_tile = is.tiles[tile];
            right &= is_tile.expert == u32(e) && is_tile.first == row && is_tile.end == to;
            row = to;
        }
    }
    right &= *is.tile_count == tile && int(tile) <= is.tiles_most;
    check::expect(right, "%s: %zu rows of %d experts in %u tiles", name, choices.size(), experts, tile);
}

// Rows times weights, in the order of sorted rows.
static void check_scaled(int tokens, int experts, int per_token, int width) {
    using namespace scaling;
    Sorted of = sorted(random_choices(tokens, experts, per_token), experts, per_token, 8);
    Bf16* x = random_bf16(size_t(tokens) * width);
    float* weights = random_floats(of.entries, true);
    weights[of.entries - 1] = NAN;
    Bf16* out = check::guarded<Bf16>(size_t(of.entries) * width);
    std::memset((void*)out, 0xff, size_t(of.entries) * width * 2);
    check::run(scale_rows, of.entries, 1, SCALE_THREADS, 0, 4, x, of.rows, weights, out, per_token, width);
    bool right = true;
    for (int i = 0; i < of.entries; i++)
        for (int column = 0; column < width; column++) {
            float is = widen(out[size_t(of.rows[i]) * width + column]);
            float want = widen(to_bf16(widen(x[size_t(i / per_token) * width + column]) * weights[i]));
            right &= std::isnan(want) ? std::isnan(is) : is == want;
        }
    check::expect(right, "scaled rows of %d tokens, %d of %d experts, %d wide", tokens, per_token, experts, width);
}

// Experts' products of rows, some of which are used twice, and some by nobody.
static void check_products(const std::vector<u32>& choices, int experts, int per_token, int columns, int bytes) {
    Sorted of = sorted(choices, experts, per_token, TILE_ROWS);
    int entries = of.entries, tokens = entries / per_token, terms = bytes / SIZE;
    const u8 *x = random_matrix(entries, bytes), *w = random_matrix(experts * columns, bytes);
    const float *row_scales = random_floats(entries, true), *column_scales = random_floats(experts * columns, true);
    const Bf16* some = random_bf16(experts * columns);
    Bf16* y = check::guarded<Bf16>(size_t(entries) * columns);
    for (bool is_picked : {true, false}) {
        const Bf16* bias = is_picked ? some : nullptr;
        std::memset((void*)y, 0xff, size_t(entries) * columns * 2);
        check::run(grouped_linear, of.tiles_most, (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, 256, TILE_SHARED_BYTES, is_picked ? 6 : 1, x, w, row_scales,
                   column_scales, bias, y, of.tiles, of.tile_count, is_picked ? of.tokens : nullptr, columns, bytes);
        check::Worst worst;
        for (int i = 0; i < entries; i++) {
            u32 e = choices[i], row = of.rows[i], from = is_picked ? u32(i / per_token) : row;
            for (int c = 0; c < columns; c++) {
                size_t feature = size_t(e) * columns + c;
                double sum = 0, magnitude = 0;
                for (int k = 0; k < terms; k++) {
                    double product = element(x + size_t(from) * bytes, k) * element(w + feature * bytes, k);
                    sum += product;
                    magnitude += std::fabs(product);
                }
                double scale = FORMAT == 2 ? 1.0 : double(row_scales[from]) * column_scales[feature];
                double added = bias ? widen(bias[feature]) : 0.0, want = sum * scale + added;
                double roundings = (FORMAT == 0 ? 0 : terms) + 4;
                worst.add(widen(y[size_t(row) * columns + c]) - want,
                          std::fabs(want) / 256 + roundings * 0x1p-24 * (magnitude * scale + std::fabs(added)) + 1e-30);
            }
        }
        check::expect(worst.fine(), "grouped_linear format %d, %d tokens, %d of %d experts, %d x %d, %s: %.2f of the error allowed", FORMAT,
                      tokens, per_token, experts, columns, bytes, is_picked ? "picked" : "sorted", worst.part);
    }
}

// What combine_experts.cu reads.
struct Combination {
    int tokens, per_token, width, stride;
    const Bf16* outputs;
    const u32* rows;
    const float* weights;
    const Bf16* shared;
    const float* shared_logits;
};

static void check_combined(const Combination& c) {
    using namespace combining;
    Bf16* out = check::guarded<Bf16>(size_t(c.tokens) * c.width);
    check::run(combine_experts, c.tokens, 1, COMBINE_THREADS, 0, 2, c.outputs, c.rows, c.weights, c.shared, c.shared_logits, out, c.per_token,
               c.width, c.stride);
    check::Worst worst;
    bool shows = true;
    for (int t = 0; t < c.tokens; t++)
        for (int column = 0; column < c.width; column++) {
            double weight = c.shared_logits ? 1 / (1 + std::exp(-double(c.shared_logits[t * c.stride]))) : 1;
            double want = c.shared ? weight * widen(c.shared[size_t(t) * c.width + column]) : 0, magnitude = std::fabs(want);
            for (int i = t * c.per_token; i < (t + 1) * c.per_token; i++) {
                double term = double(widen(c.outputs[size_t(c.rows[i]) * c.width + column])) * (c.weights ? c.weights[i] : 1);
                want += term;
                magnitude += std::fabs(term);
            }
            double is = widen(out[size_t(t) * c.width + column]);
            if (std::isnan(want))
                shows &= std::isnan(is);
            else
                worst.add(is - want, std::fabs(want) / 256 + (c.per_token + 8) * 0x1p-24 * magnitude + 1e-30);
        }
    check::expect(worst.fine() && shows, "combination of %d of %d x %d, %s: %.2f of the error allowed", c.per_token, c.tokens, c.width,
                  c.shared_logits ? "shared, weighted" : c.shared ? "shared" : "none shared", worst.part);
}

static void check_combination(int tokens, int per_token, int width) {
    int entries = tokens * per_token, stride = 5;
    Bf16* outputs = random_bf16(size_t(entries) * width);
    outputs[0] = NOT_A_NUMBER;
    u32* rows = check::guarded<u32>(entries);
    for (int i = 0; i < entries; i++) rows[i] = u32((i * 7 + 3) % entries);
    const Bf16* shared = random_bf16(size_t(tokens) * width);
    // Of each token, one logit of several.
    const float* logits = random_floats(size_t(tokens) * stride, false) + stride - 1;
    Combination c{tokens, per_token, width, stride, outputs, rows, random_floats(entries, false), nullptr, nullptr};
    check_combined(c);
    c.shared = shared;
    check_combined(c);
    c.shared_logits = logits;
    check_combined(c);
    c.weights = nullptr;
    check_combined(c);
}

int main() {
    if (FORMAT == 2) {
        check_router(1, 1, 16);
        check_router(19, 21, 144);
        check_choice(5, 3, 1);
        check_choice(6, 70, 8);
        check_choice(3, 9, 9);
        check_groups(6, 64, 8, {8, 4, 2});
        check_groups(5, 6, 2, {3, 1, 1});
        check_groups(2, 12, 6, {2, 1, 2});
        // More groups than lanes, and groups larger than a warp.
        check_groups(5, 80, 5, {40, 3, 2});
        check_groups(3, 150, 6, {3, 2, 2});
        check_sorting("one row", {2}, 4, 1);
        check_sorting("rows", random_choices(300, 5, 3), 5, 3);
        check_sorting("rows of one expert", std::vector<u32>(40, 1), 3, 1);
        // More experts than threads.
        check_sorting("many experts", random_choices(20, 700, 6), 700, 6);
        check_scaled(9, 5, 2, 1032);
        check_scaled(1, 1, 1, 16);
        check_combination(9, 3, 1032);
    }
    // An expert has no row, another one has more than a tile, the last one has all the others.
    std::vector<u32> choices(131, 1);
    choices[7] = 3;
    choices[90] = 3;
    check_products(choices, 4, 1, 48, 272);
    check_products(random_choices(9, 6, 2), 6, 2, 144, 144);
    return check::verdict();
}
