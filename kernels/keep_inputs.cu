// Keeps the last inputs of a recurrent layer's convolution in the slots of the step's sequences, after
// recurrent.cu has read those of earlier steps. A thread keeps those of one channel of a sequence.
//
// CONV: tokens that the convolution sees, at least 2. rows: [tokens][width] BF16, whose channels begin at
// `first`. states: [slots][stride] F32, of which [CONV - 1][channels] at the beginning of each are the
// inputs, the oldest first.
#include "ptx.cuh"
#include "types.cuh"
#include "recurrent.cuh"

extern "C" __global__ void __launch_bounds__(256)
    keep_inputs(const Bf16* rows, const Sequence* sequences, float* states, int width, int first, int channels, int stride) {
    int channel = int(blockIdx.y * 256 + threadIdx.x);
    if (channel >= channels) return;
    const Sequence sequence = sequences[blockIdx.x];
    float* kept = states + u64(sequence.slot) * stride + channel;
    float inputs[CONV - 1];
#pragma unroll
    for (int tap = 0; tap < CONV - 1; tap++) {
        // Counted from the step's first token on; before it are those that are kept.
        int token = int(sequence.tokens) - (CONV - 1) + tap;
        if (token >= 0)
            inputs[tap] = widen(rows[u64(sequence.first_token + token) * width + first + channel]);
        else
            inputs[tap] = sequence.begins ? 0.0f : kept[(token + CONV - 1) * channels];
    }
#pragma unroll
    for (int tap = 0; tap < CONV - 1; tap++) kept[tap * channels] = inputs[tap];
}
