// Runs kernels on a CPU: each thread of a block is a fiber, which goes on until it waits for others.
//
// Fibers of a block take turns on one thread of the system. A warp goes on for as long as nothing holds it up, then another one that
// a seed chooses: so a missing barrier shows as a wrong result. Copies that a thread begins arrive when it waits for them, and
// where the seed is odd at once, too. A block in which all fibers wait for each other is reported, and so is a touch of memory that is
// not there. Blocks run on all cores, each on one: they must not wait for each other. A warpgroup's products are computed when a thread
// waits for them, or where the seed is odd at once. Their sums, which no fence may follow or no wait precede, are nonsense in between.
// Shared memory that nobody has written is nonsense in each block, what a kernel declares as well as what its launch asks for. What copies have brought is for products only once the thread that copied it has
// fenced it; products that read it before are reported.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <emmintrin.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulator {

struct Dim { unsigned x, y, z; };

// Copies and products that a thread has begun: emulator.cpp knows more of them.
struct Begun;

struct Fiber { void* stack_pointer; Dim thread; unsigned lane, warp, turn; bool done; Begun* begun; };

// Threads that wait for each other, and what each brings.
struct Group { unsigned arrived, generation, alive; uint64_t slots[2][32]; };

// A product that a thread has begun adds to its sums by this, whenever it does.
typedef void (*Compute)(void* sums, const void* operands);

// What emulator.cpp does for kernels, in whose objects there is as little of it as can be, since each one's compilation would pay for it.
// All of it is for the thread that calls it.
struct Services {
    void (*change_stacks)(void** from, void* to);
    // Begins to copy `bytes` bytes, and zeros behind them, `size` in all. They arrive when the thread waits for the copy; where the seed is
    // odd, they arrive at once, too.
    void (*begin_copy)(void* to, const void* from, unsigned size, unsigned bytes);
    // Makes a group of the copies that the thread has begun since its last group.
    void (*end_copies)();
    // Waits for all groups of copies but the last `left`.
    void (*wait_for_copies)(unsigned left);
    // From now on, products may read what this thread's copies have brought.
    void (*fence_copies)();
    // From now on until `forget_fence`, these registers are for products. Until a product begins, nobody may change them: `check_fence`
    // fails if somebody did, or if they have no fence.
    void (*fence_registers)(const void* registers, size_t bytes);
    void (*check_fence)(const void* registers, size_t bytes);
    void (*forget_fence)(const void* registers);
    // Begins a product, which is computed when the thread waits for it; where the seed is odd, at once. `sums` are nonsense until `end_sums`.
    void (*begin_product)(void* sums, size_t bytes, Compute compute, const void* operands, size_t operand_bytes);
    // Makes a group of the products, as `end_copies`.
    void (*end_products)();
    void (*wait_for_products)(unsigned left);
    void (*end_sums)(void* sums, size_t bytes);
};

struct Block {
    Fiber* fibers;
    Group* warps;
    Group all;
    unsigned current, seed;
    const char* kernel;
    void* scheduler;
    const Services* services;
    bool progressed;
    unsigned char* shared;
    // Of each 16 bytes of shared memory: whether a copy has brought them that no fence has followed.
    unsigned char* unfenced;
    size_t unfenced_size;
    void (*body)(void*);
    void* body_context;
    Dim block_index, block_size, grid_size;
    unsigned char* shared_start() { return shared; }
};

// Runs all blocks of a launch of the kernel at `code`. Returns 0, or 1 where threads wait for each other.
int launch(const void* code, void (*body)(void*), void* context, const unsigned* grid, const unsigned* size, size_t shared, unsigned seed);
// Whose launch it is, for messages.
extern const char* kernel_name;

// Who runs on a stack stands at its top, so that a kernel needs no variable of the emulator's.
struct Seat { Fiber* fiber; Block* block; };
const size_t STACK = 64 << 10;
inline Seat& seat() {
    uintptr_t here;
    asm("movq %%rsp, %0" : "=r"(here));
    return *(Seat*)((here | (STACK - 1)) + 1 - sizeof(Seat));
}

inline Block& block() { return *seat().block; }
inline Fiber& self() { return *seat().fiber; }
inline void yield() { block().services->change_stacks(&self().stack_pointer, block().scheduler); }

inline void wait(Group& group) {
    unsigned generation = group.generation;
    if (++group.arrived == group.alive) {
        group.arrived = 0;
        group.generation++;
        block().progressed = true;
    } else {
        while (group.generation == generation) yield();
    }
}

// Each lane's value, for all lanes of the warp. Two turns have a place each: who begins the next one may not disturb who still reads.
template <class T> T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    Group& warp = block().warps[self().warp];
    uint64_t* slots = warp.slots[self().turn++ % 2];
    std::memcpy(&slots[self().lane], &value, sizeof(T));
    wait(warp);
    T result;
    std::memcpy(&result, &slots[from], sizeof(T));
    return result;
}

// An argument, from wherever the caller has it.
template <class T> T argument(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}
// A kernel and copies of its arguments, which are the launch's from now on: the driver calls `run` in each thread. Little of the standard
// library is in it, since every kernel's compilation would pay for that.
struct Argument { alignas(128) unsigned char bytes[128]; };
struct Call {
    void (*run)(const Call&);
    void (*kernel)();
    Argument arguments[32];
};
template <class... A, size_t... I> Call* with_arguments(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    static_assert(sizeof...(A) <= 32 && ((sizeof(A) <= sizeof(Argument)) && ...), "a call has no room for these arguments");
    Call* call = new Call;
    call->run = [](const Call& call) { ((void (*)(A...))call.kernel)(argument<A>(call.arguments[I].bytes)...); };
    call->kernel = (void (*)())kernel;
    (std::memcpy(call->arguments[I].bytes, arguments[I], sizeof(A)), ...);
    return call;
}
template <class... A> Call* with_arguments(void (*kernel)(A...), void** arguments) {
    return with_arguments(kernel, arguments, std::index_sequence_for<A...>{});
}

}  // namespace emulator

#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::block().block_index)
#define blockDim (emulator::block().block_size)
#define gridDim (emulator::block().grid_size)
inline void __syncthreads() { emulator::wait(emulator::block().all); }
inline void __syncwarp() { emulator::wait(emulator::block().warps[emulator::self().warp]); }

namespace emulator {

// Words of all lanes of a warp, for all of them: `words[lane]`.
template <int N> struct Words { unsigned int of[32][N]; };

// Each lane brings `N` words and sees everybody's until it is called again; in turns, as above.
template <int N> inline const Words<N>& gather(const unsigned int* mine) {
    static thread_local Words<N> warps[32][2];
    Words<N>& words = warps[self().warp][self().turn++ % 2];
    std::memcpy(words.of[self().lane], mine, sizeof(words.of[0]));
    __syncwarp();
    return words;
}

// A kernel does what real cards leave undefined.
inline void fail(const char* what) {
    std::fprintf(stderr, "%s: block %u thread %u %s\n", block().kernel, block().block_index.x, self().thread.x, what);
    std::_Exit(97);
}

}  // namespace emulator

#define DYNAMIC_SHARED(name) unsigned char* name = emulator::block().shared_start()
