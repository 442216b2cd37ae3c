// Stands in for NVIDIA's driver: runs what nvrtc.cpp made, in the emulator, as one card.
//
// Every call is done when it returns, or where EMULATOR_LATE asks for it as late as a card may: copies, fills and kernels once somebody
// waits for the stream, or for a mark behind them; then pinned memory is read and written, too. (What is not pinned is read before a
// copy to the card returns, and written before one from the card does, as the driver's documentation says.) A thread needs a current context where the driver asks for one. Memory that nobody has written is
// full of 0xff, and pages that nobody may touch lie before and behind each allocation. Environment:
//
// EMULATOR_CARD     compute capability, `9.0` unless said; `none`: no card
// EMULATOR_MEMORY   bytes of the card, 4 GiB unless said
// EMULATOR_SEED     of the order in which warps go on, 1 unless said: see emulator.h
// EMULATOR_FAIL     `CALL:N:CODE`: the Nth call of CALL returns CODE
// EMULATOR_TRACE    a file to which each launch appends a line, and each allocation
// EMULATOR_LATE     1: nothing is done before it is waited for
#include "card.h"
#include "emulator.h"
#include "image.h"
#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

typedef unsigned long long Address;
typedef void* Context;

struct Allocation { char* mapping; size_t mapped, size, counted; };
struct Module { void* library; int file; };
struct Function { std::string name; emulator::Call* (*bind)(void**); Module* module; int shared_most; };
struct Event { bool recorded, timed; std::chrono::steady_clock::time_point when; };
struct Stream {};

const size_t PAGE = 4096, ALIGNMENT = 256;

// Never taken apart: threads may still call while the process ends.
std::mutex& mutex = *new std::mutex;
auto& allocations = *new std::map<Address, Allocation>;
auto& pinned = *new std::map<void*, size_t>;
auto& modules = *new std::set<Module*>;
auto& functions = *new std::set<Function*>;
auto& events = *new std::set<Event*>;
auto& streams = *new std::set<Stream*>;
size_t allocated;
bool initialized;
int poison, failing_calls, contexts;
char primary;
thread_local Context current;

enum Needs { NOTHING, DRIVER, CONTEXT };

// What every call begins with: one at a time, none after a failure that lasts.
struct Call {
    std::lock_guard<std::mutex> lock{mutex};
    Result refused = SUCCESS;
    Call(const char* name, Needs needs) {
        const Settings& s = settings();
        if (s.failing == name && ++failing_calls == s.failing_call) {
            if (s.failing_code == ILLEGAL_ADDRESS || (s.failing_code >= MISALIGNED_ADDRESS && s.failing_code <= LAUNCH_FAILED))
                poison = s.failing_code;
            refused = Result(s.failing_code);
        } else if (poison) {
            refused = Result(poison);
        } else if (needs >= DRIVER && !initialized) {
            refused = NOT_INITIALIZED;
        } else if (needs == CONTEXT && (!current || contexts == 0)) {
            refused = INVALID_CONTEXT;
        }
    }
};
#define BEGIN(needs)            \
    Call call(__func__, needs); \
    if (call.refused) return call.refused

// 16 MiB of 0xff, of which every allocation begins as private copies: what is never written costs no memory.
const size_t BLANK = 16 << 20;
int blank() {
    static int file = [] {
        int file = memfd_create("blank", MFD_CLOEXEC);
        std::string bytes(BLANK, '\xff');
        return write(file, bytes.data(), BLANK) == ssize_t(BLANK) ? file : -1;
    }();
    return file;
}

Result allocate(Address* address, size_t size) {
    size_t counted = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, pages = (size + PAGE - 1) / PAGE * PAGE;
    if (size == 0) return INVALID_VALUE;
    if (size > settings().memory || counted > settings().memory - allocated) return OUT_OF_MEMORY;
    size_t mapped = pages + 2 * PAGE;
    char* mapping = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return OPERATING_SYSTEM;
    for (size_t at = 0; at < pages; at += BLANK) {
        size_t part = std::min(BLANK, pages - at);
        void* to = mapping + PAGE + at;
        if (mmap(to, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, blank(), 0) != to) return OPERATING_SYSTEM;
    }
    // It ends where the page begins that nobody may touch, or less than ALIGNMENT before.
    *address = (Address)(mapping + PAGE + pages - counted);
    allocations[*address] = {mapping, mapped, size, counted};
    allocated += counted;
    return SUCCESS;
}

Result allocate_host(void** memory, size_t size) {
    if (size == 0) return INVALID_VALUE;
    size_t pages = (size + PAGE - 1) / PAGE * PAGE;
    void* mapping = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return OUT_OF_MEMORY;
    std::memset(mapping, 0xff, pages);
    pinned[mapping] = pages;
    *memory = mapping;
    return SUCCESS;
}

// What was issued and nobody has waited for yet, of all streams; `event`: the one that it records.
struct Issued { std::function<Result()> run; Event* event; };
auto& issued = *new std::deque<Issued>;

// Does it now, or later.
Result issue(std::function<Result()> run, Event* event = nullptr) {
    if (!settings().late) return run();
    issued.push_back({std::move(run), event});
    return SUCCESS;
}

// Does the first `count` things that were issued.
Result settle(size_t count) {
    for (; count > 0 && !poison; count--) {
        auto run = std::move(issued.front().run);
        issued.pop_front();
        if (Result failed = run()) poison = failed;
    }
    return Result(poison);
}

Result settle() {
    return settle(issued.size());
}

// How many things must be done until the event is recorded.
size_t until(const Event* event) {
    size_t count = issued.size();
    while (count > 0 && issued[count - 1].event != event) count--;
    return count;
}

bool is_pinned(const void* memory, size_t size) {
    auto after = pinned.upper_bound((void*)memory);
    if (after == pinned.begin()) return false;
    auto [start, bytes] = *std::prev(after);
    return (const char*)memory + size <= (const char*)start + bytes;
}

void note(const char* line, int length) {
    if (settings().trace.empty()) return;
    int file = open(settings().trace.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0 || write(file, line, length) != length) std::perror(settings().trace.c_str());
    close(file);
}

// Whether the range lies in one allocation.
bool ours(Address address, size_t size) {
    if (size == 0) return true;
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return false;
    auto [start, allocation] = *std::prev(after);
    return address - start <= allocation.size && size <= allocation.size - (address - start);
}

// Before it returns.
Result copy(void* to, const void* from, size_t size, bool fine) {
    if (!fine || (size > 0 && (!to || !from))) return INVALID_VALUE;
    if (Result failed = settle()) return failed;
    std::memmove(to, from, size);
    return SUCCESS;
}

// In the stream's order.
Result copy_async(void* to, const void* from, size_t size, bool fine) {
    if (!fine || (size > 0 && (!to || !from))) return INVALID_VALUE;
    bool on_card = ours((Address)from, size), to_card = ours((Address)to, size);
    if (!to_card && !is_pinned(to, size)) return copy(to, from, size, fine);
    if (on_card || is_pinned(from, size))
        return issue([=] {
            std::memmove(to, from, size);
            return SUCCESS;
        });
    return issue([to, taken = std::string((const char*)from, size)] {
        std::memcpy(to, taken.data(), taken.size());
        return SUCCESS;
    });
}

template <class Word> Result fill(Address to, Word word, size_t count) {
    if (to % sizeof(Word) || count > SIZE_MAX / sizeof(Word) || !ours(to, count * sizeof(Word))) return INVALID_VALUE;
    return issue([=] {
        std::fill_n((Word*)to, count, word);
        return SUCCESS;
    });
}

// Null and the two that CUDA numbers are always there.
bool known(Stream* stream) {
    return (uintptr_t)stream <= 2 || streams.count(stream);
}

Result elapsed(float* milliseconds, Event* from, Event* to) {
    for (Event* event : {from, to})
        if (!events.count(event) || !event->recorded || !event->timed) return INVALID_HANDLE;
    *milliseconds = std::chrono::duration<float, std::milli>(to->when - from->when).count();
    return SUCCESS;
}

Result unload(Module* module) {
    for (auto at = functions.begin(); at != functions.end();) {
        if ((*at)->module == module) {
            delete *at;
            at = functions.erase(at);
        } else {
            ++at;
        }
    }
    dlclose(module->library);
    close(module->file);
    modules.erase(module);
    delete module;
    return SUCCESS;
}

void trace(const Function* f, const unsigned* grid, const unsigned* block, unsigned shared) {
    char line[256];
    int length = std::snprintf(line, sizeof line, "%s grid %ux%ux%u block %ux%ux%u shared %u\n", f->name.c_str(), grid[0], grid[1],
                               grid[2], block[0], block[1], block[2], shared);
    note(line, length);
}

}  // namespace

extern "C" {

Result cuGetErrorName(int error, const char** name) {
    *name = nullptr;
    for (auto& e : ERRORS)
        if (e.code == error) *name = e.name;
    return *name ? SUCCESS : INVALID_VALUE;
}

Result cuGetErrorString(int error, const char** text) {
    *text = nullptr;
    for (auto& e : ERRORS)
        if (e.code == error) *text = e.text;
    return *text ? SUCCESS : INVALID_VALUE;
}

Result cuInit(unsigned flags) {
    BEGIN(NOTHING);
    if (settings().none) return NO_DEVICE;
    if (flags) return INVALID_VALUE;
    initialized = true;
    return SUCCESS;
}

Result cuDriverGetVersion(int* version) {
    BEGIN(NOTHING);
    *version = 13000;
    return SUCCESS;
}

Result cuDeviceGetCount(int* count) {
    BEGIN(settings().none ? NOTHING : DRIVER);
    *count = settings().none ? 0 : 1;
    return SUCCESS;
}

Result cuDeviceGet(int* device, int ordinal) {
    BEGIN(DRIVER);
    if (ordinal != 0) return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

Result cuDeviceGetName(char* name, int length, int device) {
    BEGIN(DRIVER);
    if (device != 0) return INVALID_DEVICE;
    std::snprintf(name, length, "Emulated %d.%d", settings().card / 10, settings().card % 10);
    return SUCCESS;
}

Result cuDeviceGetAttribute(int* value, int which, int device) {
    BEGIN(DRIVER);
    if (device != 0) return INVALID_DEVICE;
    int found = attribute(which);
    if (found < 0) return INVALID_VALUE;
    *value = found;
    return SUCCESS;
}

Result cuDeviceTotalMem_v2(size_t* bytes, int device) {
    BEGIN(DRIVER);
    if (device != 0) return INVALID_DEVICE;
    *bytes = settings().memory;
    return SUCCESS;
}

Result cuDeviceGetUuid_v2(char* uuid, int device) {
    BEGIN(DRIVER);
    if (device != 0) return INVALID_DEVICE;
    std::memcpy(uuid, "emulated card 00", 16);
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Context* context, int device) {
    BEGIN(DRIVER);
    if (device != 0) return INVALID_DEVICE;
    contexts++;
    *context = &primary;
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(DRIVER);
    if (device != 0) return INVALID_DEVICE;
    if (contexts == 0) return INVALID_CONTEXT;
    contexts--;
    return SUCCESS;
}

Result cuCtxSetCurrent(Context context) {
    BEGIN(DRIVER);
    if (context && (context != &primary || contexts == 0)) return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

Result cuCtxGetCurrent(Context* context) {
    BEGIN(DRIVER);
    *context = current;
    return SUCCESS;
}

Result cuCtxSynchronize() {
    BEGIN(CONTEXT);
    return settle();
}

Result cuMemGetInfo_v2(size_t* free, size_t* total) {
    BEGIN(CONTEXT);
    *free = settings().memory - allocated;
    *total = settings().memory;
    return SUCCESS;
}

Result cuMemAlloc_v2(Address* address, size_t size) {
    BEGIN(CONTEXT);
    char line[64];
    note(line, std::snprintf(line, sizeof line, "cuMemAlloc_v2 %zu\n", size));
    return allocate(address, size);
}

Result cuMemFree_v2(Address address) {
    BEGIN(CONTEXT);
    if (!address) return SUCCESS;
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    if (Result failed = settle()) return failed;
    munmap(found->second.mapping, found->second.mapped);
    allocated -= found->second.counted;
    allocations.erase(found);
    return SUCCESS;
}

Result cuMemHostAlloc(void** memory, size_t size, unsigned) {
    BEGIN(CONTEXT);
    return allocate_host(memory, size);
}

Result cuMemAllocHost_v2(void** memory, size_t size) {
    BEGIN(CONTEXT);
    return allocate_host(memory, size);
}

Result cuMemFreeHost(void* memory) {
    BEGIN(CONTEXT);
    auto found = pinned.find(memory);
    if (found == pinned.end()) return INVALID_VALUE;
    munmap(memory, found->second);
    pinned.erase(found);
    return SUCCESS;
}

Result cuMemcpyHtoD_v2(Address to, const void* from, size_t size) {
    BEGIN(CONTEXT);
    return copy((void*)to, from, size, ours(to, size));
}

Result cuMemcpyDtoH_v2(void* to, Address from, size_t size) {
    BEGIN(CONTEXT);
    return copy(to, (const void*)from, size, ours(from, size));
}

Result cuMemcpyDtoD_v2(Address to, Address from, size_t size) {
    BEGIN(CONTEXT);
    return copy((void*)to, (const void*)from, size, ours(to, size) && ours(from, size));
}

Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t size, Stream* stream) {
    BEGIN(CONTEXT);
    return known(stream) ? copy_async((void*)to, from, size, ours(to, size)) : INVALID_HANDLE;
}

Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t size, Stream* stream) {
    BEGIN(CONTEXT);
    return known(stream) ? copy_async(to, (const void*)from, size, ours(from, size)) : INVALID_HANDLE;
}

Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, Stream* stream) {
    BEGIN(CONTEXT);
    return known(stream) ? copy_async((void*)to, (const void*)from, size, ours(to, size) && ours(from, size)) : INVALID_HANDLE;
}

Result cuMemsetD8_v2(Address to, unsigned char value, size_t count) {
    BEGIN(CONTEXT);
    return fill(to, value, count);
}

Result cuMemsetD8Async(Address to, unsigned char value, size_t count, Stream* stream) {
    BEGIN(CONTEXT);
    return known(stream) ? fill(to, value, count) : INVALID_HANDLE;
}

Result cuMemsetD32Async(Address to, unsigned value, size_t count, Stream* stream) {
    BEGIN(CONTEXT);
    return known(stream) ? fill(to, value, count) : INVALID_HANDLE;
}

Result cuStreamCreate(Stream** stream, unsigned flags) {
    BEGIN(CONTEXT);
    if (flags > 1) return INVALID_VALUE;
    *stream = new Stream;
    streams.insert(*stream);
    return SUCCESS;
}

Result cuStreamDestroy_v2(Stream* stream) {
    BEGIN(CONTEXT);
    if (!streams.erase(stream)) return INVALID_HANDLE;
    delete stream;
    return SUCCESS;
}

Result cuStreamSynchronize(Stream* stream) {
    BEGIN(CONTEXT);
    return known(stream) ? settle() : INVALID_HANDLE;
}

Result cuStreamQuery(Stream* stream) {
    BEGIN(CONTEXT);
    return !known(stream) ? INVALID_HANDLE : issued.empty() ? SUCCESS : NOT_READY;
}

Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    BEGIN(CONTEXT);
    return known(stream) && events.count(event) ? SUCCESS : INVALID_HANDLE;
}

Result cuEventCreate(Event** event, unsigned flags) {
    BEGIN(CONTEXT);
    const unsigned BLOCKING = 1, UNTIMED = 2;
    if (flags & ~(BLOCKING | UNTIMED)) return INVALID_VALUE;
    *event = new Event{false, !(flags & UNTIMED), {}};
    events.insert(*event);
    return SUCCESS;
}

Result cuEventDestroy_v2(Event* event) {
    BEGIN(CONTEXT);
    if (!events.erase(event)) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}

Result cuEventRecord(Event* event, Stream* stream) {
    BEGIN(CONTEXT);
    if (!events.count(event) || !known(stream)) return INVALID_HANDLE;
    event->recorded = true;
    return issue([event] {
        // It may be gone by then.
        if (events.count(event)) event->when = std::chrono::steady_clock::now();
        return SUCCESS;
    }, event);
}

Result cuEventSynchronize(Event* event) {
    BEGIN(CONTEXT);
    return events.count(event) ? settle(until(event)) : INVALID_HANDLE;
}

Result cuEventQuery(Event* event) {
    BEGIN(CONTEXT);
    return !events.count(event) ? INVALID_HANDLE : until(event) == 0 ? SUCCESS : NOT_READY;
}

Result cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    BEGIN(CONTEXT);
    return elapsed(milliseconds, from, to);
}

Result cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    BEGIN(CONTEXT);
    return elapsed(milliseconds, from, to);
}

Result cuModuleLoadData(Module** module, const void* data) {
    BEGIN(CONTEXT);
    image::Header header;
    if (!data || std::memcmp(data, image::MAGIC, sizeof image::MAGIC) != 0) return INVALID_IMAGE;
    std::memcpy(&header, data, sizeof header);
    unsigned card = settings().card;
    bool fits = header.kind == image::EXACT   ? header.card == card
                : header.kind == image::CUBIN ? header.card / 10 == card / 10 && header.card <= card
                                              : header.card <= card;
    if (!fits) return NO_BINARY_FOR_GPU;
    if (header.stamp != EMULATOR_STAMP) {
        std::fprintf(stderr, "this kernel was compiled for another version of the emulator\n");
        return INVALID_IMAGE;
    }
    const char* object = (const char*)data + sizeof header;
    if (image::sum(object, header.length) != header.sum) return INVALID_IMAGE;
    // The file stays open, since its number is the name by which the loader knows it.
    int file = memfd_create("module", MFD_CLOEXEC);
    void* library = nullptr;
    if (file >= 0 && write(file, object, header.length) == ssize_t(header.length))
        library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        close(file);
        return INVALID_IMAGE;
    }
    *module = new Module{library, file};
    modules.insert(*module);
    return SUCCESS;
}

Result cuModuleUnload(Module* module) {
    BEGIN(CONTEXT);
    if (!modules.count(module)) return INVALID_HANDLE;
    if (Result failed = settle()) return failed;
    return unload(module);
}

Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
    BEGIN(CONTEXT);
    if (!modules.count(module)) return INVALID_HANDLE;
    void* found = dlsym(module->library, ("emulator_kernel_" + std::string(name)).c_str());
    if (!found) return NOT_FOUND;
    *function = new Function{name, (emulator::Call* (*)(void**))found, module, SHARED_UNASKED};
    functions.insert(*function);
    return SUCCESS;
}

Result cuFuncSetAttribute(Function* function, int which, int value) {
    BEGIN(CONTEXT);
    const int SHARED_MOST = 8, CARVEOUT = 9;
    if (!functions.count(function)) return INVALID_HANDLE;
    if (which == CARVEOUT) return value >= -1 && value <= 100 ? SUCCESS : INVALID_VALUE;
    if (which != SHARED_MOST || value < 0 || value > settings().shared_most() << 10) return INVALID_VALUE;
    function->shared_most = value;
    return SUCCESS;
}

Result cuFuncGetAttribute(int* value, int which, Function* function) {
    BEGIN(CONTEXT);
    if (!functions.count(function)) return INVALID_HANDLE;
    switch (which) {
    case 0: *value = 1024; break;              // threads of a block
    case 1: case 2: case 3: *value = 0; break; // static shared, constant and local memory
    case 4: *value = 32; break;                // registers
    case 5: case 6: *value = settings().card; break;
    case 8: *value = function->shared_most; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t shared) {
    BEGIN(CONTEXT);
    if (!functions.count(function)) return INVALID_HANDLE;
    if (threads < 1 || threads > 1024) return INVALID_VALUE;
    size_t each = shared + attribute(111), fit = (settings().shared_all() << 10) / std::max<size_t>(each, 1);
    bool too_much = shared > size_t(function->shared_most);
    *blocks = too_much ? 0 : std::min({settings().threads_all() / ((threads + 31) / 32 * 32), attribute(106), int(fit)});
    return SUCCESS;
}

Result cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                      unsigned block_z, unsigned shared, Stream* stream, void** arguments, void** extra) {
    BEGIN(CONTEXT);
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    if (!functions.count(function) || !known(stream)) return INVALID_HANDLE;
    if (extra) return NOT_SUPPORTED;
    for (int i = 0; i < 3; i++)
        if (grid[i] == 0 || grid[i] > unsigned(attribute(5 + i)) || block[i] == 0 || block[i] > unsigned(attribute(2 + i)))
            return INVALID_VALUE;
    if (block_x * block_y * block_z > 1024 || shared > unsigned(function->shared_most) || !arguments) return INVALID_VALUE;
    trace(function, grid, block, shared);
    // The arguments are taken now, whenever it runs.
    std::shared_ptr<emulator::Call> run(function->bind(arguments));
    Result result = issue([=] {
        const unsigned of_grid[] = {grid_x, grid_y, grid_z}, of_block[] = {block_x, block_y, block_z};
        emulator::kernel_name = function->name.c_str();
        auto body = [](void* context) { ((emulator::Call*)context)->run(*(emulator::Call*)context); };
        bool stuck = emulator::launch((const void*)function->bind, body, run.get(), of_grid, of_block, shared, settings().seed);
        return stuck ? LAUNCH_FAILED : SUCCESS;
    });
    if (result) poison = result;
    return result;
}

// For the stand-in for cuBLASLt, which computes when it is called.
int emulator_settle() {
    BEGIN(CONTEXT);
    return settle();
}

// As copy_box of hopper.cuh reads it.
Result cuTensorMapEncodeTiled(unsigned long long* map, int type, unsigned rank, void* data, const unsigned long long* dims,
                              const unsigned long long* strides, const unsigned* box, const unsigned* steps, int interleave,
                              int swizzle, int promotion, int fill) {
    BEGIN(DRIVER);
    const int SWIZZLE_128B = 3;
    const unsigned SIZES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    if (settings().card < 90) return NOT_SUPPORTED;
    if (type < 0 || type >= int(std::size(SIZES)) || rank != 2 || interleave != 0 || promotion < 0 || promotion > 3 || fill != 0)
        return INVALID_VALUE;
    // Kernels have need of no other, and the emulator has none.
    if (swizzle != SWIZZLE_128B) return NOT_SUPPORTED;
    unsigned size = SIZES[type];
    if ((uintptr_t)map % 64 || (uintptr_t)data % 16 || strides[0] % 16 || strides[0] >= 1ull << 40) return INVALID_VALUE;
    for (int i = 0; i < 2; i++)
        if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
    if (box[0] * size > 128 || box[0] * size % 16) return INVALID_VALUE;
    const unsigned long long words[16] = {(Address)data, dims[1], dims[0], strides[0], box[0], box[1], size};
    std::memcpy(map, words, sizeof words);
    return SUCCESS;
}

}  // extern "C"
