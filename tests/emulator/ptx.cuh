// What kernels/common/ptx.cuh says, in C++.
#pragma once
#include "emulator.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "these instructions need sm_80"
#endif

inline float bits_to_float(unsigned int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline unsigned int float_to_bits(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline unsigned short float_to_bf16(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline unsigned char float_to_e4m3(float x) {
    unsigned char sign = std::signbit(x) ? 0x80 : 0;
    if (x != x) return sign | 0x7f;
    float a = std::fabs(x);
    if (a >= 448.0f) return sign | 0x7e;
    int exponent;
    std::frexp(a, &exponent);
    int power = exponent - 1 < -6 ? -6 : exponent - 1;
    int steps = (int)std::nearbyint(std::ldexp(a, 3 - power));
    if (steps == 16) {
        power += 1;
        steps = 8;
    }
    if (steps < 8) return sign | (unsigned char)steps;
    return sign | (unsigned char)((power + 7) << 3 | (steps - 8));
}

inline float e4m3_to_float(unsigned char x) {
    int power = x >> 3 & 15, steps = x & 7;
    if ((x & 0x7f) == 0x7f) return NAN;
    float a = power == 0 ? std::ldexp((float)steps, -9) : std::ldexp((float)(8 + steps), power - 10);
    return x & 0x80 ? -a : a;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
inline unsigned short floats_to_e4m3(float low, float high) {
    return (unsigned short)(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}
#endif

inline float shuffle_xor(float x, int lanes) {
    return emulator::exchange(x, emulator::self().lane ^ lanes);
}

inline unsigned long long shuffle_xor(unsigned long long x, int lanes) {
    return emulator::exchange(x, emulator::self().lane ^ lanes);
}

inline unsigned long long shuffle_up(unsigned long long x, int lanes) {
    unsigned lane = emulator::self().lane;
    return emulator::exchange(x, lane < (unsigned)lanes ? lane : lane - lanes);
}

inline unsigned int vote(bool x) {
    unsigned int mine[1] = {x};
    const auto& all = emulator::gather<1>(mine);
    unsigned int votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= all.of[lane][0] << lane;
    return votes;
}

inline int bits_set(unsigned int x) {
    return __builtin_popcount(x);
}

inline float add_toward_zero(float a, float b) {
    double exact = (double)a + b;
    float sum = (float)exact;
    return std::fabs(sum) > std::fabs(exact) ? std::nextafter(sum, 0.0f) : sum;
}

inline float power_of_two(float x) {
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}

inline int anew(int x) {
    return x;
}

inline int bit_length(unsigned long long x) {
    return x == 0 ? 0 : 64 - __builtin_clzll(x);
}

inline unsigned int add_shared(unsigned int* to, unsigned int x) {
    unsigned int before = *to;
    *to += x;
    return before;
}

inline void add_shared(unsigned long long* to, unsigned long long x) {
    *to += x;
}

inline unsigned int shared_address(const void* pointer) {
    return (unsigned int)((const unsigned char*)pointer - emulator::block().shared_start());
}

template <class To> void copy_async(To* to, const void* from, int bytes) {
    emulator::block().services->begin_copy(to, from, 16, bytes);
}

template <class To> void copy_word_async(To* to, const void* from, int bytes) {
    emulator::block().services->begin_copy(to, from, 4, bytes);
}

inline void copy_group() {
    emulator::block().services->end_copies();
}

template <int LEFT> void copy_wait() {
    emulator::block().services->wait_for_copies(LEFT);
}

inline void load_matrices(unsigned int (&out)[4], const void* row) {
    unsigned int address[2];
    std::memcpy(address, &row, 8);
    const auto& rows = emulator::gather<2>(address);
    unsigned lane = emulator::self().lane;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const unsigned char* from;
        std::memcpy(&from, rows.of[matrix * 8 + lane / 4], 8);
        std::memcpy(&out[matrix], from + lane % 4 * 4, 4);
    }
}

inline void load_transposed(unsigned int (&out)[4], const void* row) {
    unsigned int address[2];
    std::memcpy(address, &row, 8);
    const auto& rows = emulator::gather<2>(address);
    unsigned lane = emulator::self().lane;
    for (unsigned matrix = 0; matrix < 4; matrix++)
        for (unsigned i = 0; i < 2; i++) {
            const unsigned char* from;
            std::memcpy(&from, rows.of[matrix * 8 + lane % 4 * 2 + i], 8);
            std::memcpy((unsigned char*)&out[matrix] + i * 2, from + lane / 4 * 2, 2);
        }
}

namespace emulator {
// The 32 bytes of a row or of a column, from the fragments of all lanes.
inline void row_of_a(const Words<6>& all, int row, unsigned int (&to)[8]) {
    for (int k = 0; k < 8; k++) to[k] = all.of[row % 8 * 4 + k % 4][k / 4 * 2 + row / 8];
}
inline void column_of_b(const Words<6>& all, int column, unsigned int (&to)[8]) {
    for (int k = 0; k < 8; k++) to[k] = all.of[column * 4 + k % 4][4 + k / 4];
}
// Adds to a lane's four sums; `PRODUCT` multiplies two rows of 32 bytes.
template <auto PRODUCT, class Sum> void multiply(Sum (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    unsigned int mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const auto& all = gather<6>(mine);
    int lane = self().lane;
    unsigned int x[2][8], w[2][8];
    for (int i = 0; i < 2; i++) {
        row_of_a(all, lane / 4 + i * 8, x[i]);
        column_of_b(all, lane % 4 * 2 + i, w[i]);
    }
    for (int i = 0; i < 4; i++) c[i] += PRODUCT((const unsigned char*)x[i / 2], (const unsigned char*)w[i % 2]);
}
}  // namespace emulator

struct E4m3 {};
struct Bf16Pairs {};

namespace emulator {
// Products of two rows of 32 bytes. Most of the emulator's time is theirs, so they use SSE2, which every x86-64 has, and several sums.
inline __m128i bytes16(const unsigned char* from) {
    return _mm_loadu_si128((const __m128i*)from);
}
inline int int8_product(const unsigned char* x, const unsigned char* w) {
    const __m128i none = _mm_setzero_si128();
    __m128i sum = none;
    for (int at = 0; at < 32; at += 16) {
        // Shifted down from the upper half of 16 bits, a byte keeps its sign.
        __m128i low = _mm_madd_epi16(_mm_srai_epi16(_mm_unpacklo_epi8(none, bytes16(x + at)), 8),
                                     _mm_srai_epi16(_mm_unpacklo_epi8(none, bytes16(w + at)), 8));
        __m128i high = _mm_madd_epi16(_mm_srai_epi16(_mm_unpackhi_epi8(none, bytes16(x + at)), 8),
                                      _mm_srai_epi16(_mm_unpackhi_epi8(none, bytes16(w + at)), 8));
        sum = _mm_add_epi32(sum, _mm_add_epi32(low, high));
    }
    int of[4];
    std::memcpy(of, &sum, 16);
    return of[0] + of[1] + of[2] + of[3];
}
inline float e4m3_product(const unsigned char* x, const unsigned char* w) {
    static const struct Values {
        float of[256];
        Values() {
            for (int i = 0; i < 256; i++) of[i] = e4m3_to_float((unsigned char)i);
        }
    } values;
    float sums[4] = {};
    for (int k = 0; k < 32; k += 4)
        for (int i = 0; i < 4; i++) sums[i] += values.of[x[k + i]] * values.of[w[k + i]];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}
inline float bf16_product(const unsigned char* x, const unsigned char* w) {
    const __m128i upper = _mm_set1_epi32((int)0xffff0000);
    __m128 sum = _mm_setzero_ps();
    for (int at = 0; at < 32; at += 16) {
        __m128i a = bytes16(x + at), b = bytes16(w + at);
        __m128 even = _mm_mul_ps(_mm_castsi128_ps(_mm_slli_epi32(a, 16)), _mm_castsi128_ps(_mm_slli_epi32(b, 16)));
        __m128 odd = _mm_mul_ps(_mm_castsi128_ps(_mm_and_si128(a, upper)), _mm_castsi128_ps(_mm_and_si128(b, upper)));
        sum = _mm_add_ps(sum, _mm_add_ps(even, odd));
    }
    float of[4];
    std::memcpy(of, &sum, 16);
    return of[0] + of[1] + (of[2] + of[3]);
}
}  // namespace emulator

inline void multiply(int (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    emulator::multiply<emulator::int8_product>(c, a, b);
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
inline void multiply(E4m3, float (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    emulator::multiply<emulator::e4m3_product>(c, a, b);
}
#endif
inline void multiply(Bf16Pairs, float (&c)[4], const unsigned int (&a)[4], const unsigned int* b) {
    emulator::multiply<emulator::bf16_product>(c, a, b);
}
