// random.cu against the known answers of Random123, and against Philox as its paper has it.
#include "ptx.cuh"
#include "../../kernels/random.cu"
#include "check.h"
#include <array>

typedef std::array<u32, 4> Words;

static Words plain_philox(Words counter, std::array<u32, 2> key) {
    for (int round = 0; round < 10; round++) {
        if (round > 0) key = {key[0] + 0x9e3779b9u, key[1] + 0xbb67ae85u};
        u64 a = 0xd2511f53ull * counter[0], b = 0xcd9e8d57ull * counter[2];
        counter = {u32(b >> 32) ^ counter[1] ^ key[0], u32(b), u32(a >> 32) ^ counter[3] ^ key[1], u32(a)};
    }
    return counter;
}

static void check_known_answers() {
    struct Answer {
        std::array<u32, 2> key;
        Words counter, words;
    };
    const u32 ones = 0xffffffffu;
    const Answer answers[] = {
        {{0, 0}, {0, 0, 0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{ones, ones}, {ones, ones, ones, ones}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0xa4093822, 0x299f31d0}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (const Answer& a : answers) {
        u32 words[4] = {a.counter[0], a.counter[1], a.counter[2], a.counter[3]};
        philox(words, a.key[0], a.key[1]);
        bool right = std::equal(words, words + 4, a.words.begin()) && plain_philox(a.counter, a.key) == a.words;
        check::expect(right, "Philox's known answer %08x", a.words[0]);
    }
}

static void check_numbers(u64 count, unsigned blocks, u64 seed, float scale) {
    // Its end may lie in the middle of four.
    std::vector<Bf16> out(count + 4, Bf16{0x7fff});
    check::run(random_weights, blocks, 1, THREADS, 0, 1, out.data(), count, seed, scale);
    bool same = true;
    double sum = 0, squares = 0;
    for (u64 i = 0; i < count; i++) {
        Words words = plain_philox({u32(i / 4), u32(i / 4 >> 32), 0, 0}, {u32(seed), u32(seed >> 32)});
        double u = (words[i % 4] >> 8) / 8388608.0 - 1;
        same &= out[i].bits == to_bf16(float(scale * u)).bits;
        sum += u;
        squares += u * u;
    }
    for (u64 i = count; i < count + 4; i++) same &= out[i].bits == 0x7fff;
    // A mean of 0 and a square of 1/3, five deviations on both sides: 1/3 and 4/45 are the variances.
    bool even = std::fabs(sum / count) < 5 * std::sqrt(1 / 3.0 / count) && std::fabs(squares / count - 1 / 3.0) < 5 * std::sqrt(4 / 45.0 / count);
    check::expect(same && even, "%llu random weights by %u blocks, seed %llx", count, blocks, seed);
}

int main() {
    check_known_answers();
    check_numbers(10007, 3, 1, 0.02f);
    check_numbers(10007, 50, 1, 0.02f);
    check_numbers(4096, 1, 0x123456789abcdefull, 1.0f);
    check_numbers(5, 1, 7, 1.0f);
    return check::verdict();
}
