// Draws one token per row of logits, one thread block per row: the algorithm of src/device/draw.rs,
// in the same order.
//
// logits: [rows][stride] F32, of which the first `vocabulary` are used; penalties change them. Rows
// are aligned to 16 bytes: stride is a multiple of 4. draws, drawn: [rows]. penalties, masks,
// wanted: arrays that the draws index; values: the raw logits of `wanted`.
// A token's weight is exp((logit - largest) / temperature) in units of 2^-40, summed in integers.
// So neither the filters nor the drawn token depend on the order in which threads add. Tokens are
// ordered by logit, then by id. Top-k, top-p and min-p each keep the first tokens of this order;
// where they end is found digit by digit of a token's position in the order (a radix selection).
//
// Most time is spent reading the row. It is read once for the raw distribution and the largest
// logit, once more if penalties may have changed the largest, and once for the total weight. In the
// last pass, the largest logits are also put on a list. If the list is certain to hold all tokens
// that the filters keep, only the list is read from then on; else the row is read for each digit.
#include "ptx.cuh"
#include "types.cuh"
#include "drawn.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)
// One bin per thread.
#define BINS THREADS
#define BIN_BITS 10
static_assert(BINS == 1 << BIN_BITS, "a place's digit says its bin");
#define LIST 3072
// Vectors of a row that a thread loads at once.
#define AHEAD 2
// Number of threads that are to have at least one token on the list.
#define MANY (THREADS / 4 * 3)
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

// A token that occurs in the prompt or the completion, and its count in the completion. Each token
// of a row is listed once.
struct Penalty {
    u32 id, count;
    // Written by the kernel: the token's raw logit.
    float raw;
};

struct Shared {
    float floats[WARPS];
    u64 sums[WARPS];
    // For each bin: the number of its tokens, and their total weight.
    u32 counts[BINS];
    u64 masses[BINS];
    // The bin in which a search ends, the amount that it needs from this bin, and whether that is
    // the whole bin.
    u32 bin;
    u64 left;
    bool whole;
    // A list of tokens, unordered; `listed` counts all tokens that were to be added, even beyond
    // its capacity.
    u32 listed;
    float logits[LIST];
    u32 ids[LIST];
    // The logit drawn.
    float raw;
};
__shared__ Shared s;

// A key that is larger for larger numbers; both zeros have the same key.
__device__ inline u32 key_of(float x) {
    u32 bits = float_to_bits(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ inline float logit_of(u32 key) {
    return bits_to_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// A token's position in the order of logits, then ids, as a key: the first token has the largest.
// The lower half orders by id only.
__device__ inline u64 place_of(float x, u32 id) {
    return u64(key_of(x)) << 32 | ~id;
}

// Below the keys of all tokens that are not excluded.
__device__ inline u64 everything() {
    return u64(key_of(LOWEST) + 1) << 32;
}

// A sum of weights in units of 2^-40, each rounded down: the number of units of 2^-20, and the rest
// in units of 2^-40. Up to 4095 weights fit.
struct Mass {
    u32 high, low;

    // Adding 2^23 leaves the integer in the lowest bits. Cards have no fast conversion to 64 bits.
    __device__ inline void add(float weight) {
        const float one = 8388608.0f;
        float whole = add_toward_zero(weight * 1048576.0f, one);
        high += float_to_bits(whole) - float_to_bits(one);
        float left = fmaf(whole - one, -1 / 1048576.0f, weight);
        low += float_to_bits(add_toward_zero(left * 1099511627776.0f, one)) - float_to_bits(one);
    }
    __device__ inline u64 units() const { return (u64(high) << 20) + low; }
};

struct Scale {
    float largest, inverse;

    __device__ inline float weight(float x) const { return expf((x - largest) * inverse); }
    __device__ inline u64 mass(float x) const {
        Mass mass{0, 0};
        mass.add(weight(x));
        return mass.units();
    }
};
// Variables that many functions need are in shared memory, which saves registers.
__shared__ Scale row_scale;

template <class T, class Op> __device__ inline T reduce_warp(T x, Op op) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    return x;
}

// Reduces over the block through `scratch`, in which each warp leaves its result: s.floats or
// s.sums.
template <class T, class Op> __device__ inline T reduce(T x, T* scratch, Op op) {
    x = reduce_warp(x, op);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce_warp(scratch[threadIdx.x % 32], op);
}

struct Sum {
    template <class T> __device__ inline T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    __device__ inline float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ inline u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

// The sum over all threads before this one.
__device__ inline u64 sum_before(u64 mine) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = mine;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        u64 other = shuffle_up(sum, lanes);
        if (lane >= lanes) sum += other;
    }
    if (lane == 31) s.sums[warp] = sum;
    __syncthreads();
    return sum - mine + reduce_warp(lane < warp ? s.sums[lane] : 0, Sum());
}

__device__ inline float largest_of(const float (&x)[4]) {
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}

// Tokens whose bits are not set are excluded.
__device__ inline void strike(float (&x)[4], u32 bits) {
    if (bits == 15) return;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (!(bits >> i & 1)) x[i] = LOWEST;
}

// The tokens on the list; or those of the row with ids in `from` to `to`, as vectors of four, of
// which each warp reads a contiguous range.
struct Tokens {
    const float* logits;
    // Null: all tokens are allowed.
    const u32* mask;
    u32 vocabulary, from, to;
    bool listed;

    __device__ inline u32 stretch() const { return (to - from + 4 * THREADS - 1) / (4 * THREADS) * 128; }

    // One bit per token of the vector at `at`: whether the token is before the end, and whether it
    // is also allowed.
    __device__ inline u32 present(u32 at) const { return at + 4 <= vocabulary ? 15 : 15 >> (at + 4 - vocabulary); }
    __device__ inline u32 allowed(u32 at) const { return mask ? present(at) & mask[at / 32] >> at % 32 : present(at); }

    __device__ inline void load(float (&x)[4], u32 at) const {
        Vec16 vector = *(const Vec16*)(logits + at);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = bits_to_float(vector.words[i]);
    }

    // Calls with each vector of the row: its first id, its logits, and which are allowed; logits of
    // excluded tokens are minus infinity. Vectors without allowed tokens are skipped. RAW: all
    // vectors, with the logits of excluded tokens unchanged.
    template <bool RAW, class Use> __device__ inline void vectors(Use use) const {
        u32 begin = from + threadIdx.x / 32 * stretch(), end = begin + stretch() < to ? begin + stretch() : to;
        for (u32 first = begin + threadIdx.x % 32 * 4; first < end; first += AHEAD * 128) {
            float x[AHEAD][4];
            u32 bits[AHEAD];
            if (RAW) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (first + i * 128 < end) load(x[i], first + i * 128);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) bits[i] = first + i * 128 < end ? allowed(first + i * 128) : 0;
            if (!RAW) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (bits[i] != 0) load(x[i], first + i * 128);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                u32 at = first + i * 128;
                if (RAW ? at >= end : bits[i] == 0) continue;
                strike(x[i], RAW ? present(at) : bits[i]);
                use(at, x[i], bits[i]);
            }
        }
    }

    template <class Use> __device__ inline void each(Use use) const {
        if (listed) {
            for (u32 i = threadIdx.x; i < s.listed; i += THREADS) use(s.logits[i], s.ids[i]);
            return;
        }
        vectors<false>([&](u32 at, const float (&x)[4], u32) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (x[i] > LOWEST) use(x[i], at + i);
        });
    }
};
// The tokens that are read.
__shared__ Tokens looked_at;

// The total weight of the kept tokens, those whose key is at least `kept`. Leaves the weight of
// each warp's tokens in s.sums.
__device__ NOINLINE u64 add_up(u64 kept) {
    const Tokens tokens = looked_at;
    const Scale scale = row_scale;
    Mass mine{0, 0};
    tokens.each([&](float x, u32 id) {
        if (place_of(x, id) >= kept) mine.add(scale.weight(x));
    });
    return reduce(mine.units(), s.sums, Sum());
}

// Ways to count tokens in order: by key, each token as one or by its weight; or by id, by weight.
#define BY_COUNT 0
#define BY_MASS 1
#define BY_ID 2

// Goes through the kept tokens from the first on, until the wanted amount is reached. Returns the
// key down to which the amount is reached, or the lowest key if there is less.
__device__ NOINLINE u64 cut(int by, u64 kept, u64 wanted) {
    __syncthreads();
    const Tokens tokens = looked_at;
    const Scale scale = row_scale;
    u64 lowest = by == BY_ID ? u32(~(tokens.to - 1)) : kept;
    u64 span = (by == BY_ID ? u32(~tokens.from) : place_of(scale.largest, 0)) - lowest;
    int length = bit_length(span), shift = length > BIN_BITS ? length - BIN_BITS : 0;
    if (threadIdx.x == 0) s.bin = NONE;
    while (true) {
        s.counts[threadIdx.x] = 0;
        s.masses[threadIdx.x] = 0;
        __syncthreads();
        tokens.each([&](float x, u32 id) {
            u64 place = place_of(x, id);
            if (place < kept) return;
            u64 up = (by == BY_ID ? u32(place) : place) - lowest;
            // For a key below the lowest one, `up` wraps around and is larger, too.
            if (up > span) return;
            u32 bin = u32(up >> shift);
            add_shared(&s.counts[bin], 1u);
            if (by != BY_COUNT) add_shared(&s.masses[bin], scale.mass(x));
        });
        __syncthreads();
        u32 bin = BINS - 1 - threadIdx.x;
        u64 mine = by == BY_COUNT ? s.counts[bin] : s.masses[bin];
        u64 before = sum_before(mine);
        if (before < wanted && wanted - before <= mine) {
            s.bin = bin;
            s.left = wanted - before;
            s.whole = s.left == mine || s.counts[bin] == 1;
        }
        __syncthreads();
        if (s.bin == NONE) return lowest;
        wanted = s.left;
        lowest += u64(s.bin) << shift;
        // If a whole bin is wanted, so is its lowest key; which id that is must still be found.
        if (shift == 0 || (s.whole && by != BY_ID)) return lowest;
        span = (u64(1) << shift) - 1;
        shift = shift > BIN_BITS ? shift - BIN_BITS : 0;
    }
}

// The weight that top-p keeps of tokens with total weight `total`.
__device__ inline u64 share(u64 total, float top_p) {
    u64 mass = u64(double(total) * double(top_p));
    return mass > 0 ? mass : 1;
}

// The smallest logit of the tokens whose weight is at least `min_p`.
__device__ NOINLINE float least_of(float min_p) {
    const Tokens tokens = looked_at;
    const Scale scale = row_scale;
    float least = scale.largest;
    tokens.each([&](float x, u32) {
        if (scale.weight(x) >= min_p) least = fminf(least, x);
    });
    return reduce(least, s.floats, [](float a, float b) { return fminf(a, b); });
}

// The key down to which top-k, top-p and min-p keep tokens, of those down to `kept`. `total`: the
// weight of all tokens, which top-p needs if there is no top-k.
__device__ inline u64 filter(const Draw& draw, u32 top_k, u64 kept, u64 total) {
    if (top_k > 0) kept = cut(BY_COUNT, kept, top_k);
    if (draw.top_p < 1) {
        if (top_k > 0) total = add_up(kept);
        kept = cut(BY_MASS, kept, share(total, draw.top_p));
    }
    if (draw.min_p > 0) {
        u64 probable = u64(key_of(least_of(draw.min_p))) << 32;
        if (probable > kept) kept = probable;
    }
    return kept;
}

// Puts the tokens of a vector whose logit is at least `least` on the list.
__device__ inline void append(const float (&x)[4], u32 at, float least) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (x[i] < least) continue;
        u32 slot = add_shared(&s.listed, 1u);
        if (slot >= LIST) continue;
        s.logits[slot] = x[i];
        s.ids[slot] = at + i;
    }
}

// The largest of a thread's logits, and the start of the first vector that contains it.
struct Best {
    float logit;
    u32 at;

    __device__ inline void consider(float x, u32 id) {
        if (x > logit) {
            logit = x;
            at = id;
        }
    }
};

// The bound of one block per multiprocessor: the compiler need not save registers for a second.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample(float* logits, u32 vocabulary, const Draw* draws, Penalty* penalties, const u32* masks, const u32* wanted, Drawn* drawn,
           float* values, u32 stride) {
    const Draw& draw = draws[blockIdx.x];
    Drawn& out = drawn[blockIdx.x];
    float* raw = logits + u64(blockIdx.x) * stride;
    Tokens row{raw, draw.mask == NONE ? nullptr : masks + draw.mask, vocabulary, 0, vocabulary, false};

    // The raw distribution, and the largest allowed logit. Exponentials are relative to a base
    // slightly below a thread's largest logit, so that the base seldom moves.
    float top = LOWEST, base = -FLOAT_MAX, exps = 0;
    Best best{LOWEST, 0};
    row.vectors<true>([&](u32 at, float (&x)[4], u32 bits) {
        float most = largest_of(x);
        top = fmaxf(top, most);
        if (most > base + 16) {
            exps *= expf(base - most);
            base = most;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) exps += expf(x[i] - base);
        strike(x, bits);
        best.consider(largest_of(x), at);
    });
    float raw_top = reduce(top, s.floats, Larger());
    // Minus infinity cannot be the base: its difference to itself is NaN.
    float raw_total = reduce(exps * expf(base - fmaxf(raw_top, -FLOAT_MAX)), s.floats, Sum());
    // NaN and infinite logits have made the sum NaN, by their difference to the base.
    if (raw_total != raw_total) {
        if (threadIdx.x == 0) out = Drawn{0, NOT_FINITE, 0, 0, 0};
        return;
    }
    if (threadIdx.x == 0) {
        out.largest = raw_top;
        out.total = raw_total;
    }
    for (u32 i = threadIdx.x; i < draw.wanted; i += THREADS) values[draw.first_wanted + i] = raw[wanted[draw.first_wanted + i]];

    if (draw.penalties > 0) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < draw.penalties; i += THREADS) {
            Penalty& p = penalties[draw.first_penalty + i];
            float x = raw[p.id];
            p.raw = x;
            // A very small penalty must not make a logit infinite.
            x = x > 0 ? fminf(x / draw.repetition, FLOAT_MAX) : x * draw.repetition;
            if (p.count > 0) x = fminf(x - (draw.presence + draw.frequency * float(p.count)), FLOAT_MAX);
            raw[p.id] = x;
        }
        __syncthreads();
        best = Best{LOWEST, 0};
        row.vectors<false>([&](u32 at, const float (&x)[4], u32) { best.consider(largest_of(x), at); });
    }
    u64 first = reduce(place_of(best.logit, best.at), s.sums, Larger());
    Scale scale{logit_of(u32(first >> 32)), draw.inverse_temperature};
    if (scale.largest == LOWEST) {
        if (threadIdx.x == 0) out = Drawn{0, NOTHING_ALLOWED, 0, 0, 0};
        return;
    }

    u32 token, top_k = draw.top_k < vocabulary ? draw.top_k : 0;
    if (scale.inverse == 0) {
        float x[4];
        token = ~u32(first);
        row.load(x, token);
        strike(x, row.allowed(token));
        token += x[0] == scale.largest ? 0 : x[1] == scale.largest ? 1 : x[2] == scale.largest ? 2 : 3;
    } else {
        bool filtered = top_k > 0 || draw.top_p < 1 || draw.min_p > 0;
        u64 kept = everything(), lowest = 0;
        float least = HIGHEST;
        if (threadIdx.x == 0) {
            row_scale = scale;
            looked_at = row;
            looked_at.listed = filtered;
        }
        if (filtered) {
            // What is not below the best logits of so many threads is at least as many tokens: those of top-k, or, of many threads,
            // about twice as many.
            s.logits[threadIdx.x] = best.logit;
            s.ids[threadIdx.x] = threadIdx.x;
            if (threadIdx.x == 0) s.listed = THREADS;
            lowest = cut(BY_COUNT, kept, top_k > 0 && top_k < MANY ? top_k : MANY);
            least = fmaxf(logit_of(u32(lowest >> 32)), -FLOAT_MAX);
            if (threadIdx.x == 0) s.listed = 0;
            __syncthreads();
        }
        // Logits below it have weight 0: exp(-28) < 2^-40.
        float light = scale.largest - 28 / scale.inverse;
        bool weigh = top_k == 0 && (draw.top_p < 1 || !filtered);
        Mass mine{0, 0};
        row.vectors<false>([&](u32 at, const float (&x)[4], u32) {
            float most = largest_of(x);
            if (weigh && most >= light) {
#pragma unroll
                for (int i = 0; i < 4; i++) mine.add(scale.weight(x[i]));
            }
            if (most >= least) append(x, at, least);
        });
        u64 total = reduce(mine.units(), s.sums, Sum());
        if (filtered) {
            bool enough = lowest == kept;
            lowest = u64(key_of(least)) << 32;
            if (s.listed > LIST)
                enough = false;
            else if (top_k > 0)
                enough |= s.listed >= top_k;
            else {
                // With rounding, a lower logit might get a slightly larger weight.
                enough |= scale.weight(least) * 1.001f < draw.min_p;
                if (!enough && weigh) enough = add_up(lowest) >= share(total, draw.top_p);
            }
            __syncthreads();
            if (threadIdx.x == 0) looked_at.listed = enough;
            __syncthreads();
            if (enough) kept = lowest;
            kept = filter(draw, top_k, kept, total);
            total = add_up(kept);
        }
        u64 target = u64(draw.uniform * double(total));
        if (!looked_at.listed) {
            // In the row, only the warp's range in which the sum exceeds the target must be read.
            u32 warp = 0;
            for (; warp < WARPS - 1 && s.sums[warp] <= target; warp++) target -= s.sums[warp];
            u32 begin = warp * row.stretch(), end = begin + row.stretch();
            if (threadIdx.x == 0) {
                looked_at.from = begin;
                looked_at.to = end < vocabulary ? end : vocabulary;
            }
        }
        token = ~u32(cut(BY_ID, kept, target + 1));
    }
    // What a penalty left of it is not what it was.
    __syncthreads();
    if (threadIdx.x == 0) s.raw = raw[token];
    __syncthreads();
    for (u32 i = threadIdx.x; i < draw.penalties; i += THREADS)
        if (penalties[draw.first_penalty + i].id == token) s.raw = penalties[draw.first_penalty + i].raw;
    __syncthreads();
    if (threadIdx.x == 0) {
        out.token = token;
        out.status = DRAWN;
        out.logit = s.raw;
    }
}
