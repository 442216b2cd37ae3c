// Encodings that NVIDIA's documents fix, computed here from their formulas alone, against the emulator's instructions and, where DEVICE is
// defined, against what kernels/common/hopper.cuh itself makes of a descriptor. Kernels are tried on the emulator's instructions, so these
// must be those of a card.
#ifdef DEVICE
// The header as it is, without what is for the assembler: its descriptors are plain C++.
#define asm
#define volatile(...) (void)0
#define __device__
#define __noinline__
static unsigned shared_address_of;
inline unsigned shared_address(const void*) { return shared_address_of; }
struct E4m3 {};
struct Bf16Pairs {};
// run.sh makes it: hopper.cuh without its `#include`, which has no words of C++.
#include "hopper_itself.cuh"
#undef asm
#undef volatile
#include <cstdio>
#include <initializer_list>

// PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout", "Matrix Descriptor Format": bits 13-0 are the start address,
// 29-16 the leading dimension's byte offset and 45-32 the stride's, each (x & 0x3FFFF) >> 4; 51-49 the base offset; 63-62 the swizzle:
// 0 none, 1 of 128 bytes, 2 of 64, 3 of 32. Eight rows of a swizzled K-major tile are one atom: the stride is 8 rows; the leading
// offset is not used by swizzled K-major layouts, and 1 is what is customary.
static unsigned long long descriptor(unsigned address, unsigned width) {
    auto field = [](unsigned long long x) { return (x & 0x3FFFF) >> 4; };
    unsigned long long swizzle = width == 128 ? 1 : width == 64 ? 2 : 3;
    return field(address) | 1ull << 16 | field(8 * width) << 32 | 0ull << 49 | swizzle << 62;
}

int main() {
    bool failed = false;
    for (unsigned address : {0u, 1024u, 0x8000u, 0x38c00u})
        for (unsigned width : {32u, 64u, 128u}) {
            shared_address_of = address;
            unsigned long long got = width == 128 ? tile_descriptor<128>(nullptr) : width == 64 ? tile_descriptor<64>(nullptr) : tile_descriptor<32>(nullptr);
            bool fine = got == descriptor(address, width);
            failed |= !fine;
            std::printf("%s: descriptor of a tile of %u bytes a row at %#x: %#llx\n", fine ? "ok" : "FAILED", width, address, got);
        }
    // CUDA driver API, CUtensorMap: an opaque 128 bytes; CUDA 13 aligns it to 128.
    bool fine = sizeof(TensorMap) == 128 && alignof(TensorMap) == 128;
    std::printf("%s: a tensor map is 128 bytes on 128\n", fine ? "ok" : "FAILED");
    return failed || !fine;
}
#else
#include "hopper.cuh"
#include "../../kernels/common/attention.cuh"
#include "check.h"

static signed char a_of(int row, int k) { return (signed char)((row * 37 + k * 11) % 251 - 125); }
static signed char b_of(int k, int column) { return (signed char)((k * 53 + column * 29) % 241 - 120); }
static int c_of(int row, int column) {
    int sum = 0;
    for (int k = 0; k < 32; k++) sum += a_of(row, k) * b_of(k, column);
    return sum;
}
static unsigned char& byte(unsigned* words, int i) { return ((unsigned char*)words)[i]; }

// PTX ISA, "Matrix Fragments for mma.m16n8k32", .s8: with groupID = lane >> 2 and threadID_in_group = lane % 4, byte i of a is
// row groupID for i in 0..3 and 8..11, else groupID + 8, and column threadID_in_group * 4 + (i & 3), 16 more from i = 8 on;
// byte i of b is row threadID_in_group * 4 + (i & 3), 16 more from i = 4 on, and column groupID; c of i is row groupID, 8 more
// from i = 2 on, and column threadID_in_group * 2 + (i & 1).
static void fragments(int* wrong) {
    int lane = int(threadIdx.x), group = lane >> 2, thread = lane % 4;
    unsigned a[4], b[2];
    for (int i = 0; i < 16; i++)
        byte(a, i) = (unsigned char)a_of(i < 4 || (i >= 8 && i < 12) ? group : group + 8, thread * 4 + (i & 3) + (i >= 8 ? 16 : 0));
    for (int i = 0; i < 8; i++) byte(b, i) = (unsigned char)b_of(thread * 4 + (i & 3) + (i >= 4 ? 16 : 0), group);
    int c[4] = {};
    multiply(c, a, b);
    for (int i = 0; i < 4; i++)
        if (c[i] != c_of(group + (i >= 2 ? 8 : 0), thread * 2 + (i & 1))) wrong[lane]++;
}

// PTX ISA, "Warp-level matrix load instruction: ldmatrix": of matrix i, whose rows lanes 8 i to 8 i + 7 point to, lane l gets row l / 4,
// bytes 4 (l % 4) on.
static void loads(int* wrong) {
    DYNAMIC_SHARED(shared);
    int lane = int(threadIdx.x);
    for (int i = 0; i < 16; i++) shared[lane * 16 + i] = (unsigned char)(lane * 16 + i);
    __syncwarp();
    unsigned out[4];
    load_matrices(out, shared + lane * 16);
    for (int i = 0; i < 16; i++)
        if (byte(out, i) != (unsigned char)((i / 4 * 8 + lane / 4) * 16 + lane % 4 * 4 + i % 4)) wrong[lane]++;
}

// Where a K-major tile swizzled over `width` bytes has byte `k` of row `row` (CUDA C++ Programming Guide, "Tensor Memory Access: Swizzle
// modes", and PTX ISA, "Shared Memory Matrix Layout"): rows of `width` bytes follow each other, and bits 4 on of the address, as many
// as chunks of 16 bytes in a row have, are xor'ed with those from bit 7 on.
static unsigned swizzled_at(unsigned row, unsigned k, unsigned width) {
    unsigned address = row * width + k, bits = width == 128 ? 3 : width == 64 ? 2 : 1;
    return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4);
}

// PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32", D: warp w of the warpgroup has rows 16 w + lane / 4, 8 more where
// i % 4 >= 2, and columns 8 (i / 4) + 2 (lane % 4) + i % 2. A in registers is as in mma.m16n8k32.
template <int WIDTH, bool REGISTERS> static void warpgroups(int* wrong) {
    DYNAMIC_SHARED(shared);
    int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32, group = lane >> 2;
    unsigned char *left = shared, *right = shared + 64 * WIDTH;
    for (int i = thread; i < 64 * 32; i += 128) left[swizzled_at(i / 32, i % 32, WIDTH)] = (unsigned char)a_of(i / 32, i % 32);
    for (int i = thread; i < 32 * 32; i += 128) right[swizzled_at(i / 32, i % 32, WIDTH)] = (unsigned char)b_of(i % 32, i / 32);
    stores_before_products();
    __syncthreads();
    int d[16];
    unsigned a[1][4];
    for (int i = 0; i < 16; i++)
        byte(a[0], i) = (unsigned char)a_of(warp * 16 + (i < 4 || (i >= 8 && i < 12) ? group : group + 8),
                                            lane % 4 * 4 + (i & 3) + (i >= 8 ? 16 : 0));
    products_begin(d, a);
    if (REGISTERS) products(d, a[0], tile_descriptor<WIDTH>(right), 0);
    else products(d, tile_descriptor<WIDTH>(left), tile_descriptor<WIDTH>(right), 0);
    products_end();
    products_done(d, a);
    for (int i = 0; i < 16; i++)
        if (d[i] != c_of(warp * 16 + group + (i % 4 >= 2 ? 8 : 0), i / 4 * 8 + lane % 4 * 2 + i % 2)) wrong[thread]++;
}

static void none_wrong(const char* what, void (*kernel)(int*), unsigned threads) {
    for (unsigned seed : {2u, 3u}) {
        std::vector<int> wrong(threads);
        check::run(kernel, 1, 1, threads, 64 << 10, seed, wrong.data());
        check::expect(std::count(wrong.begin(), wrong.end(), 0) == (int)threads, "%s as the document has it, seed %u", what, seed);
    }
}

int main() {
    none_wrong("fragments of mma.m16n8k32", fragments, 32);
    none_wrong("ldmatrix", loads, 32);
    none_wrong("wgmma, 128 bytes", warpgroups<128, false>, 128);
    none_wrong("wgmma, 64 bytes", warpgroups<64, false>, 128);
    none_wrong("wgmma, 32 bytes", warpgroups<32, false>, 128);
    none_wrong("wgmma, left matrix in registers", warpgroups<128, true>, 128);
    // Where the kernels put 16-byte parts of rows themselves.
    bool placed = true;
    for (unsigned row = 0; row < 64; row++)
        for (unsigned part = 0; part < 8; part++) {
            placed &= place<128>(row, part) == int(swizzled_at(row, part * 16, 128));
            placed &= part >= 4 || place<64>(row, part) == int(swizzled_at(row, part * 16, 64));
            placed &= part >= 2 || place<32>(row, part) == int(swizzled_at(row, part * 16, 32));
        }
    check::expect(placed, "parts of rows lie as the swizzles of 128, 64 and 32 bytes have them");
    return check::verdict();
}
#endif
