// Blocks of fibers: see emulator.h.
#include "emulator.h"
#include <algorithm>
#include <atomic>
#include <csignal>
#include <map>
#include <thread>
#include <vector>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

const char* kernel_name = "kernel";

// Saves what a call must keep, changes stacks, takes it back. (System V, x86-64.)
asm(R"(
.text
.hidden emulator_switch
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
extern "C" void emulator_switch(void** from, void* to);

// A copy that a thread has begun.
struct Copy { void* to; unsigned size; unsigned char bytes[16]; };

// What sums of products are, while their registers hold nonsense.
typedef std::vector<unsigned char> Sums;

struct Product { void* at; Sums* sums; Compute compute; bool is_done; std::vector<unsigned char> operands; };

// What a thread has begun since it ended a group, and the groups that it has not waited for.
template <class T> struct Groups {
    std::vector<T> open;
    std::vector<std::vector<T>> ended;

    void end() {
        ended.push_back(std::move(open));
        open.clear();
    }

    // Finishes all groups but the last `left`.
    template <class Finish> void wait(unsigned left, Finish finish) {
        while (ended.size() > left) {
            for (const T& begun : ended.front()) finish(begun);
            ended.erase(ended.begin());
        }
    }
};

// By the registers' addresses: sums, and what was in registers at the last fence. `unfenced` are parts of shared memory that copies of this
// thread have brought.
struct Begun {
    Groups<Copy> copies;
    std::vector<size_t> unfenced;
    Groups<Product> products;
    std::map<const void*, Sums> sums;
    std::map<const void*, std::vector<unsigned char>> fenced;
};

static Begun& begun() { return *self().begun; }

static void arrive(const Copy& copy) {
    size_t at = size_t((unsigned char*)copy.to - block().shared) / 16;
    if (at >= block().unfenced_size) fail("copies to memory that is not its launch's shared memory");
    std::memcpy(copy.to, copy.bytes, copy.size);
    block().unfenced[at] = true;
    begun().unfenced.push_back(at);
}

static void begin_copy(void* to, const void* from, unsigned size, unsigned bytes) {
    if ((uintptr_t)to % size || (uintptr_t)from % size) fail("begins a copy that is not aligned");
    Copy copy{to, size, {}};
    std::memcpy(copy.bytes, from, bytes);
    if (block().seed % 2 == 1) arrive(copy);
    begun().copies.open.push_back(copy);
}

static void end_copies() {
    begun().copies.end();
}

static void wait_for_copies(unsigned left) {
    begun().copies.wait(left, arrive);
}

static void fence_copies() {
    for (size_t at : begun().unfenced) block().unfenced[at] = false;
    begun().unfenced.clear();
}

static void fence_registers(const void* registers, size_t bytes) {
    begun().fenced[registers].assign((const unsigned char*)registers, (const unsigned char*)registers + bytes);
}

static void check_fence(const void* registers, size_t bytes) {
    auto was = begun().fenced.find(registers);
    if (was == begun().fenced.end()) fail("begins a product whose registers no fence has named");
    if (std::memcmp(was->second.data(), registers, bytes) != 0) fail("changes registers between the fence and the product");
}

static void forget_fence(const void* registers) {
    begun().fenced.erase(registers);
}

static void begin_product(void* at, size_t bytes, Compute compute, const void* operands, size_t operand_bytes) {
    auto [place, fresh] = begun().sums.try_emplace(at);
    Sums& sums = place->second;
    if (fresh) {
        check_fence(at, bytes);
        sums.assign((unsigned char*)at, (unsigned char*)at + bytes);
        std::memset(at, 0xff, bytes);
    }
    bool at_once = block().seed % 2 == 1;
    if (at_once) compute(sums.data(), operands);
    const auto* bytes_of = (const unsigned char*)operands;
    begun().products.open.push_back({at, &sums, compute, at_once, {bytes_of, bytes_of + operand_bytes}});
}

static void end_products() {
    begun().products.end();
}

static void wait_for_products(unsigned left) {
    begun().products.wait(left, [](const Product& product) {
        Sums& sums = *product.sums;
        for (size_t i = 0; i < sums.size(); i++)
            if (((unsigned char*)product.at)[i] != 0xff) fail("changes sums that a product still adds to");
        if (!product.is_done) product.compute(sums.data(), product.operands.data());
    });
}

static void end_sums(void* at, size_t bytes) {
    auto sums = begun().sums.find(at);
    if (sums == begun().sums.end()) fail("waits for sums of which there are no products");
    std::memcpy(at, sums->second.data(), bytes);
    begun().sums.erase(sums);
}

static const Services SERVICES{emulator_switch, begin_copy, end_copies, wait_for_copies, fence_copies, fence_registers, check_fence,
                               forget_fence, begin_product, end_products, wait_for_products, end_sums};

// A thread that is gone is waited for by nobody.
static void leave(Group& group) {
    if (--group.alive > 0 && group.arrived == group.alive) {
        group.arrived = 0;
        group.generation++;
    }
}

static void run_fiber() {
    Block& b = block();
    b.body(b.body_context);
    self().done = true;
    b.progressed = true;
    leave(b.warps[self().warp]);
    leave(b.all);
    yield();
    std::abort();
}

static const size_t PAGE = 4096;

static char* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("mmap");
        std::abort();
    }
    return (char*)memory;
}

// What a thread of the system runs blocks on. A page that nobody may touch ends each stack, and one the shared memory.
struct Worker {
    char* stacks;
    unsigned stack_count;
    unsigned char* shared_end;
    size_t shared_size;
    char signal_stack[64 << 10];

    void prepare(unsigned threads, size_t shared) {
        if (threads > stack_count) {
            char* memory = reserve((threads + 1) * STACK);
            stacks = (char*)(((uintptr_t)memory + STACK - 1) & ~(uintptr_t)(STACK - 1));
            stack_count = threads;
            for (unsigned i = 0; i < threads; i++) mprotect(stacks + i * STACK + PAGE, STACK - PAGE, PROT_READ | PROT_WRITE);
        }
        size_t pages = (shared + PAGE - 1) / PAGE * PAGE;
        if (pages > shared_size) {
            shared_end = (unsigned char*)reserve(pages + PAGE) + pages;
            shared_size = pages;
            mprotect(shared_end - pages, pages, PROT_READ | PROT_WRITE);
        }
    }
};
static const unsigned WORKERS = 16;
static Worker workers[WORKERS];

// The block that this thread runs, for a signal's handler: initial-exec, because that one must not allocate.
static thread_local __attribute__((tls_model("initial-exec"))) Block* running;
static struct sigaction before[NSIG];

static void fault(int signal, siginfo_t* info, void*) {
    if (!running) {
        // Not a kernel's: once more, for whoever was there first.
        sigaction(signal, &before[signal], nullptr);
        return;
    }
    const Dim &b = running->block_index, &t = running->fibers[running->current].thread;
    char line[256];
    int length = std::snprintf(line, sizeof line, "%s: block %u,%u,%u thread %u,%u,%u ", kernel_name, b.x, b.y, b.z, t.x, t.y, t.z);
    // The compiler's check of alignment ends in an illegal instruction; the processor's own tells no address.
    if (signal == SIGILL || !info->si_addr)
        length += std::snprintf(line + length, sizeof line - length, "touches a misaligned address, or none\n");
    else
        length += std::snprintf(line + length, sizeof line - length, "touches %p, which is out of bounds\n", info->si_addr);
    if (write(2, line, length) < 0) _exit(98);
    _exit(99);
}

static void catch_faults() {
    static bool done = false;
    if (done) return;
    done = true;
    struct sigaction action{};
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGILL}) sigaction(signal, &action, &before[signal]);
}

// What an object declares as shared memory: its variables of a thread of the system, which are of nothing else in it but what lanes
// hand to each other within a call, and in a check's program `running`.
struct Declared { uintptr_t code; size_t object, bytes; };

static Declared declared_by(const void* code) {
    Declared of{(uintptr_t)code, 0, 0};
    dl_iterate_phdr([](dl_phdr_info* info, size_t, void* to) {
        Declared& of = *(Declared*)to;
        bool holds = false;
        size_t bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
            const auto& part = info->dlpi_phdr[i];
            uintptr_t start = info->dlpi_addr + part.p_vaddr;
            if (part.p_type == PT_LOAD && of.code - start < part.p_memsz) holds = true;
            if (part.p_type == PT_TLS) bytes = part.p_memsz;
        }
        if (holds) of.object = info->dlpi_tls_modid, of.bytes = bytes;
        return int(holds);
    }, &of);
    return of;
}

extern "C" void* __tls_get_addr(size_t*);

static void poison(const Declared& of) {
    if (of.bytes == 0) return;
    Block* kept = running;
    size_t place[2] = {of.object, 0};
    std::memset(__tls_get_addr(place), 0xff, of.bytes);
    running = kept;
}

// Gives each thread of block `at` a fiber that begins at the kernel's beginning.
static void begin(Block& b, Worker& worker, unsigned at, std::vector<Begun>& begun) {
    const Dim &size = b.block_size, &grid = b.grid_size;
    unsigned threads = begun.size();
    b.block_index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
    // What nobody has written is a signalling nonsense.
    std::memset(b.shared, 0xff, worker.shared_end - b.shared);
    std::fill_n(b.unfenced, b.unfenced_size, 0);
    std::fill_n(b.warps, (threads + 31) / 32, Group{});
    b.all = Group{};
    b.all.alive = threads;
    for (unsigned i = 0; i < threads; i++) {
        Fiber& f = b.fibers[i];
        f = Fiber{};
        begun[i] = Begun{};
        f.begun = &begun[i];
        f.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        f.lane = i % 32;
        f.warp = i / 32;
        b.warps[f.warp].alive++;
        Seat* seat = (Seat*)(worker.stacks + (i + 1) * STACK) - 1;
        *seat = {&f, &b};
        // Six registers, the address to go to, and the alignment that a call has.
        void** top = (void**)seat - 1;
        *--top = (void*)run_fiber;
        for (int r = 0; r < 6; r++) *--top = nullptr;
        f.stack_pointer = top;
    }
}

// Whether all threads of the block came to their end.
static bool run_block(Block& b, unsigned at) {
    unsigned threads = b.all.alive, warps = (threads + 31) / 32, left = threads;
    unsigned state = b.seed * 2654435761u + at + 1;
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
            std::fprintf(stderr, "%s: block %u: %u threads wait for each other\n", kernel_name, at, left);
            return false;
        }
    }
    return true;
}

int launch(const void* code, void (*body)(void*), void* context, const unsigned* grid, const unsigned* size, size_t shared,
           unsigned seed) {
    catch_faults();
    const Declared declared = declared_by(code);
    unsigned threads = size[0] * size[1] * size[2];
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&](unsigned at) {
        Worker& worker = workers[at];
        worker.prepare(threads, shared);
        stack_t own{worker.signal_stack, 0, sizeof worker.signal_stack}, old;
        sigaltstack(&own, &old);
        Block b{};
        std::vector<Fiber> fibers(threads);
        std::vector<Group> warps((threads + 31) / 32);
        std::vector<Begun> begun(threads);
        std::vector<unsigned char> unfenced((shared + 15) / 16);
        b.fibers = fibers.data();
        b.warps = warps.data();
        b.unfenced = unfenced.data();
        b.unfenced_size = unfenced.size();
        b.seed = seed;
        b.kernel = kernel_name;
        b.services = &SERVICES;
        b.shared = worker.shared_end - (shared + 127) / 128 * 128;
        b.body = body;
        b.body_context = context;
        b.grid_size = {grid[0], grid[1], grid[2]};
        b.block_size = {size[0], size[1], size[2]};
        running = &b;
        for (uint64_t block = next++; block < blocks && !failed; block = next++) {
            poison(declared);
            begin(b, worker, (unsigned)block, begun);
            if (!run_block(b, (unsigned)block)) failed = true;
        }
        running = nullptr;
        sigaltstack(&old, nullptr);
    };
    std::vector<std::thread> others;
    unsigned count = std::min<uint64_t>({blocks, WORKERS, std::max(1u, std::thread::hardware_concurrency())});
    for (unsigned at = 1; at < count; at++) others.emplace_back(work, at);
    work(0);
    for (std::thread& other : others) other.join();
    return failed;
}

}  // namespace emulator
