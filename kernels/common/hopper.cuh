// Instructions that only Hopper has (sm_90a): products of a warpgroup, copies of the tensor memory
// accelerator, and their barriers. Tests replace this file by a version that a CPU runs.
//
// A warpgroup's product has 64 rows x 16 to 256 columns; each thread holds half as many sums as
// there are columns. Warp w of the warpgroup holds rows 16 w to 16 w + 15, in tiles of 8 columns
// with the layout of `multiply` in ptx.cuh: d[4 t + i] of tile t. If the left matrix comes from
// registers, warp w provides its 16 rows, in the layout of a in `multiply`. (PTX ISA, "Register
// Fragments for wgmma.mma_async.m64nNk32".)
#pragma once
#include "ptx.cuh"

// To be called before a barrier: makes this thread's stores to shared memory visible to products,
// which read through another proxy than loads.
__device__ inline void stores_before_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Descriptor of a tile in shared memory, with rows of WIDTH bytes (32, 64 or 128), swizzled over
// WIDTH bytes and aligned to 8 WIDTH bytes. A step of 32 bytes along a row adds 2.
template <int WIDTH = 128> __device__ inline unsigned long long tile_descriptor(const void* tile) {
    const unsigned long long swizzle = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
    unsigned long long address = (shared_address(tile) & 0x3ffff) >> 4;
    // Groups of eight rows are 8 WIDTH bytes apart.
    return address | 1ull << 16 | (unsigned long long)(WIDTH / 2) << 32 | swizzle << 62;
}

// Keeps the compiler from moving computations with registers that asynchronous products read or
// write across this point. A `volatile` asm keeps its order only relative to other `volatile` asm;
// for the compiler, arithmetic on registers that the asm does not name is unrelated to it.
template <int N> __device__ inline void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N> __device__ inline void pin(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

template <int N> __device__ inline void pin(unsigned int (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
}

// To be called before products with sums `d` and, if the left matrix is in registers, `a`.
template <class Sum, int N> __device__ inline void products_begin(Sum (&d)[N]) {
    pin(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <class Sum, int N, int M> __device__ inline void products_begin(Sum (&d)[N], unsigned int (&a)[M][4]) {
    pin(a);
    products_begin(d);
}

__device__ inline void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `LEFT` groups are unfinished. To read their sums, wait for all groups.
template <int LEFT> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Waits for all groups: then the sums are complete, and the left matrix's registers may be reused.
template <class Sum, int N> __device__ inline void products_done(Sum (&d)[N]) {
    products_wait<0>();
    pin(d);
}

template <class Sum, int N, int M> __device__ inline void products_done(Sum (&d)[N], unsigned int (&a)[M][4]) {
    products_done(d);
    pin(a);
}

// The sums of a product with this number of columns, by name and as operands with constraint `c`.
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_48 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_64 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_80 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_96 NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_112 NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_128 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_256 NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define SUMS_16(c, i) FOUR(c, i), FOUR(c, i + 4)
#define SUMS_32(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)
#define SUMS_48(c, i) SUMS_32(c, i), SUMS_16(c, i + 16)
#define SUMS_64(c, i) SUMS_32(c, i), SUMS_32(c, i + 16)
#define SUMS_80(c, i) SUMS_64(c, i), SUMS_16(c, i + 32)
#define SUMS_96(c, i) SUMS_64(c, i), SUMS_32(c, i + 32)
#define SUMS_112(c, i) SUMS_96(c, i), SUMS_16(c, i + 48)
#define SUMS_128(c, i) SUMS_64(c, i), SUMS_64(c, i + 32)
#define SUMS_256(c, i) SUMS_128(c, i), SUMS_128(c, i + 64)

// One instruction. `from`, `with`, `keep`: operand numbers of a, b and add, which follow the sums.
// `signs`: the format's modifiers for signs and for the layout of its matrices.
#define PRODUCT(columns, kind, signs, from, with, keep, sums) \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %" #keep ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" NAMES_##columns "}, %" #from ", %" #with ", p" signs "; }" \
        : sums \
        : "l"(a), "l"(b), "r"(add))

// d = a b, or d += a b where `add`: 64 x 32 bytes times 32 x `columns` bytes, in every format.
#define PRODUCTS(columns, from, with, keep) \
    __device__ inline void products(int (&d)[columns / 2], unsigned long long a, unsigned long long b, int add) { \
        PRODUCT(columns, "k32.s32.s8.s8", "", from, with, keep, SUMS_##columns("+r", 0)); \
    } \
    __device__ inline void products(E4m3, float (&d)[columns / 2], unsigned long long a, unsigned long long b, int add) { \
        PRODUCT(columns, "k32.f32.e4m3.e4m3", ", 1, 1", from, with, keep, SUMS_##columns("+f", 0)); \
    } \
    __device__ inline void products(Bf16Pairs, float (&d)[columns / 2], unsigned long long a, unsigned long long b, int add) { \
        PRODUCT(columns, "k16.f32.bf16.bf16", ", 1, 1, 0, 0", from, with, keep, SUMS_##columns("+f", 0)); \
    }

PRODUCTS(32, 16, 17, 18)
PRODUCTS(64, 32, 33, 34)
PRODUCTS(128, 64, 65, 66)
PRODUCTS(256, 128, 129, 130)

// The same with the left matrix in registers, which stay as they are until the product is done. `words`: the numbers of its operands.
#define PRODUCT_OF_REGISTERS(columns, kind, signs, words, with, keep, sums) \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %" #keep ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" NAMES_##columns "}, {" words "}, %" #with ", p" signs "; }" \
        : sums \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

#define PRODUCTS_OF_REGISTERS(columns, words, with, keep) \
    __device__ inline void products(int (&d)[columns / 2], const unsigned int (&a)[4], unsigned long long b, int add) { \
        PRODUCT_OF_REGISTERS(columns, "k32.s32.s8.s8", "", words, with, keep, SUMS_##columns("+r", 0)); \
    } \
    __device__ inline void products(E4m3, float (&d)[columns / 2], const unsigned int (&a)[4], unsigned long long b, int add) { \
        PRODUCT_OF_REGISTERS(columns, "k32.f32.e4m3.e4m3", ", 1, 1", words, with, keep, SUMS_##columns("+f", 0)); \
    } \
    __device__ inline void products(Bf16Pairs, float (&d)[columns / 2], const unsigned int (&a)[4], unsigned long long b, int add) { \
        PRODUCT_OF_REGISTERS(columns, "k16.f32.bf16.bf16", ", 1, 1, 0", words, with, keep, SUMS_##columns("+f", 0)); \
    }

PRODUCTS_OF_REGISTERS(16, "%8, %9, %10, %11", 12, 13)
PRODUCTS_OF_REGISTERS(32, "%16, %17, %18, %19", 20, 21)
PRODUCTS_OF_REGISTERS(48, "%24, %25, %26, %27", 28, 29)
PRODUCTS_OF_REGISTERS(64, "%32, %33, %34, %35", 36, 37)
PRODUCTS_OF_REGISTERS(80, "%40, %41, %42, %43", 44, 45)
PRODUCTS_OF_REGISTERS(96, "%48, %49, %50, %51", 52, 53)
PRODUCTS_OF_REGISTERS(112, "%56, %57, %58, %59", 60, 61)
PRODUCTS_OF_REGISTERS(128, "%64, %65, %66, %67", 68, 69)

// A barrier in shared memory, with phases: a phase ends when `count` threads have arrived and all
// announced bytes have been copied.
struct alignas(8) Barrier {
    unsigned long long state;
};

__device__ inline void barrier_init(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// To be called after `barrier_init`, before copies arrive at the barrier.
__device__ inline void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces the bytes that copies will write.
__device__ inline void barrier_expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended; the first phase is 0, the next 1, then 0 again.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// The result of the driver's cuTensorMapEncodeTiled, passed by value. CUDA 13's headers align it to
// 128 bytes, earlier headers to 64.
struct alignas(128) TensorMap {
    unsigned long long words[16];
};

// Begins to copy a box to shared memory, from column `x` (in bytes or BF16) and row `y` on; zeros
// beyond the matrix.
__device__ inline void copy_box(void* to, const TensorMap* map, int x, int y, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}

// Gives registers of a warpgroup's threads back, or requests more.
template <int REGISTERS> __device__ inline void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ inline void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
