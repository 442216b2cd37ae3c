// Random numbers where weights would be, for benchmarks: out[i] = scale * u, u evenly in [-1, 1) in steps of 2^-23, the same on any grid.
//
// out: [count] BF16, on 8 bytes. By Philox4x32-10 (Salmon et al. 2011), as src/engine/philox.rs has it: number i is word i % 4 of
// counter {i / 4, its upper half, 0, 0} under key {seed, its upper half}.
#include "ptx.cuh"
#include "types.cuh"

#define THREADS 256

__device__ inline void philox(u32 (&counter)[4], u32 key, u32 other_key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 low = u64(0xd2511f53u) * counter[0], high = u64(0xcd9e8d57u) * counter[2];
        counter[0] = u32(high >> 32) ^ counter[1] ^ key;
        counter[1] = u32(high);
        counter[2] = u32(low >> 32) ^ counter[3] ^ other_key;
        counter[3] = u32(low);
        key += 0x9e3779b9u;
        other_key += 0xbb67ae85u;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) random_weights(Bf16* out, u64 count, u64 seed, float scale) {
    for (u64 four = u64(blockIdx.x) * THREADS + threadIdx.x; four < (count + 3) / 4; four += u64(gridDim.x) * THREADS) {
        u32 words[4] = {u32(four), u32(four >> 32), 0, 0};
        philox(words, u32(seed), u32(seed >> 32));
        Bf16 numbers[4];
#pragma unroll
        for (int i = 0; i < 4; i++) numbers[i] = to_bf16(scale * (float(words[i] >> 8) * bits_to_float(0x34000000) - 1.0f));
        if (four * 4 + 4 <= count) {
            u64 all = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) all |= u64(numbers[i].bits) << i * 16;
            *(u64*)(out + four * 4) = all;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (four * 4 + i < count) out[four * 4 + i] = numbers[i];
        }
    }
}
