// What kernels/common/hopper.cuh says, in C++.
#pragma once
#include "ptx.cuh"
#include <algorithm>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "these instructions need sm_90a"
#endif

template <int WIDTH = 128> inline unsigned long long tile_descriptor(const void* tile) {
    const unsigned long long swizzle = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
    if (shared_address(tile) % (8 * WIDTH) > 0) emulator::fail("has a tile that does not start where its swizzle does");
    return shared_address(tile) >> 4 | 1ull << 16 | (unsigned long long)(WIDTH / 2) << 32 | swizzle << 62;
}

inline void stores_before_products() {
    emulator::block().services->fence_copies();
}

// What the next products read and write: sums, and the left matrix's registers. Whatever writes these before a wait fails there.
template <class Sum, int N> inline void products_begin(Sum (&d)[N]) {
    emulator::block().services->fence_registers(d, sizeof d);
}

template <class Sum, int N, int M> inline void products_begin(Sum (&d)[N], unsigned (&a)[M][4]) {
    for (auto& four : a) emulator::block().services->fence_registers(four, sizeof four);
    products_begin(d);
}

inline void products_end() {
    emulator::block().services->end_products();
}

template <int LEFT> inline void products_wait() {
    emulator::block().services->wait_for_products(LEFT);
}

// Sums are there for those alone who name them here: a compiler may compute with others before it waits.
template <class Sum, int N> inline void products_done(Sum (&d)[N]) {
    products_wait<0>();
    emulator::block().services->end_sums(d, sizeof d);
    emulator::block().services->forget_fence(d);
}

template <class Sum, int N, int M> inline void products_done(Sum (&d)[N], unsigned (&a)[M][4]) {
    products_done(d);
    for (auto& four : a) emulator::block().services->forget_fence(four);
}

namespace emulator {
// Where a byte lies that would lie at `offset` without the swizzle over `width` bytes.
inline unsigned char* swizzled(unsigned offset, unsigned width = 128) {
    return block().shared_start() + (offset ^ (offset >> 7 & (width / 16 - 1)) << 4);
}

// Row `row` of a descriptor's tile, 32 bytes.
inline void row_of(unsigned long long tile, int row, unsigned char (&to)[32]) {
    unsigned start = (unsigned)(tile & 0x3fff) << 4, step = (unsigned)(tile >> 32 & 0x3fff) << 4, swizzle = (unsigned)(tile >> 62);
    if (swizzle == 0) fail("multiplies a tile without a swizzle, which nobody has asked for yet");
    unsigned width = 256 >> swizzle;
    for (int half = 0; half < 2; half++) {
        const unsigned char* from = swizzled(start + row / 8 * step + row % 8 * width + half * 16, width);
        size_t at = size_t(from - block().shared_start()) / 16;
        if (at < block().unfenced_size && block().unfenced[at]) fail("multiplies what a copy has brought and no fence has followed");
        std::memcpy(to + half * 16, from, 16);
    }
}

// The left matrix: rows `lane / 4` and 8 further of the warp's 16.
typedef unsigned char Rows[2][32];

// What a product multiplies: the left matrix in shared memory, or in registers, of all lanes of the warp, which must stay as they are
// until the product is done. `rows` are those in registers, and `own` is what this thread's were.
struct Operands {
    unsigned long long left, right;
    const void* registers;
    Rows rows;
    unsigned own[4];
    int add;
};

// A thread's part of a product: half as many sums as it has columns.
template <auto PRODUCT, class Sum, int N> void compute(void* sums, const void* operands) {
    Operands of = *(const Operands*)operands;
    Sum* d = (Sum*)sums;
    if (!of.registers)
        for (int half = 0; half < 2; half++) row_of(of.left, self().warp % 4 * 16 + self().lane / 4 + half * 8, of.rows[half]);
    else if (std::memcmp(of.own, of.registers, 16) != 0)
        fail("changes registers that a product still reads");
    unsigned char w[32];
    for (int n = 0; n < N / 4; n++)
        for (int i = 0; i < 2; i++) {
            row_of(of.right, n * 8 + self().lane % 4 * 2 + i, w);
            for (int half = 0; half < 2; half++) {
                Sum& sum = d[n * 4 + half * 2 + i];
                sum = (of.add ? sum : 0) + PRODUCT(of.rows[half], w);
            }
        }
}

template <auto PRODUCT, class Sum, int N> void products(Sum (&d)[N], unsigned long long a, unsigned long long b, int add) {
    Operands of{a, b, nullptr, {}, {}, add};
    block().services->begin_product(d, sizeof d, compute<PRODUCT, Sum, N>, &of, sizeof of);
}

template <auto PRODUCT, class Sum, int N> void products(Sum (&d)[N], const unsigned (&a)[4], unsigned long long b, int add) {
    Operands of{0, b, a, {}, {a[0], a[1], a[2], a[3]}, add};
    block().services->check_fence(a, sizeof a);
    const Words<4>& all = gather<4>(a);
    for (int lane = 0; lane < 4; lane++)
        for (int i = 0; i < 4; i++) std::memcpy(of.rows[i % 2] + i / 2 * 16 + lane * 4, &all.of[self().lane / 4 * 4 + lane][i], 4);
    block().services->begin_product(d, sizeof d, compute<PRODUCT, Sum, N>, &of, sizeof of);
}
}  // namespace emulator

template <int N> inline void products(int (&d)[N], unsigned long long a, unsigned long long b, int add) {
    emulator::products<emulator::int8_product>(d, a, b, add);
}
template <int N> inline void products(E4m3, float (&d)[N], unsigned long long a, unsigned long long b, int add) {
    emulator::products<emulator::e4m3_product>(d, a, b, add);
}
template <int N> inline void products(Bf16Pairs, float (&d)[N], unsigned long long a, unsigned long long b, int add) {
    emulator::products<emulator::bf16_product>(d, a, b, add);
}

template <int N> inline void products(int (&d)[N], const unsigned (&a)[4], unsigned long long b, int add) {
    emulator::products<emulator::int8_product>(d, a, b, add);
}
template <int N> inline void products(E4m3, float (&d)[N], const unsigned (&a)[4], unsigned long long b, int add) {
    emulator::products<emulator::e4m3_product>(d, a, b, add);
}
template <int N> inline void products(Bf16Pairs, float (&d)[N], const unsigned (&a)[4], unsigned long long b, int add) {
    emulator::products<emulator::bf16_product>(d, a, b, add);
}

struct alignas(8) Barrier {
    unsigned short count, pending;
    int announced : 31;
    unsigned phase : 1;
};

namespace emulator {
inline void settle(Barrier* barrier) {
    if (barrier->pending > 0 || barrier->announced > 0) return;
    barrier->pending = barrier->count;
    barrier->phase ^= 1;
    block().progressed = true;
}
}  // namespace emulator

inline void barrier_init(Barrier* barrier, int count) {
    *barrier = Barrier{(unsigned short)count, (unsigned short)count, 0, 0};
}
inline void barriers_made() {}
inline void barrier_arrive(Barrier* barrier) {
    barrier->pending--;
    emulator::settle(barrier);
}
inline void barrier_expect(Barrier* barrier, int bytes) {
    barrier->announced += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(Barrier* barrier, int parity) {
    while (barrier->phase == (unsigned)parity) emulator::yield();
}

// In words of the tests' own: data, rows, columns, bytes from row to row, the box's columns and rows, bytes of an element.
struct alignas(128) TensorMap {
    unsigned long long words[16];
};

inline void copy_box(void* to, const TensorMap* map, int x, int y, Barrier* barrier) {
    const auto& m = map->words;
    unsigned start = shared_address(to), size = (unsigned)m[6], width = (unsigned)m[4] * size;
    for (unsigned row = 0; row < m[5]; row++) {
        bool exists = y + row < m[1];
        long long left = exists ? ((long long)m[2] - x) * size : 0;
        const unsigned char* from = (const unsigned char*)m[0] + (y + row) * m[3] + (long long)x * size;
        for (unsigned at = 0; at < width; at += 16) {
            unsigned char* part = emulator::swizzled(start + row * width + at);
            std::memset(part, 0, 16);
            if (at < left) std::memcpy(part, from + at, std::min<long long>(left - at, 16));
        }
    }
    barrier->announced -= (int)(m[5] * width);
    emulator::settle(barrier);
}

template <int REGISTERS> inline void registers_fewer() {}
template <int REGISTERS> inline void registers_more() {}
