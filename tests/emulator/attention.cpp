// rope_store.cu, attention.cu or where SM90 is defined attention_sm90.cu, and merge.cu: a step of several sequences over paged keys and
// values, against sums in doubles. With BLOCK_BYTES and BLOCK_SCALES, as in kv_blocks.cuh, the layer is the second one of each block. With
// QUERIES_ALONE, rows of the step's tokens have nothing but queries, as in a layer that reads what an earlier one has stored. With LATENT, queries and
// keys are taken as they are: latents.cpp is about what makes them.
#ifdef SM90
#include "hopper.cuh"
#else
#include "ptx.cuh"
#endif
#include "types.cuh"
#include "kv_blocks.cuh"
#ifndef VALUE_NORM
#define VALUE_NORM 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#if !LATENT
namespace rope {
#include "../../kernels/rope_store.cu"
}
#endif
#ifdef QUERIES_ALONE
#undef ROW_HEADS
#define ROW_HEADS HEADS
#define rope_store rotate_alone
namespace alone {
#include "../../kernels/rope_store.cu"
}
#undef rope_store
#endif
#undef WARPS
namespace attend {
#ifdef SM90
#include "../../kernels/attention_sm90.cu"
const auto kernel = attention_sm90;
#else
#include "../../kernels/attention.cu"
#define SHARED_BYTES (STAGES * STAGE_BYTES + QUERY_BYTES + EXCHANGE_BYTES)
const auto kernel = attention;
#endif
const int BLOCK_THREADS = THREADS;
}
#undef THREADS
#undef GROUP
// It has the values' dimensions alone.
#pragma push_macro("HEAD_DIM")
#if LATENT
#undef HEAD_DIM
#define HEAD_DIM VALUE_DIM
#endif
namespace merging {
#include "../../kernels/merge.cu"
}
#pragma pop_macro("HEAD_DIM")
#include "check.h"

// Heads that keys have, and those of a token's row, whether attention reads them or not.
const int KEY_HEADS = LATENT ? 1 : KV_HEADS, TOKEN_HEADS = HEADS + (LATENT ? 1 : 2 * KV_HEADS);
const int TOKEN = TOKEN_HEADS * HEAD_DIM;
// Numbers of a row that attention reads.
const int ROW = ROW_HEADS * HEAD_DIM;
const int LAYER = IS_ALONE ? 0 : 1;
const int HALF_DIM = HEAD_DIM / 2;
const int LONGEST = 320;
const float EPS = 1e-6f, VALUE_EPS = 1e-2f;
const float SCALE = 1 / std::sqrt(float(HEAD_DIM));
#if STORE != 2
const double LARGEST = STORE == 0 ? 127 : 448;
#endif

// Positions stored by earlier steps, and tokens of this one; some end inside a block, one at its end.
struct Sequence {
    int before, fresh;
};
const std::vector<Sequence> SEQUENCES = {{0, 20}, {150, 1}, {60, 20}, {130, 3}, {300, 2}, {63, 1}, {0, 1}, {140, 1}};
// Sequences that have their first positions in common, and how many; a window shares none.
const int SHARERS[] = {4, 7};
const int SHARED = WINDOW == 0 ? 128 : 0;

// All tokens of all sequences, and the pool.
struct World {
    std::vector<u32> positions, slots, tables;
    // Of each sequence: its first token, and where its table starts.
    std::vector<int> first_token, first_table;
    std::vector<Bf16> raw, rotated;
    std::vector<float> rotations, q_norm, k_norm;
    std::vector<u8> keys, values;
    std::vector<float> key_scales, value_scales;
};

// Where the layer's numbers begin in the pool.
const size_t FIRST_BYTE = size_t(LAYER) * KEY_HEADS * HEAD_BYTES, FIRST_SCALE = size_t(LAYER) * KEY_HEADS * BLOCK;

static void store(World& world, Bf16* qkv, const u32* positions, const u32* slots, int tokens) {
#if LATENT
    for (int token = 0; token < tokens; token++)
        std::memcpy(&world.keys[size_t(slots[token] / BLOCK) * BLOCK_BYTES + FIRST_BYTE + slots[token] % BLOCK * HEAD_DIM * SIZE],
                    &qkv[size_t(token) * TOKEN + HEADS * HEAD_DIM], HEAD_DIM * SIZE);
    (void)positions;
#else
    check::run(rope::rope_store, tokens, (HEADS + 2 * KV_HEADS + 3) / 4, 128, 0, 3, qkv, world.rotations.data(), positions, slots,
               world.q_norm.data(), world.k_norm.data(), EPS, VALUE_EPS, world.keys.data() + FIRST_BYTE, world.values.data() + FIRST_BYTE,
               world.key_scales.data() + FIRST_SCALE, world.value_scales.data() + FIRST_SCALE);
#endif
}

static World make_world() {
    World world;
    u32 next = 1;
    for (const Sequence& s : SEQUENCES) {
        world.first_token.push_back(int(world.positions.size()));
        world.first_table.push_back(int(world.tables.size()));
        int count = s.before + s.fresh, shared = world.first_token.size() - 1 == SHARERS[1] ? SHARED / BLOCK : 0;
        for (int block = 0; block < (count + BLOCK - 1) / BLOCK; block++)
            world.tables.push_back(block < shared ? world.tables[world.first_table[SHARERS[0]] + block] : next++);
        for (int p = 0; p < count; p++) {
            world.positions.push_back(p);
            world.slots.push_back(world.tables[world.first_table.back() + p / BLOCK] * BLOCK + p % BLOCK);
        }
    }
    world.raw.resize(world.positions.size() * TOKEN);
    for (auto& x : world.raw) x = to_bf16(check::number() * 2);
    auto first = [&](int s) { return world.raw.begin() + size_t(world.first_token[s]) * TOKEN; };
    std::copy_n(first(SHARERS[0]), SHARED * TOKEN, first(SHARERS[1]));
    // BF16 would make each of them less, by half a step.
    for (auto* norm : {&world.q_norm, &world.k_norm})
        for (int d = 0; d < HEAD_DIM; d++)
            norm->push_back(bits_to_float((float_to_bits(1 + check::number() / 2) & ~0xffffu) | 0x7fff));
    for (int p = 0; p < LONGEST; p++)
        for (int d = 0; d < HEAD_DIM; d++)
            world.rotations.push_back(d < HALF_DIM ? std::cos(p * 0.01f * d) : std::sin(p * 0.01f * (d - HALF_DIM)));
    // Whatever nobody writes is NaN: bytes of 0xff are, in every format but INT8.
    world.keys.assign(size_t(next) * BLOCK_BYTES, 0xff);
    world.values.assign(size_t(next) * BLOCK_BYTES, 0xff);
    world.key_scales.assign(size_t(next) * BLOCK_SCALES, bits_to_float(0xffffffff));
    world.value_scales.assign(size_t(next) * BLOCK_SCALES, bits_to_float(0xffffffff));
    world.rotated = world.raw;
    store(world, world.rotated.data(), world.positions.data(), world.slots.data(), int(world.positions.size()));
    return world;
}

static double number_at(const std::vector<u8>& pool, size_t at) {
#if STORE == 0
    return i8(pool[at]);
#elif STORE == 1
    return e4m3_to_float(pool[at]);
#else
    return widen(((const Bf16*)pool.data())[at]);
#endif
}

// Where the numbers of a token's head begin in the pool, which has as many bytes for each, and its scale.
static size_t number_of(const World& world, int token, int kv) {
    if (LATENT) kv = 0;
    return (size_t(world.slots[token] / BLOCK) * BLOCK_BYTES + FIRST_BYTE + size_t(kv) * HEAD_BYTES) / SIZE;
}
static size_t scale_of(const World& world, int token, int kv) {
    return size_t(world.slots[token] / BLOCK) * BLOCK_SCALES + FIRST_SCALE + kv * BLOCK + world.slots[token] % BLOCK;
}

// Dimension `d` of a stored key or value.
static double key_at(const World& world, int token, int kv, int d) {
    size_t at = number_of(world, token, kv) + world.slots[token] % BLOCK * HEAD_DIM + d;
    return number_at(world.keys, at) * (STORE == 2 ? 1 : world.key_scales[scale_of(world, token, kv)]);
}
static double value_at(const World& world, int token, int kv, int d) {
    if (LATENT) return key_at(world, token, kv, d);
    size_t at = number_of(world, token, kv) + size_t(d) * BLOCK + world.slots[token] % BLOCK;
    return number_at(world.values, at) * (STORE == 2 ? 1 : world.value_scales[scale_of(world, token, kv)]);
}

#if !LATENT
// A head as it should be stored, and how far off it may be before it is quantized.
struct Head {
    double x[HEAD_DIM], allowed[HEAD_DIM];
};

// BF16 has a step of 2^-7, so half a step of 2^-8 of a number: the norm rounds twice, the rotation once.
static Head rotated_head(const World& world, int token, int head) {
    const Bf16* from = &world.raw[size_t(token) * TOKEN + size_t(head) * HEAD_DIM];
    Head to;
    for (int d = 0; d < HEAD_DIM; d++) {
        to.x[d] = widen(from[d]);
        to.allowed[d] = 0;
    }
    double squares = 0;
    for (double x : to.x) squares += x * x;
    if (head >= HEADS + KV_HEADS) {
        for (int d = 0; VALUE_NORM && d < HEAD_DIM; d++) {
            to.x[d] /= std::sqrt(squares / HEAD_DIM + VALUE_EPS);
            to.allowed[d] = 1.02 * std::fabs(to.x[d]) / 256;
        }
        return to;
    }
    const float* norm = head < HEADS ? world.q_norm.data() : world.k_norm.data();
    for (int d = 0; d < HEAD_DIM; d++) to.x[d] *= norm[d] / std::sqrt(squares / HEAD_DIM + EPS);
    const float* rotation = &world.rotations[size_t(world.positions[token]) * HEAD_DIM];
    for (int d = 0; d < HALF_DIM; d++) {
        double a = to.x[d], b = to.x[HALF_DIM + d], cos = rotation[d], sin = rotation[HALF_DIM + d];
        to.x[d] = a * cos - b * sin;
        to.x[HALF_DIM + d] = b * cos + a * sin;
        for (int i : {d, HALF_DIM + d}) to.allowed[i] = 1.02 * (2 * (std::fabs(a) + std::fabs(b)) + std::fabs(to.x[i])) / 256;
    }
    return to;
}

// What the format adds to the error: half a step of 1/127 of the largest in INT8, half a step of 2^-3 of the number in E4M3, or of
// 2^-9 below its smallest power, where 448 is the largest.
static double quantized(double x, double largest) {
#if STORE == 0
    return 1.02 * largest / 127 / 2;
#elif STORE == 1
    return 1.02 * std::max(std::fabs(x) / 16, largest / 448 / 1024);
#else
    return 0;
#endif
}

static void check_store(const World& world) {
    check::Worst queries, keys, values;
    // Of all queries: roundings of numbers cancel out, but not those of weights, which are F32.
    double product = 0, squares = 0;
    for (int token = 0; token < int(world.positions.size()); token++)
        for (int head = 0; head < HEADS + 2 * KV_HEADS; head++) {
            Head want = rotated_head(world, token, head);
            double largest = 0;
            for (double x : want.x) largest = std::max(largest, std::fabs(x));
            for (int d = 0; d < HEAD_DIM; d++) {
                double allowed = want.allowed[d] + quantized(want.x[d], largest);
                if (head < HEADS) {
                    double is = widen(world.rotated[size_t(token) * TOKEN + head * HEAD_DIM + d]);
                    queries.add(is - want.x[d], want.allowed[d]);
                    product += is * want.x[d];
                    squares += want.x[d] * want.x[d];
                } else if (head < HEADS + KV_HEADS) {
                    keys.add(key_at(world, token, head - HEADS, d) - want.x[d], allowed);
                } else {
                    values.add(value_at(world, token, head - HEADS - KV_HEADS, d) - want.x[d], allowed);
                }
            }
        }
    double shift = product / squares - 1;
    bool fine = queries.fine() && keys.fine() && values.fine() && std::fabs(shift) < 0x1p-12;
    check::expect(fine, "rope_store: %.2f, %.2f, %.2f of the error allowed, shifted by %.5f", queries.part, keys.part, values.part,
                  shift);
}

#endif

// Blocks that no query of the step sees go back, and hold what others leave there.
static void give_back(World& world) {
    if (WINDOW == 0) return;
    for (size_t s = 0; s < SEQUENCES.size(); s++)
        for (int block = 0; (block + 1) * BLOCK <= SEQUENCES[s].before - WINDOW + 1; block++) {
            u32& entry = world.tables[world.first_table[s] + block];
            const size_t bytes = BLOCK_BYTES, scales = BLOCK_SCALES;
            std::memset(&world.keys[entry * bytes], 0xff, bytes);
            std::memset(&world.values[entry * bytes], 0xff, bytes);
            std::memset(&world.key_scales[entry * scales], 0xff, scales * 4);
            std::memset(&world.value_scales[entry * scales], 0xff, scales * 4);
            entry = 0;
        }
}

// The step's tokens, and what attention is asked to do with them.
struct Step {
    std::vector<Bf16> qkv;
    std::vector<u32> positions, queries;
    // Of each token: its sequence.
    std::vector<int> sequences;
    std::vector<attend::Item> items;
    std::vector<u32> merged, first_part;
    std::vector<merging::Part> parts;
    u32 part_rows = 0;
};

static Step make_tokens(const World& world) {
    Step step;
    for (int s = 0; s < int(SEQUENCES.size()); s++)
        for (int i = 0; i < SEQUENCES[s].fresh; i++) {
            int position = SEQUENCES[s].before + i;
            auto from = world.rotated.begin() + size_t(world.first_token[s] + position) * TOKEN;
            step.qkv.insert(step.qkv.end(), from, from + ROW);
            step.positions.push_back(position);
            step.sequences.push_back(s);
        }
    return step;
}

// Queries that an item has room for.
const int MOST_QUERIES = ROW_WARPS * 16 / (HEADS / KV_HEADS);

// An item of these tokens, which all see what the first one's sequence has from `from` to before `to`. As a part where `parts` says
// which each token has.
static void add_item(const World& world, Step& step, const std::vector<u32>& tokens, u32 from, u32 to,
                     std::vector<std::vector<merging::Part>>* parts) {
    u32 table = world.first_table[step.sequences[tokens[0]]], part = parts ? step.part_rows : NONE;
    u32 rows = u32(tokens.size()) * (HEADS / KV_HEADS);
    if (parts) step.part_rows += rows;
    step.items.push_back({u32(step.queries.size()), u32(tokens.size()), table, from, to, part});
    step.queries.insert(step.queries.end(), tokens.begin(), tokens.end());
    for (u32 j = 0; parts && j < tokens.size(); j++) (*parts)[tokens[j]].push_back({part, j, rows});
}

// First position that a token sees, rounded down to a block.
static u32 first_seen(const Step& step, u32 token) {
    return WINDOW == 0 ? 0 : std::max(0, int(step.positions[token]) - WINDOW + 1) / BLOCK * BLOCK;
}

// Each sequence's tokens in whole items of `most` at most.
static void add_whole(const World& world, Step& step, int sequence, int most) {
    std::vector<u32> tokens;
    for (u32 token = 0; token < step.sequences.size(); token++) {
        if (step.sequences[token] == sequence) tokens.push_back(token);
        bool last = token + 1 == step.sequences.size() || int(tokens.size()) == most;
        if (!last || tokens.empty()) continue;
        add_item(world, step, tokens, first_seen(step, tokens[0]), step.positions[tokens.back()] + 1, nullptr);
        tokens.clear();
    }
}

// Even sequences in whole items, odd ones in parts of a block, and those that share their first positions in a part of them all for
// these, and each in one for its own.
static Step make_step(const World& world) {
    Step step = make_tokens(world);
    std::vector<std::vector<merging::Part>> parts(step.positions.size());
    std::vector<std::vector<u32>> tokens(SEQUENCES.size());
    for (u32 token = 0; token < step.sequences.size(); token++) tokens[step.sequences[token]].push_back(token);
    auto shares = [](int s) { return SHARED > 0 && std::find(std::begin(SHARERS), std::end(SHARERS), s) != std::end(SHARERS); };
    std::vector<u32> sharing;
    for (int s = 0; s < int(SEQUENCES.size()); s++) {
        if (!shares(s) && s % 2 == 0) add_whole(world, step, s, MOST_QUERIES);
        for (size_t i = 0; (shares(s) || s % 2 == 1) && i < tokens[s].size(); i += MOST_QUERIES) {
            std::vector<u32> some(tokens[s].begin() + i, tokens[s].begin() + std::min(tokens[s].size(), i + MOST_QUERIES));
            u32 to = step.positions[some.back()] + 1;
            if (shares(s)) {
                sharing.insert(sharing.end(), some.begin(), some.end());
                add_item(world, step, some, SHARED, to, &parts);
            } else
                for (u32 at = first_seen(step, some[0]); at < to; at += BLOCK)
                    add_item(world, step, some, at, std::min<u32>(to, at + BLOCK), &parts);
        }
    }
    for (size_t i = 0; i < sharing.size(); i += MOST_QUERIES)
        add_item(world, step, {sharing.begin() + i, sharing.begin() + std::min(sharing.size(), i + MOST_QUERIES)}, 0, SHARED, &parts);
    for (u32 token = 0; token < parts.size(); token++) {
        if (parts[token].empty()) continue;
        step.merged.push_back(token);
        step.first_part.push_back(u32(step.parts.size()));
        step.parts.insert(step.parts.end(), parts[token].begin(), parts[token].end());
    }
    step.first_part.push_back(u32(step.parts.size()));
    return step;
}

// What attention makes of a step: results, and parts of them.
struct Results {
    std::vector<Bf16> out;
    std::vector<float> sums, states;
};

// A score per query head, where there are sinks: far above the positions' scores, among them, far below.
static const Bf16* sinks() {
#if SINKS
    static const std::vector<Bf16> all = [] {
        std::vector<Bf16> all;
        for (int head = 0; head < HEADS; head++) all.push_back(to_bf16(float(head % 7 * 2 - 6) + check::number()));
        return all;
    }();
    return all.data();
#else
    return nullptr;
#endif
}

static Results attend_items(const World& world, const Step& step, unsigned seed) {
    const Bf16 unwritten = {0x7fff};
    size_t rows = size_t(step.part_rows) * KV_HEADS;
    Results results{std::vector<Bf16>(step.positions.size() * HEADS * VALUE_DIM, unwritten), std::vector<float>(rows * VALUE_DIM + 1, NAN),
                    std::vector<float>(rows * 2 + 1, NAN)};
    check::run(attend::kernel, unsigned(step.items.size()), KV_HEADS, attend::BLOCK_THREADS, SHARED_BYTES, seed, step.qkv.data(),
               world.keys.data() + FIRST_BYTE, world.values.data() + FIRST_BYTE, world.key_scales.data() + FIRST_SCALE,
               world.value_scales.data() + FIRST_SCALE, step.items.data(),
               step.queries.data(), step.positions.data(), world.tables.data(), SCALE, sinks(), results.out.data(), results.sums.data(),
               results.states.data());
    return results;
}

static std::vector<Bf16> attend_all(const World& world, const Step& step, unsigned seed) {
    Results results = attend_items(world, step, seed);
    check::run(merging::merge, unsigned(step.merged.size()), 1, 128, 0, seed, step.merged.data(), step.first_part.data(),
               step.parts.data(), results.sums.data(), results.states.data(), sinks(), results.out.data());
    return results.out;
}

// A query's head as the product takes it: in eight bits quantized with a scale of its own.
static std::vector<double> query_of(const Step& step, int token, int head) {
    std::vector<double> q;
    for (int d = 0; d < HEAD_DIM; d++) q.push_back(widen(step.qkv[size_t(token) * ROW + head * HEAD_DIM + d]));
#if STORE != 2
    float most = 0;
    for (double x : q) most = std::max(most, float(std::fabs(x)));
    for (double& x : q) {
        float scaled = float(x) * (float(LARGEST) / most);
#if STORE == 0
        x = std::nearbyint(scaled) * (most / LARGEST);
#else
        x = e4m3_to_float(float_to_e4m3(scaled)) * (most / LARGEST);
#endif
    }
#endif
    return q;
}

// The deviation of an even distribution over the rounding error of a weight. BF16 and E4M3: half a step, 2^-8 or 2^-4 of it, in E4M3
// no less than 2^-10 where 448 is the span's largest; INT8: half a step of 1/127 of the span's largest.
static double weight_deviation(double weight, double largest) {
#if STORE == 0
    double half_step = largest / 127 / 2;
#elif STORE == 1
    double half_step = std::max(weight / 16, largest / 448 / 1024);
#else
    double half_step = weight / 256;
#endif
    return half_step / std::sqrt(3.0);
}

// Errors of a head of a token. Allowed are six deviations of what the weights' rounding makes together, half a step of the result in
// BF16, and what roundings of 2^-24 in sums of F32 make of the scores.
static void head_errors(const World& world, const Step& step, const std::vector<Bf16>& out, int token, int head, check::Worst& worst) {
    int s = step.sequences[token], position = int(step.positions[token]), kv = head / (HEADS / KV_HEADS);
    int first = WINDOW == 0 ? 0 : std::max(0, position - WINDOW + 1), count = position + 1 - first;
    std::vector<double> q = query_of(step, token, head), weights(count), deviations(count);
    double largest = -1e300, score_error = 0, total = 0;
    for (int j = 0; j < count; j++) {
        double score = 0, magnitude = 0;
        for (int d = 0; d < HEAD_DIM; d++) {
            double product = q[d] * key_at(world, world.first_token[s] + first + j, kv, d) * SCALE;
            score += product;
            magnitude += std::fabs(product);
        }
#ifdef SOFT_CAP
        const double cap = bits_to_float(SOFT_CAP);
        score = cap * std::tanh(score / cap);
#endif
        score_error = std::max(score_error, (HEAD_DIM + 8) * 0x1p-24 * magnitude);
        weights[j] = score;
        largest = std::max(largest, score);
    }
    for (double& w : weights) total += w = std::exp(w - largest);
    if (sinks()) total += std::exp(widen(sinks()[head]) - largest);
    for (double& w : weights) w /= total;

    // In eight bits weights are quantized times the values' scales, by spans of SPAN positions.
    std::vector<double> scales(count, 1.0), span_largest(LONGEST / SPAN + 1, 0.0);
    for (int j = 0; j < count; j++) {
#if STORE != 2
        scales[j] = world.value_scales[scale_of(world, world.first_token[s] + first + j, kv)];
#endif
        double& top = span_largest[(first + j) / SPAN];
        top = std::max(top, weights[j] * scales[j]);
    }
    for (int j = 0; j < count; j++)
        deviations[j] = weight_deviation(weights[j] * scales[j], span_largest[(first + j) / SPAN]) / scales[j];

    for (int d = 0; d < VALUE_DIM; d++) {
        double want = 0, variance = 0, largest_value = 0;
        for (int j = 0; j < count; j++) {
            double value = value_at(world, world.first_token[s] + first + j, kv, d);
            want += weights[j] * value;
            variance += deviations[j] * deviations[j] * value * value;
            largest_value = std::max(largest_value, std::fabs(value));
        }
        double allowed = 6 * std::sqrt(variance) + std::fabs(want) / 256 + 2 * (score_error + 1e-5) * largest_value;
        worst.add(widen(out[(size_t(token) * HEADS + head) * VALUE_DIM + d]) - want, allowed);
    }
}

static void check_results(const World& world, const Step& step) {
    for (unsigned seed : {0u, 5u}) {
        std::vector<Bf16> out = attend_all(world, step, seed);
        check::Worst worst;
        for (int token = 0; token < int(step.positions.size()); token++)
            for (int head = 0; head < HEADS; head++) head_errors(world, step, out, token, head, worst);
        check::expect(worst.fine(), "attention store %d, %d heads of %d, %d shared, window %d, seed %u: %.2f of the error allowed", STORE,
                      HEADS, HEAD_DIM, KV_HEADS, WINDOW, seed, worst.part);
    }
}

// Stores a token again, with NaN in dimension 3 of a head.
static void poison(World& world, int token, int head) {
    std::vector<Bf16> qkv(world.raw.begin() + size_t(token) * TOKEN, world.raw.begin() + size_t(token + 1) * TOKEN);
    qkv[size_t(head) * HEAD_DIM + 3] = Bf16{0x7fc0};
    store(world, qkv.data(), &world.positions[token], &world.slots[token], 1);
}

// NaN in a value of one sequence, in a key of another and in a query of a third shows in what they are for, and nowhere else.
static void check_poison(World world, Step step) {
    const std::vector<Bf16> before = attend_all(world, step, 1);
    const int value_sequence = 1, key_sequence = 2, query_sequence = 3, kv = KV_HEADS - 1, group = HEADS / KV_HEADS;
    // The last position before the step, which all of the step's queries see.
    auto last = [&](int s) { return world.first_token[s] + SEQUENCES[s].before - 1; };
    // A latent is the key and the value of all heads.
    poison(world, last(value_sequence), LATENT ? HEADS : HEADS + KV_HEADS + kv);
    poison(world, last(key_sequence), LATENT ? HEADS : HEADS + kv);
    for (size_t token = 0; token < step.positions.size(); token++)
        if (step.sequences[token] == query_sequence) step.qkv[token * ROW + size_t(kv) * group * HEAD_DIM + 3] = Bf16{0x7fc0};
#if STORE != 2
    size_t first = number_of(world, last(value_sequence), kv), place = world.slots[last(value_sequence)] % BLOCK;
    bool zero = true;
    for (int d = 0; d < HEAD_DIM; d++) zero &= world.values[first + d * BLOCK + place] == 0;
    check::expect(zero && std::isnan(world.value_scales[scale_of(world, last(value_sequence), kv)]), "a head that is not finite is zeros and a NaN scale");
#endif
    const std::vector<Bf16> after = attend_all(world, step, 1);
    int missing = 0, spread = 0;
    for (size_t at = 0; at < after.size(); at++) {
        int d = int(at % VALUE_DIM), head = int(at / VALUE_DIM % HEADS), s = step.sequences[at / VALUE_DIM / HEADS];
        bool poisoned = false;
        if (s == value_sequence) poisoned = LATENT || (head / group == kv && (STORE != 2 || VALUE_NORM || d == 3));
        if (s == key_sequence) poisoned = LATENT || head / group == kv;
        if (s == query_sequence) poisoned = head == kv * group;
        if (poisoned)
            missing += !std::isnan(widen(after[at]));
        else
            spread += after[at].bits != before[at].bits;
    }
    check::expect(missing == 0 && spread == 0, "NaN: missing in %d numbers, spread to %d", missing, spread);
}

// A token's result has the same bits in an item of its own as among others, and so have its parts.
static void check_alone(const World& world) {
    Step together = make_tokens(world), alone = together;
    for (int s = 0; s < int(SEQUENCES.size()); s++) {
        add_whole(world, together, s, MOST_QUERIES);
        add_whole(world, alone, s, 1);
    }
    Results a = attend_items(world, together, 2), b = attend_items(world, alone, 3);
    bool same = std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(Bf16)) == 0;
    check::expect(same, "results of %d items and of %d have the same bits", int(together.items.size()), int(alone.items.size()));

    Step step = make_step(world), single = make_tokens(world);
    std::vector<std::vector<merging::Part>> parts(step.positions.size());
    // Which query of which item each of the single ones is.
    std::vector<std::pair<const attend::Item*, u32>> from;
    for (const attend::Item& item : step.items)
        for (u32 j = 0; item.part != NONE && j < item.queries; j++) {
            u32 token = step.queries[item.first_query + j];
            add_item(world, single, {token}, item.from, item.to, &parts);
            from.push_back({&item, j});
        }
    a = attend_items(world, step, 4), b = attend_items(world, single, 5);
    const int group = HEADS / KV_HEADS;
    int different = 0;
    for (size_t i = 0; i < from.size(); i++)
        for (int row = 0; row < KV_HEADS * group; row++) {
            auto [item, j] = from[i];
            size_t kv = row / group, in = item->part * KV_HEADS + (kv * item->queries + j) * group + row % group;
            size_t own = (i * KV_HEADS + kv) * group + row % group;
            different += std::memcmp(&a.sums[in * VALUE_DIM], &b.sums[own * VALUE_DIM], VALUE_DIM * 4) != 0;
            different += std::memcmp(&a.states[in * 2], &b.states[own * 2], 8) != 0;
        }
    check::expect(different == 0, "%d rows of parts differ from those of one token", different);
}

#ifdef QUERIES_ALONE
// Queries are rotated as they are beside keys and values, and nothing is stored.
static void check_rotated_alone(World world) {
    std::vector<Bf16> rows;
    int tokens = int(world.positions.size()), different = 0;
    for (int token = 0; token < tokens; token++) {
        auto from = world.raw.begin() + size_t(token) * TOKEN;
        rows.insert(rows.end(), from, from + ROW);
    }
    check::run(alone::rotate_alone, tokens, (HEADS + 3) / 4, 128, 0, 3, rows.data(), world.rotations.data(), world.positions.data(),
               world.slots.data(), world.q_norm.data(), (const float*)nullptr, EPS, VALUE_EPS, (void*)nullptr, (void*)nullptr,
               (float*)nullptr, (float*)nullptr);
    for (int token = 0; token < tokens; token++)
        different += std::memcmp(&rows[size_t(token) * ROW], &world.rotated[size_t(token) * TOKEN], ROW * sizeof(Bf16)) != 0;
    check::expect(different == 0, "%d rows of queries alone differ", different);
}
#endif

int main() {
    World world = make_world();
#if !LATENT
    check_store(world);
#endif
#ifdef QUERIES_ALONE
    check_rotated_alone(world);
#endif
    give_back(world);
    Step step = make_step(world);
    check_results(world, step);
    check_alone(world);
    check_poison(world, step);
    return check::verdict();
}
