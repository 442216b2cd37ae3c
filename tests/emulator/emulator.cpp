// Blocks of fibers: see emulator.h.
#include "emulator.h"

namespace emulator {

Block* block;
static const size_t STACK = 64 << 10;

// Saves what a call must keep, changes stacks, takes it back. (System V, x86-64.)
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

// A thread that is gone is waited for by nobody.
static void leave(Group& group) {
    if (--group.alive > 0 && group.arrived == group.alive) {
        group.arrived = 0;
        group.generation++;
    }
}

static void run_fiber() {
    block->body(block->body_context);
    self().done = true;
    block->progressed = true;
    leave(block->warps[self().warp]);
    leave(block->all);
    yield();
    std::abort();
}

static char* stacks(size_t count) {
    static char* memory = nullptr;
    static size_t have = 0;
    if (count > have) {
        memory = (char*)mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        have = count;
    }
    return memory;
}

// Runs all blocks of a launch, one after the other. Returns 0, or 1 where threads wait for each other.
int launch(void (*body)(void*), void* context, const unsigned* grid, const unsigned* size, size_t shared, unsigned seed) {
    Block b{};
    block = &b;
    unsigned threads = size[0] * size[1] * size[2];
    char* memory = stacks(threads);
    b.body = body;
    b.seed = seed;
    b.body_context = context;
    b.grid_size = {grid[0], grid[1], grid[2]};
    b.block_size = {size[0], size[1], size[2]};
    b.shared.resize(shared + 1024);
    for (unsigned at = 0; at < grid[0] * grid[1] * grid[2]; at++) {
        b.block_index = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        // What nobody has written is a signalling nonsense.
        std::memset(b.shared.data(), 0xff, b.shared.size());
        unsigned warps = (threads + 31) / 32;
        b.warps.assign(warps, Group{});
        b.all = Group{};
        b.all.alive = threads;
        b.fibers.resize(threads);
        std::vector<Copies> copies(threads);
        b.copies = copies.data();
        for (unsigned i = 0; i < threads; i++) {
            Fiber& f = b.fibers[i];
            f = Fiber{};
            f.thread = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
            f.lane = i % 32;
            f.warp = i / 32;
            f.stack = memory + i * STACK;
            b.warps[f.warp].alive++;
            // Six registers, the address to go to, and the alignment that a call has.
            void** top = (void**)(f.stack + STACK) - 3;
            *--top = (void*)run_fiber;
            for (int r = 0; r < 6; r++) *--top = nullptr;
            f.stack_pointer = top;
        }
        unsigned left = threads;
        unsigned state = seed * 2654435761u + at + 1;
        while (left > 0) {
            bool any = false;
            // A warp goes on for as long as it can, then another one: so one that does not wait for the others overtakes them.
            state = state * 1664525u + 1013904223u;
            unsigned first = (state >> 8) % warps;
            bool backwards = state >> 31;
            for (unsigned i = 0; i < warps; i++) {
                unsigned warp = (backwards ? first + warps - i : first + i) % warps;
                do {
                    b.progressed = false;
                    for (unsigned k = warp * 32; k < warp * 32 + 32 && k < threads; k++) {
                        if (b.fibers[k].done) continue;
                        b.current = k;
                        emulator_switch(&b.scheduler, b.fibers[k].stack_pointer);
                        if (b.fibers[k].done) left--;
                    }
                    any |= b.progressed;
                } while (b.progressed);
            }
            if (!any && left > 0) {
                std::fprintf(stderr, "block %u: %u threads wait for each other\n", at, left);
                return 1;
            }
        }
    }
    return 0;
}

}  // namespace emulator
