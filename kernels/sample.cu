// One token a row from its logits, a block a row: what src/device/draw.rs says, in its order.
//
// logits: [rows][stride] F32, of which `vocabulary` count; penalties and masks change them. draws, drawn: [rows]. penalties, masks,
// wanted: as the draws say; values: the raw logits of `wanted`.
//
// A token's weight is exp((logit - largest) / temperature) in units of 2^-40, summed in whole numbers: so what is filtered, and which
// token is drawn, does not depend on the order in which threads add. Tokens are ordered by logit, then by id; top-k, top-p and
// min-p each keep the first of them, found digit by digit of the logit's bits (a radix selection), and so does all of them together.
#include "ptx.cuh"
#include "types.cuh"
#include "drawn.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)
#define DIGITS 256
#define ONE 1099511627776.0f
#define LOWEST bits_to_float(0xff800000)
#define HIGHEST bits_to_float(0x7f800000)
#define FLOAT_MAX bits_to_float(0x7f7fffff)

// Status of a row.
#define DRAWN 0
#define NOT_FINITE 1
#define NOTHING_ALLOWED 2

struct Draw {
    // In [0, 1).
    double uniform;
    // 1 / temperature, or 0: the largest logit wins.
    float inverse_temperature;
    // 0: all.
    u32 top_k;
    float top_p, min_p;
    float repetition, presence, frequency;
    // Into `penalties`.
    u32 first_penalty, penalties;
    // Into `masks`, words; or NONE where all tokens are allowed.
    u32 mask;
    // Into `wanted` and `values`.
    u32 first_wanted, wanted;
};

#define NONE 0xffffffffu

// A token that occurs in the prompt or the completion, and how often in the completion. Each token of a row once.
struct Penalty {
    u32 id, count;
    // Written by the kernel: its logit before.
    float raw;
};

// Larger for larger numbers.
__device__ inline u32 key_of(float x) {
    u32 bits = float_to_bits(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The first tokens in order of logits: those of larger keys, and of the same key those up to an id.
struct Kept {
    u32 key, last;
};

struct Shared {
    float floats[WARPS];
    u64 sums[WARPS];
    u32 counts[DIGITS];
    u64 masses[DIGITS];
    u32 prefix, left, id;
    u64 mass;
};

template <class Op> __device__ inline float reduce(float x, Shared& s, Op op) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.floats[threadIdx.x / 32] = x;
    __syncthreads();
    x = s.floats[0];
    for (int w = 1; w < WARPS; w++) x = op(x, s.floats[w]);
    return x;
}

// Each warp has a stretch of ids of its own.
#define FOR_IDS(id)                                                                                                              \
    for (u32 stretch = (vocabulary + THREADS - 1) / THREADS * 32, id = threadIdx.x / 32 * stretch + threadIdx.x % 32,             \
             end_ = id - threadIdx.x % 32 + stretch;                                                                              \
         id < end_; id += 32)                                                                                                     \
        if (id < vocabulary)

__device__ inline u64 weight_of(float x, float largest, float inverse) {
    return u64(expf((x - largest) * inverse) * ONE);
}

// The id of the token that is number `count` (from 1) among those whose key is `key`.
__device__ NOINLINE u32 id_of_equal(const float* row, u32 vocabulary, u32 key, u32 count, Shared& s) {
    __syncthreads();
    if (threadIdx.x < WARPS) s.counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.id = vocabulary;
    __syncthreads();
    FOR_IDS(id) if (key_of(row[id]) == key) add_shared(&s.counts[threadIdx.x / 32], 1u);
    __syncthreads();
    u32 before = 0;
    for (u32 w = 0; w < threadIdx.x / 32; w++) before += s.counts[w];
    // One lane walks the stretch that holds it.
    if (threadIdx.x % 32 == 0 && before < count && before + s.counts[threadIdx.x / 32] >= count) {
        u32 stretch = (vocabulary + THREADS - 1) / THREADS * 32;
        for (u32 id = threadIdx.x / 32 * stretch; id < vocabulary; id++)
            if (key_of(row[id]) == key && ++before == count) {
                s.id = id;
                break;
            }
    }
    __syncthreads();
    return s.id;
}

// Of the tokens in `within`: the fewest first ones that are `count` or, where `count` is 0, weigh `mass`.
__device__ NOINLINE Kept select(const float* row, u32 vocabulary, Kept within, u32 count, u64 mass, float largest, float inverse,
                                Shared& s) {
    __syncthreads();
    if (threadIdx.x == 0) {
        s.prefix = 0;
        s.left = count;
        s.mass = mass;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = int(threadIdx.x); i < DIGITS; i += THREADS) {
            s.counts[i] = 0;
            s.masses[i] = 0;
        }
        __syncthreads();
        u32 prefix = s.prefix;
        FOR_IDS(id) {
            u32 key = key_of(row[id]);
            bool inside = key > within.key || (key == within.key && id <= within.last);
            if (inside && (shift == 24 || key >> (shift + 8) == prefix)) {
                add_shared(&s.counts[key >> shift & 255], 1u);
                if (count == 0) add_shared(&s.masses[key >> shift & 255], weight_of(row[id], largest, inverse));
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = DIGITS - 1;
            // The last digit that has any ends the search: rounding may leave a little of the mass.
            int last = 0;
            for (int i = DIGITS - 1; i >= 0; i--)
                if (s.counts[i] > 0) last = i;
            for (; digit > last; digit--) {
                if (count > 0) {
                    if (s.counts[digit] >= s.left) break;
                    s.left -= s.counts[digit];
                } else {
                    if (s.masses[digit] >= s.mass) break;
                    s.mass -= s.masses[digit];
                }
            }
            s.prefix = prefix << 8 | u32(digit);
        }
    }
    __syncthreads();
    u32 key = s.prefix, equals = s.left;
    if (count == 0) {
        // Those of one key weigh the same.
        u64 each = s.masses[key & 255] / s.counts[key & 255];
        equals = each == 0 ? s.counts[key & 255] : u32((s.mass + each - 1) / each);
        if (equals == 0) equals = 1;
    }
    u32 have = s.counts[key & 255];
    return Kept{key, id_of_equal(row, vocabulary, key, equals < have ? equals : have, s)};
}

// (One block: the compiler saves no registers for a second.)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample(float* logits, u32 vocabulary, const Draw* draws, Penalty* penalties, const u32* masks, const u32* wanted, Drawn* drawn,
           float* values, u32 stride) {
    __shared__ Shared s;
    const Draw& draw = draws[blockIdx.x];
    float* row = logits + u64(blockIdx.x) * stride;
    auto larger = [](float a, float b) { return fmaxf(a, b); };
    auto sum = [](float a, float b) { return a + b; };

    // The raw distribution, and whether it is one.
    float top = LOWEST, broken = 0;
    FOR_IDS(id) {
        top = fmaxf(top, row[id]);
        // Neither NaN nor infinite; what is out from the start is minus infinity.
        if (!(row[id] < HIGHEST)) broken = 1;
    }
    bool finite = reduce(broken, s, larger) == 0;
    float raw_top = reduce(top, s, larger);
    if (!finite) {
        if (threadIdx.x == 0) drawn[blockIdx.x] = Drawn{0, NOT_FINITE, 0, 0, 0};
        return;
    }
    for (u32 i = threadIdx.x; i < draw.wanted; i += THREADS) values[draw.first_wanted + i] = row[wanted[draw.first_wanted + i]];
    float exps = 0;
    // (The barriers of this sum also stand between what reads raw logits and what changes them.)
    FOR_IDS(id) exps += expf(row[id] - raw_top);
    float raw_total = reduce(exps, s, sum);

    for (u32 i = threadIdx.x; i < draw.penalties; i += THREADS) {
        Penalty& p = penalties[draw.first_penalty + i];
        float x = row[p.id];
        p.raw = x;
        // A tiny penalty must not make a logit infinite.
        x = x > 0 ? fminf(x / draw.repetition, FLOAT_MAX) : x * draw.repetition;
        if (p.count > 0) x = fminf(x - (draw.presence + draw.frequency * float(p.count)), FLOAT_MAX);
        row[p.id] = x;
    }
    __syncthreads();
    top = LOWEST;
    FOR_IDS(id) {
        if (draw.mask != NONE && !(masks[draw.mask + id / 32] >> id % 32 & 1)) row[id] = LOWEST;
        top = fmaxf(top, row[id]);
    }
    float largest = reduce(top, s, larger);
    if (largest == LOWEST) {
        if (threadIdx.x == 0) drawn[blockIdx.x] = Drawn{0, NOTHING_ALLOWED, 0, 0, 0};
        return;
    }

    u32 token;
    float inverse = draw.inverse_temperature;
    if (inverse == 0) {
        token = id_of_equal(row, vocabulary, key_of(largest), 1, s);
    } else {
        // Tokens that are ruled out weigh nothing; so far all others are in.
        Kept kept{key_of(LOWEST), 0};
        auto inside = [&](u32 id) {
            u32 key = key_of(row[id]);
            return key > kept.key || (key == kept.key && id <= kept.last && row[id] > LOWEST);
        };
        auto total = [&] {
            __syncthreads();
            if (threadIdx.x < WARPS) s.sums[threadIdx.x] = 0;
            __syncthreads();
            u64 mine = 0;
            FOR_IDS(id) if (inside(id)) mine += weight_of(row[id], largest, inverse);
            add_shared(&s.sums[threadIdx.x / 32], mine);
            __syncthreads();
            u64 all = 0;
            for (int w = 0; w < WARPS; w++) all += s.sums[w];
            return all;
        };
        if (draw.top_k > 0 && draw.top_k < vocabulary) kept = select(row, vocabulary, kept, draw.top_k, 0, largest, inverse, s);
        if (draw.top_p < 1) {
            u64 mass = u64(double(total()) * double(draw.top_p));
            kept = select(row, vocabulary, kept, 0, mass > 0 ? mass : 1, largest, inverse, s);
        }
        if (draw.min_p > 0) {
            // The least logit that is probable enough, found in the same units as weights.
            float least = HIGHEST;
            FOR_IDS(id) if (inside(id) && expf((row[id] - largest) * inverse) >= draw.min_p) least = fminf(least, row[id]);
            least = reduce(least, s, [](float a, float b) { return fminf(a, b); });
            u32 key = key_of(least);
            if (key > kept.key) kept = Kept{key, vocabulary};
        }
        u64 all = total();
        u64 target = u64(draw.uniform * double(all));
        u64 before = 0;
        for (u32 w = 0; w < threadIdx.x / 32; w++) before += s.sums[w];
        if (threadIdx.x == 0) s.id = 0;
        __syncthreads();
        u32 warp = threadIdx.x / 32, stretch = (vocabulary + THREADS - 1) / THREADS * 32;
        if (threadIdx.x % 32 == 0 && before <= target && target < before + s.sums[warp]) {
            for (u32 id = warp * stretch; id < vocabulary; id++) {
                if (!inside(id)) continue;
                before += weight_of(row[id], largest, inverse);
                if (before > target) {
                    s.id = id;
                    break;
                }
            }
        }
        __syncthreads();
        token = s.id;
    }
    // What a mask or a penalty left of it is not what it was; a mask leaves what can be drawn.
    __syncthreads();
    if (threadIdx.x == 0) s.floats[0] = row[token];
    __syncthreads();
    for (u32 i = threadIdx.x; i < draw.penalties; i += THREADS)
        if (penalties[draw.first_penalty + i].id == token) s.floats[0] = penalties[draw.first_penalty + i].raw;
    __syncthreads();
    if (threadIdx.x == 0) drawn[blockIdx.x] = Drawn{token, DRAWN, s.floats[0], raw_top, raw_total};
}
