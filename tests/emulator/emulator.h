// Runs kernels on a CPU: each thread of a block is a fiber, which goes on until it waits for others.
//
// Fibers of a block take turns on one thread of the system. A warp goes on for as long as nothing holds it up, then another one that
// a seed chooses: so a missing barrier shows as a wrong result. Copies that a thread begins arrive when it waits for them, and
// where the seed is odd at once, too. A block in which all fibers wait for each other is reported.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>
#include <sys/mman.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulator {

struct Dim { unsigned x, y, z; };
struct Fiber { void* stack_pointer; char* stack; Dim thread; unsigned lane, warp; bool done; };

// Threads that wait for each other, and what each brings.
struct Group { unsigned arrived, generation, alive; uint64_t slots[2][32]; };

struct Copies;
struct Block {
    Copies* copies;
    std::vector<Fiber> fibers;
    std::vector<Group> warps;
    Group all;
    unsigned current, seed;
    void* scheduler;
    bool progressed;
    std::vector<unsigned char> shared;
    void (*body)(void*);
    void* body_context;
    Dim block_index, block_size, grid_size;
    unsigned char* shared_start() { return (unsigned char*)(((uintptr_t)shared.data() + 1023) & ~(uintptr_t)1023); }
};
extern Block* block;

extern "C" void emulator_switch(void** from, void* to);

inline Fiber& self() { return block->fibers[block->current]; }
inline void yield() { emulator_switch(&self().stack_pointer, block->scheduler); }

inline void wait(Group& group) {
    unsigned generation = group.generation;
    if (++group.arrived == group.alive) {
        group.arrived = 0;
        group.generation++;
        block->progressed = true;
    } else {
        while (group.generation == generation) yield();
    }
}

// Each lane's value, for all lanes of the warp.
template <class T> T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    Group& warp = block->warps[self().warp];
    uint64_t* slots = warp.slots[0];
    std::memcpy(&slots[self().lane], &value, sizeof(T));
    wait(warp);
    T result;
    std::memcpy(&result, &slots[from], sizeof(T));
    wait(warp);
    return result;
}

template <class... A, size_t... I> void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}

}  // namespace emulator

#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::block->block_index)
#define blockDim (emulator::block->block_size)
#define gridDim (emulator::block->grid_size)
inline void __syncthreads() { emulator::wait(emulator::block->all); }
inline void __syncwarp() { emulator::wait(emulator::block->warps[emulator::self().warp]); }

namespace emulator {

// Words of all lanes of a warp, for all of them: `words[lane]`.
template <int N> struct Words { unsigned int of[32][N]; };

// Each lane brings `N` words and sees everybody's until it is called again.
template <int N> inline const Words<N>& gather(const unsigned int* mine) {
    static Words<N> warps[64];
    Words<N>& words = warps[self().warp];
    __syncwarp();
    std::memcpy(words.of[self().lane], mine, sizeof(words.of[0]));
    __syncwarp();
    return words;
}

// Copies that a thread has begun: they arrive when it waits for them, and not before.
struct Copy { void* to; unsigned char bytes[16]; };
struct Copies { std::vector<Copy> open; std::vector<std::vector<Copy>> groups; };
inline Copies& copies() { return block->copies[block->current]; }

}  // namespace emulator

#define DYNAMIC_SHARED(name) unsigned char* name = emulator::block->shared_start()
