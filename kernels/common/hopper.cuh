// Instructions of Hopper alone (sm_90a): products of a warpgroup, copies of the tensor memory accelerator and their barriers. Tests
// bring a version of this file that a CPU runs.
//
// A warpgroup's product is 64 rows x 128 columns: warp w of it holds rows 16 w to 16 w + 15, laid out in tiles of 8 columns as
// `multiply` in ptx.cuh says: d[4 t + i] of tile t. (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32".)
#pragma once
#include "ptx.cuh"

// Before a barrier: what this thread has stored in shared memory is there for products, which read it by another way than loads do.
__device__ inline void stores_before_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A tile in shared memory, rows of 128 bytes, swizzled over 128 bytes, its start on 1024 bytes. 32 bytes further in a row is +2.
__device__ inline unsigned long long tile_descriptor(const void* tile) {
    unsigned long long address = (shared_address(tile) & 0x3ffff) >> 4;
    // Eight rows are 1024 bytes from the next eight.
    return address | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The 64 sums of a product as operands, by name and with constraint `c`.
#define SUM_NAMES \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define SUMS(c) \
    c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]), \
    c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15]), \
    c(d[16]), c(d[17]), c(d[18]), c(d[19]), c(d[20]), c(d[21]), c(d[22]), c(d[23]), \
    c(d[24]), c(d[25]), c(d[26]), c(d[27]), c(d[28]), c(d[29]), c(d[30]), c(d[31]), \
    c(d[32]), c(d[33]), c(d[34]), c(d[35]), c(d[36]), c(d[37]), c(d[38]), c(d[39]), \
    c(d[40]), c(d[41]), c(d[42]), c(d[43]), c(d[44]), c(d[45]), c(d[46]), c(d[47]), \
    c(d[48]), c(d[49]), c(d[50]), c(d[51]), c(d[52]), c(d[53]), c(d[54]), c(d[55]), \
    c(d[56]), c(d[57]), c(d[58]), c(d[59]), c(d[60]), c(d[61]), c(d[62]), c(d[63])

// d = a b, or d += a b where `add`: 64 x 32 bytes times 32 x 128 bytes.
__device__ inline void products(int (&d)[64], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
        SUM_NAMES
        "%64, %65, p; }"
        : SUMS("+r")
        : "l"(a), "l"(b), "r"(add));
}

__device__ inline void products(E4m3, float (&d)[64], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        SUM_NAMES
        "%64, %65, p, 1, 1; }"
        : SUMS("+f")
        : "l"(a), "l"(b), "r"(add));
}

__device__ inline void products(Bf16Pairs, float (&d)[64], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        SUM_NAMES
        "%64, %65, p, 1, 1, 0, 0; }"
        : SUMS("+f")
        : "l"(a), "l"(b), "r"(add));
}

// A barrier in shared memory, of phases: a phase ends when `count` have arrived and all bytes that were announced are there.
struct alignas(8) Barrier {
    unsigned long long state;
};

__device__ inline void barrier_init(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// After `barrier_init`, for the copies that will arrive at it.
__device__ inline void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that copies will bring.
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

// What the driver's cuTensorMapEncodeTiled makes, passed by value.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// Begins to copy a box to shared memory, from column (bytes or BF16) `x` and row `y` on; zeros where there is nothing.
__device__ inline void copy_box(void* to, const TensorMap* map, int x, int y, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}

// Hands registers of a warpgroup's threads back, or takes more.
template <int REGISTERS> __device__ inline void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ inline void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
