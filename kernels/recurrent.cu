// A recurrent layer, token by token: a gated delta network (Yang et al. 2024), or Mamba-2 (Dao and Gu
// 2024). src/device/recurrent.rs has the formulas.
//
// KIND: 0 delta network, 1 Mamba-2. KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CONV: key_heads,
// value_heads, key_dim, value_dim and conv_width of the shape there. LANES: threads that share a column
// of a state, a power of two up to 32. THREADS: VALUE_DIM * LANES, or the next multiple of 32.
//
// A thread block (sequence, value head) walks the sequence's tokens of this step in order, so that the
// numbers depend neither on how the tokens are divided among steps nor on other sequences. The head's
// state stays in registers: LANES neighbouring threads have the column of one dimension of the value,
// each thread every LANES-th row of it. The heads that share a query and a key convolve these each for
// itself. The last inputs of the convolution are read here, and written by keep_inputs.cu when all heads
// have read them.
//
// rows: [tokens][WIDTH] BF16. conv: [CHANNELS][CONV], conv_bias: [CHANNELS] or null. decays, decay_bias,
// skips (Mamba-2): [VALUE_HEADS]. norm (delta network): [VALUE_DIM]. All of these are F32. states:
// [slots][stride] F32, a slot being [CONV - 1][CHANNELS] inputs, the oldest first, then
// [VALUE_HEADS][VALUE_DIM][KEY_DIM]. out: [tokens][VALUES] BF16: in Mamba-2, before its norm.
#include "ptx.cuh"
#include "types.cuh"
#include "recurrent.cuh"

#define KEYS (KEY_HEADS * KEY_DIM)
#define VALUES (VALUE_HEADS * VALUE_DIM)
#define CHANNELS (2 * KEYS + VALUES)
// Where the parts of a row begin; the convolution's channels are side by side.
#if KIND == 0
#define Q_AT 0
#define K_AT KEYS
#define V_AT (2 * KEYS)
#define Z_AT CHANNELS
#define B_AT (CHANNELS + VALUES)
#define A_AT (B_AT + VALUE_HEADS)
#define CONV_AT 0
#else
#define Z_AT 0
#define V_AT VALUES
#define K_AT (2 * VALUES)
#define Q_AT (2 * VALUES + KEYS)
#define A_AT (2 * (VALUES + KEYS))
#define CONV_AT VALUES
#endif
#define WIDTH (A_AT + VALUE_HEADS)
// Channels of the head: its query, its key and its value.
#define MIXED (2 * KEY_DIM + VALUE_DIM)
#define CHANNELS_PER_THREAD ((MIXED + THREADS - 1) / THREADS)
// Rows of the state's column that a thread has.
#define ENTRIES ((KEY_DIM + LANES - 1) / LANES)
// Added to the squared length of queries and keys.
#define LENGTH_EPS 1e-6f

static_assert(THREADS % 32 == 0 && THREADS >= VALUE_DIM * LANES && 32 % LANES == 0, "whole warps, and a column in one of them");

__device__ inline float silu(float x) {
    return x / (1.0f + expf(-x));
}

// ln(1 + e^x).
__device__ inline float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// e^-x for x >= 0. Near 1, where a state is multiplied by it thousands of times, it is rounded once.
__device__ inline float decay_of(float x) {
    return x < 0.5f ? 1.0f + expm1f(-x) : expf(-x);
}

// Where channel `index` of a head's MIXED stands in a row.
__device__ inline int place_in_row(int index, int head) {
    int key_head = head / (VALUE_HEADS / KEY_HEADS);
    if (index < KEY_DIM) return Q_AT + key_head * KEY_DIM + index;
    if (index < 2 * KEY_DIM) return K_AT + key_head * KEY_DIM + index - KEY_DIM;
    return V_AT + head * VALUE_DIM + index - 2 * KEY_DIM;
}

// The sum over LANES threads, for all of them.
__device__ inline float over_column(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

// The sum of products of numbers in shared memory, which each warp computes for itself.
template <int COUNT> __device__ inline float product_of(const float* a, const float* b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < (COUNT + 31) / 32; i++) {
        int at = i * 32 + int(threadIdx.x) % 32;
        if (at < COUNT) sum = fmaf(a[at], b[at], sum);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    recurrent(const Bf16* rows, const Sequence* sequences, const float* conv, const float* conv_bias, const float* decays,
              const float* decay_bias, const float* skips, const float* norm, float eps, float* states, int stride, Bf16* out) {
    // The token's query, key and value, and what the head reads from its state.
    __shared__ float mixed[MIXED];
    __shared__ float result[VALUE_DIM];
    // Of 32 tokens, each computed by one thread: what the state is multiplied by, and how much is written.
    __shared__ float decays_of[32], writes_of[32];
    const Sequence sequence = sequences[blockIdx.x];
    const int head = int(blockIdx.y), thread = int(threadIdx.x), lane = thread % LANES, column = thread / LANES;
    float* slot = states + u64(sequence.slot) * stride;
    // The thread's part of the column, LANES apart.
    float* kept = slot + (CONV - 1) * CHANNELS + (head * VALUE_DIM + column) * KEY_DIM + lane;

    float state[ENTRIES];
#pragma unroll
    for (int e = 0; e < ENTRIES; e++) {
        bool exists = column < VALUE_DIM && e * LANES + lane < KEY_DIM;
        state[e] = sequence.begins || !exists ? 0.0f : kept[e * LANES];
    }
    // The factors of the convolution, and its bias, each read by the thread that writes it: registers hold the state.
    __shared__ float factors[CONV + 1][MIXED];
    float inputs[CHANNELS_PER_THREAD][CONV];
#pragma unroll
    for (int c = 0; c < CHANNELS_PER_THREAD; c++) {
        int index = c * THREADS + thread;
        if (index >= MIXED) continue;
        int channel = place_in_row(index, head) - CONV_AT;
        factors[CONV][index] = conv_bias ? conv_bias[channel] : 0.0f;
#pragma unroll
        for (int tap = 0; tap < CONV; tap++) factors[tap][index] = conv[channel * CONV + tap];
#pragma unroll
        for (int tap = 0; tap < CONV - 1; tap++) inputs[c][tap] = sequence.begins ? 0.0f : slot[tap * CHANNELS + channel];
    }

#pragma unroll 1
    for (u32 token = 0; token < sequence.tokens; token++) {
        const Bf16* row = rows + u64(sequence.first_token + token) * WIDTH;
        // Nobody reads the gates of the tokens before: a barrier has followed.
        if (token % 32 == 0 && thread < 32 && token + thread < sequence.tokens) {
            const Bf16* gates = row + u64(thread) * WIDTH;
            float time = softplus(widen(gates[A_AT + head]) + decay_bias[head]);
            decays_of[thread] = decay_of(expf(decays[head]) * time);
#if KIND == 0
            writes_of[thread] = 1.0f / (1.0f + expf(-widen(gates[B_AT + head])));
#else
            writes_of[thread] = time;
#endif
        }
#pragma unroll
        for (int c = 0; c < CHANNELS_PER_THREAD; c++) {
            int index = c * THREADS + thread;
            if (index >= MIXED) continue;
            inputs[c][CONV - 1] = widen(row[place_in_row(index, head)]);
            float sum = factors[CONV][index];
#pragma unroll
            for (int tap = 0; tap < CONV; tap++) sum = fmaf(inputs[c][tap], factors[tap][index], sum);
            mixed[index] = silu(sum);
#pragma unroll
            for (int tap = 0; tap < CONV - 1; tap++) inputs[c][tap] = inputs[c][tap + 1];
        }
        __syncthreads();

        const float* query = mixed;
        const float* key = mixed + KEY_DIM;
        const float value = column < VALUE_DIM ? mixed[2 * KEY_DIM + column] : 0.0f;
        const float decay = decays_of[token % 32], write = writes_of[token % 32];
        // What the decayed state gives for the key and for the query. What is then written gives the query's product
        // with the key, so the state is not read twice.
        float seen = 0, sum = 0;
#pragma unroll
        for (int e = 0; e < ENTRIES; e++) {
            state[e] *= decay;
            if (e * LANES + lane >= KEY_DIM) continue;
            if (KIND == 0) seen = fmaf(state[e], key[lane + e * LANES], seen);
            sum = fmaf(state[e], query[lane + e * LANES], sum);
        }
#if KIND == 0
        // The lengths of the query and the key are factors of sums.
        const float of_query = 1.0f / sqrtf(float(KEY_DIM)) / sqrtf(product_of<KEY_DIM>(query, query) + LENGTH_EPS);
        const float of_key = 1.0f / sqrtf(product_of<KEY_DIM>(key, key) + LENGTH_EPS);
        const float change = (value - over_column(seen) * of_key) * write * of_key;
#else
        const float of_query = 1.0f, change = write * value;
#endif
        sum = fmaf(product_of<KEY_DIM>(query, key), change, over_column(sum)) * of_query;
        if (KIND == 1) sum = fmaf(value, skips[head], sum);
#pragma unroll
        for (int e = 0; e < ENTRIES; e++) {
            int at = e * LANES + lane;
            if (at < KEY_DIM) state[e] = fmaf(change, key[at], state[e]);
        }
        if (lane == 0 && column < VALUE_DIM) result[column] = sum;
        // Afterwards, all threads have read the query, the key and the value.
        __syncthreads();

        if (KIND == 0) sum = 1.0f / sqrtf(product_of<VALUE_DIM>(result, result) / VALUE_DIM + eps);
        if (thread < VALUE_DIM) {
            float x = result[thread];
            if (KIND == 0) x = x * sum * norm[thread];
            float z = widen(row[Z_AT + head * VALUE_DIM + thread]);
            out[u64(sequence.first_token + token) * VALUES + head * VALUE_DIM + thread] = to_bf16(x * silu(z));
        }
    }

#pragma unroll
    for (int e = 0; e < ENTRIES; e++)
        if (column < VALUE_DIM && e * LANES + lane < KEY_DIM) kept[e * LANES] = state[e];
}
