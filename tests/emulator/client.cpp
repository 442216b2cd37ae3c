// Tries the stand-ins for the driver and for NVRTC as the product uses them: client DIR, from the repository's root. DIR holds both.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long Address;
typedef std::vector<unsigned char> Bytes;

static std::string folder;

static void must(bool fine, const std::string& what) {
    if (fine) return;
    std::fprintf(stderr, "client: %s\n", what.c_str());
    std::_Exit(1);
}

// Calls an entry point of a library, which is opened as the product opens it.
struct Library {
    void* handle;
    explicit Library(const char* name) : handle(dlopen((folder + "/" + name).c_str(), RTLD_LAZY | RTLD_LOCAL)) {
        must(handle, std::string(name) + " does not open");
    }
    template <class... A> int operator()(const char* name, A... arguments) const {
        auto entry = (int (*)(A...))dlsym(handle, name);
        must(entry, std::string(name) + " is missing");
        return entry(arguments...);
    }
};

static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    must(bool(file), path + " cannot be read");
    return std::string(std::istreambuf_iterator<char>(file), {});
}

// The image, or what the compiler said.
static Bytes compile(const std::string& name, const std::string& source, std::vector<const char*> options, std::string* log = nullptr) {
    static const Library nvrtc("libnvrtc.so");
    std::vector<std::string> names, texts;
    for (const auto& file : std::filesystem::directory_iterator("kernels/common")) {
        names.push_back(file.path().filename());
        texts.push_back(read(file.path()));
    }
    std::vector<const char*> name_pointers, text_pointers;
    for (size_t i = 0; i < names.size(); i++) {
        name_pointers.push_back(names[i].c_str());
        text_pointers.push_back(texts[i].c_str());
    }
    void* program;
    must(!nvrtc("nvrtcCreateProgram", &program, source.c_str(), name.c_str(), int(names.size()), text_pointers.data(),
                name_pointers.data()),
         "no program");
    options.insert(options.end(), {"--std=c++17", "-default-device", "--ptxas-options=-v"});
    int failed = nvrtc("nvrtcCompileProgram", program, int(options.size()), options.data());
    size_t size;
    must(!nvrtc("nvrtcGetProgramLogSize", program, &size), "no log");
    std::string said(size, 0);
    nvrtc("nvrtcGetProgramLog", program, said.data());
    Bytes image;
    if (!failed) {
        must(!nvrtc("nvrtcGetCUBINSize", program, &size), "no image");
        bool ptx = size == 0;
        must(!ptx || !nvrtc("nvrtcGetPTXSize", program, &size), "no image");
        image.resize(size);
        must(!nvrtc(ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN", program, image.data()), "no image");
    }
    must(log ? failed == 6 : !failed, name + ": " + std::to_string(failed) + "\n" + said);
    if (log) *log = said;
    nvrtc("nvrtcDestroyProgram", &program);
    return image;
}

struct Card : Library {
    void *context, *stream;
    Card() : Library("libcuda.so") {
        int device;
        call("cuInit", 0u);
        call("cuDeviceGet", &device, 0);
        call("cuDevicePrimaryCtxRetain", &context, device);
        call("cuCtxSetCurrent", context);
        call("cuStreamCreate", &stream, 1u);
    }
    template <class... A> void call(const char* name, A... arguments) const { expect(0, name, arguments...); }
    template <class... A> void expect(int want, const char* name, A... arguments) const {
        int got = (*this)(name, arguments...);
        must(got == want, std::string(name) + " returned " + std::to_string(got) + ", not " + std::to_string(want));
    }
    Address allocate(size_t bytes) const {
        Address address;
        call("cuMemAlloc_v2", &address, bytes);
        return address;
    }
    template <class T> Address upload(const std::vector<T>& from) const {
        Address address = allocate(from.size() * sizeof(T));
        call("cuMemcpyHtoDAsync_v2", address, (const void*)from.data(), from.size() * sizeof(T), stream);
        return address;
    }
    template <class T> std::vector<T> download(Address from, size_t count) const {
        std::vector<T> to(count);
        call("cuMemcpyDtoHAsync_v2", (void*)to.data(), from, count * sizeof(T), stream);
        call("cuStreamSynchronize", stream);
        return to;
    }
    void* function(const Bytes& image, const char* name) const {
        void *module, *function;
        call("cuModuleLoadData", &module, (const void*)image.data());
        call("cuModuleGetFunction", &function, module, name);
        return function;
    }
    int launch(void* function, unsigned x, unsigned y, unsigned threads, unsigned shared, std::vector<void*> arguments) const {
        return (*this)("cuLaunchKernel", function, x, y, 1u, threads, 1u, 1u, shared, stream, arguments.data(), (void**)nullptr);
    }
};

static float widen(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

static void embed(const Card& card) {
    const int width = 64, ids = 10;
    std::vector<uint16_t> table(ids * width);
    for (size_t i = 0; i < table.size(); i++) table[i] = uint16_t(i * 7);
    std::vector<uint32_t> tokens = {3, 9, 0, 3, 5};
    int rows = tokens.size();
    float scale = 1;
    // Ids 9 and 5 are read as 1, which no row asks for.
    unsigned read_as = 1, first = 9, second = 5, third = ~0u;
    void* function = card.function(compile("embed.cu", read("kernels/embed.cu"), {"--gpu-architecture=sm_90a", "-DWIDTH=64"}), "embed");
    Address from = card.upload(table), picked = card.upload(tokens), drawn = 0, to = card.allocate(rows * width * 2);
    must(card.download<uint16_t>(to, 1)[0] == 0xffff, "fresh memory is not full of 0xff");
    std::vector<void*> arguments = {&from, &picked, &drawn, &to, &rows, &scale, &read_as, &first, &second, &third};
    must(card.launch(function, 2, 1, 128, 0, arguments) == 0, "embed does not run");
    auto got = card.download<uint16_t>(to, rows * width);
    const std::vector<uint32_t> read = {3, 1, 0, 3, 1};
    for (int i = 0; i < rows * width; i++) must(got[i] == table[read[i / width] * width + i % width], "embed is wrong");
}

struct alignas(64) TensorMap { Address words[16]; };

static TensorMap map_of(const Card& card, Address data, Address rows, Address bytes, unsigned box_rows, int want = 0) {
    TensorMap map;
    Address dims[] = {bytes, rows}, strides[] = {bytes};
    unsigned box[] = {128, box_rows}, steps[] = {1, 1};
    card.expect(want, "cuTensorMapEncodeTiled", &map, 0, 2u, (void*)data, (const Address*)dims, (const Address*)strides,
                (const unsigned*)box, (const unsigned*)steps, 0, 3, 2, 0);
    return map;
}

// INT8 by linear.cu, or by linear_sm90.cu where there are consumers, in tiles of `width` columns.
static void linear(const Card& card, int rows, int columns, int bytes, unsigned consumers, unsigned width = 0) {
    std::vector<signed char> x(size_t(rows) * bytes), w(size_t(columns) * bytes);
    for (size_t i = 0; i < x.size(); i++) x[i] = (signed char)(i * 2654435761u >> 24);
    for (size_t i = 0; i < w.size(); i++) w[i] = (signed char)((i + 12345) * 2246822519u >> 24);
    std::vector<float> row_scales(rows, 0.01f), column_scales(columns, 0.02f);
    for (int i = 0; i < columns; i++) column_scales[i] += i * 1e-4f;
    Address xs = card.upload(x), ws = card.upload(w), rs = card.upload(row_scales), cs = card.upload(column_scales), bias = 0;
    Address y = card.allocate(size_t(rows) * columns * 2);
    int stride = columns, got;
    std::chrono::steady_clock::time_point start;
    if (consumers > 0) {
        const unsigned stage = (consumers * 64 + width) * 128, shared = std::min((225u << 10) / stage, 16u) * stage + 1024;
        std::string macro = "--define-macro=CONSUMERS=" + std::to_string(consumers), tile = "-DCOLUMNS=" + std::to_string(width);
        void* function = card.function(compile("linear_sm90.cu", read("kernels/linear_sm90.cu"),
                                               {"--gpu-architecture=sm_90a", "-DFORMAT=0", "-DWIDE=0", macro.c_str(),
                                                tile.c_str()}), "linear_sm90");
        TensorMap x_map = map_of(card, xs, rows, bytes, consumers * 64), w_map = map_of(card, ws, columns, bytes, width);
        map_of(card, xs + 8, rows, bytes, 64, 1);
        std::vector<void*> arguments = {&x_map, &w_map, &rs, &cs, &bias, &y, &rows, &columns, &bytes, &stride};
        must(card.launch(function, 3, 1, 128 + consumers * 128, shared, arguments) == 1, "so much shared memory was not asked for");
        card.call("cuFuncSetAttribute", function, 8, int(shared));
        start = std::chrono::steady_clock::now();
        got = card.launch(function, 3, 1, 128 + consumers * 128, shared, arguments);
    } else {
        void* function = card.function(compile("linear.cu", read("kernels/linear.cu"),
                                               {"--gpu-architecture=sm_90", "-DFORMAT=0", "-DWIDE=0"}), "linear");
        card.call("cuFuncSetAttribute", function, 8, 98304);
        start = std::chrono::steady_clock::now();
        got = card.launch(function, (rows + 127) / 128, (columns + 127) / 128, 256, 98304,
                          {&xs, &ws, &rs, &cs, &bias, &y, &rows, &columns, &bytes, &stride});
    }
    double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    must(got == 0, "the kernel does not run: " + std::to_string(got));
    auto out = card.download<uint16_t>(y, size_t(rows) * columns);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            int sum = 0;
            for (int k = 0; k < bytes; k++) sum += x[size_t(r) * bytes + k] * w[size_t(c) * bytes + k];
            double want = double(sum) * row_scales[r] * column_scales[c], is = widen(out[size_t(r) * columns + c]);
            must(std::fabs(is - want) <= std::fabs(want) / 200, "row " + std::to_string(r) + " column " + std::to_string(c) + " is wrong");
        }
    std::printf("client: INT8 %d x %d x %d, %u consumers: right, %.1f ms\n", rows, columns, bytes, consumers, ms);
}

static void kernels() {
    Card card;
    embed(card);
    linear(card, 37, 144, 400, 0);
    linear(card, 130, 264, 400, 1, 32);
    linear(card, 130, 264, 400, 2, 256);
    linear(card, 64, 512, 512, 0);
    linear(card, 64, 512, 512, 2, 128);
    std::istringstream lines(read(std::getenv("EMULATOR_TRACE")));
    std::string trace;
    for (std::string line; std::getline(lines, line);)
        if (line.find("cuMemAlloc_v2 ") != 0) trace += line + "\n";
    must(trace.find("embed grid 2x1x1 block 128x1x1 shared 0\nlinear grid 1x2x1 block 256x1x1 shared 98304\n") == 0, "trace:\n" + trace);
}

static void memory() {
    Card card;
    Address first = card.allocate(1 << 20), more = 0;
    size_t free, total;
    card.call("cuMemGetInfo_v2", &free, &total);
    must(total == 4 << 20 && free == 3 << 20, "memory is not counted");
    card.expect(2, "cuMemAlloc_v2", &more, size_t(3 << 20) + 1);
    Bytes host(2 << 20);
    card.expect(1, "cuMemcpyHtoD_v2", first, (const void*)host.data(), size_t(1 << 20) + 1);
    card.expect(1, "cuMemcpyDtoHAsync_v2", (void*)host.data(), first + 1, size_t(1 << 20), card.stream);
    card.expect(1, "cuMemsetD8Async", first - 1, 0, size_t(1), card.stream);
    card.expect(1, "cuMemFree_v2", first + 256);
    card.call("cuMemsetD32Async", first, 7u, size_t(1 << 18), card.stream);
    must(card.download<int>(first + (1 << 20) - 4, 1)[0] == 7, "memory is not filled");
    card.call("cuMemFree_v2", first);
    card.expect(1, "cuMemFree_v2", first);
    card.call("cuMemAlloc_v2", &more, size_t(4 << 20));
    void *from, *to;
    float ms = -1;
    card.call("cuEventCreate", &from, 0u);
    card.call("cuEventCreate", &to, 0u);
    card.call("cuEventRecord", from, card.stream);
    usleep(20000);
    card.expect(400, "cuEventElapsedTime_v2", &ms, from, to);
    card.call("cuEventRecord", to, card.stream);
    card.call("cuEventElapsedTime_v2", &ms, from, to);
    must(ms >= 20 && ms < 2000, "time does not pass");
}

static const char* const SMALL = "extern \"C\" __global__ void store(float* to, int at) { if (threadIdx.x == 3) to[at] = 1; }\n"
                                 "extern \"C\" __global__ void __launch_bounds__(32) stuck(float* to, int at) {\n"
                                 "    if (threadIdx.x == 0) __syncthreads();\n    else __syncwarp();\n}\n";

static void images() {
    Card card;
    void* module;
    Bytes image = compile("small.cu", SMALL, {"--gpu-architecture=sm_80"}), damaged = image;
    card.expect(200, "cuModuleLoadData", &module, (const void*)"\x7f" "ELF and more");
    damaged[damaged.size() / 2] ^= 1;
    card.expect(200, "cuModuleLoadData", &module, (const void*)damaged.data());
    Bytes hopper = compile("small.cu", SMALL, {"--gpu-architecture=sm_90a"});
    card.expect(209, "cuModuleLoadData", &module, (const void*)hopper.data());
    // Modules come and go, and each is its own.
    for (const char* value : {"1", "2"}) {
        std::string source = std::string("extern \"C\" __global__ void store(int* to) { *to = ") + value + "; }";
        const char* target = value[0] == '1' ? "--gpu-architecture=sm_86" : "--gpu-architecture=compute_80";
        Bytes another = compile("small.cu", source, {target});
        void* function;
        card.call("cuModuleLoadData", &module, (const void*)another.data());
        card.expect(500, "cuModuleGetFunction", &function, module, "other");
        card.call("cuModuleGetFunction", &function, module, "store");
        Address to = card.allocate(4);
        must(card.launch(function, 1, 1, 1, 0, {&to}) == 0, "store does not run");
        must(card.download<int>(to, 1)[0] == value[0] - '0', "another module ran");
        card.call("cuModuleUnload", module);
        must(card.launch(function, 1, 1, 1, 0, {&to}) == 400, "a kernel outlived its module");
    }
    std::string log;
    compile("small.cu", "\nextern \"C\" __global__ void store(int* to) { *to = missing; }", {"--gpu-architecture=sm_86"}, &log);
    must(log.find("small.cu:2:") == 0 || log.find("\nsmall.cu:2:") != std::string::npos, "log:\n" + log);
    must(log.find("error: 'missing'") != std::string::npos || log.find("error: ‘missing’") != std::string::npos, "log:\n" + log);
    compile("linear_sm90.cu", read("kernels/linear_sm90.cu"), {"--gpu-architecture=sm_90", "-DFORMAT=0", "-DCONSUMERS=1"}, &log);
}

static void store_at(int at, int shift) {
    Card card;
    void* function = card.function(compile("small.cu", SMALL, {"--gpu-architecture=sm_80"}), "store");
    Address to = card.allocate(256) + shift;
    // One block: of several, any may be the first that is named.
    must(card.launch(function, 1, 1, 32, 0, {&to, &at}) == 0, "store does not run");
}

static void stuck() {
    Card card;
    void* function = card.function(compile("small.cu", SMALL, {"--gpu-architecture=sm_80"}), "stuck");
    Address to = 0;
    int at = 0;
    for (auto [x, threads] : {std::pair(0u, 32u), {1u, 0u}, {1u, 1025u}, {0x80000000u, 1u}})
        must(card.launch(function, x, 1, threads, 0, {&to, &at}) == 1, "sizes that no card takes");
    must(card.launch(function, 1, 1, 32, 0, {&to, &at}) == 719, "threads that wait for each other");
    card.expect(719, "cuStreamSynchronize", card.stream);
    card.expect(719, "cuMemAlloc_v2", &to, size_t(4));
    const char* name;
    card.call("cuGetErrorName", 719, &name);
    must(std::string(name) == "CUDA_ERROR_LAUNCH_FAILED", name);
}

// Nothing is done before it is waited for, and what is not pinned has been taken all the same.
static void late() {
    Card card;
    const size_t bytes = 4096;
    void* pinned;
    card.call("cuMemHostAlloc", &pinned, bytes, 0u);
    std::memset(pinned, 1, bytes);
    std::vector<char> plain(bytes, 1);
    Address first = card.allocate(bytes), second = card.allocate(bytes);
    card.call("cuMemcpyHtoDAsync_v2", first, (const void*)plain.data(), bytes, card.stream);
    card.call("cuMemcpyHtoDAsync_v2", second, (const void*)pinned, bytes, card.stream);
    std::memset(pinned, 2, bytes);
    plain.assign(bytes, 2);
    void* mark;
    card.call("cuEventCreate", &mark, 2u);
    card.call("cuEventRecord", mark, card.stream);
    card.call("cuMemsetD8Async", second, 3, bytes, card.stream);
    must(card("cuEventQuery", mark) == 600 && card("cuStreamQuery", card.stream) == 600, "something was done before it was waited for");
    must(*(char*)second == char(0xff), "a copy was not late");
    card.call("cuEventSynchronize", mark);
    must(*(char*)first == 1 && *(char*)second == 2, "what is pinned is read late, the rest when it is asked for");
    card.call("cuMemcpyDtoHAsync_v2", pinned, second, bytes, card.stream);
    must(*(char*)pinned == 2, "a copy to pinned memory was not late");
    card.call("cuStreamSynchronize", card.stream);
    must(*(char*)pinned == 3, "waiting for the stream did not do what was issued to it");
}

static void no_card() {
    Library driver("libcuda.so");
    int count = -1;
    must(driver("cuInit", 0u) == 100 && driver("cuDeviceGetCount", &count) == 0 && count == 0, "there is a card");
}

static void failures() {
    Card card;
    card.allocate(4);
    Address address;
    card.expect(2, "cuMemAlloc_v2", &address, size_t(4));
    card.allocate(4);
}

static void lasting() {
    Card card;
    Address address = card.allocate(4);
    card.expect(700, "cuMemsetD8Async", address, 0, size_t(4), card.stream);
    card.expect(700, "cuMemFree_v2", address);
}

// Runs one part in a process of its own, with these variables. It ends with status 0, or with 99 once it has said something.
static void part(std::vector<std::pair<const char*, std::string>> variables, const std::function<void()>& run, const char* says = "",
                 int want = 0) {
    std::fflush(stdout);
    std::string said = folder + "/said";
    pid_t child = fork();
    if (child == 0) {
        for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
        must(dup2(open(said.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600), 2) == 2, said);
        run();
        std::fflush(stdout);
        std::_Exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    std::string text = read(said);
    must(WIFEXITED(status) && WEXITSTATUS(status) == want, "a part ended with status " + std::to_string(status) + ": " + text);
    must(*says ? text.find(says) == 0 : text.empty(), "a part said: " + text);
    std::filesystem::remove(said);
}

int main(int count, char** arguments) {
    must(count == 2, "usage: client DIR");
    folder = arguments[1];
    std::filesystem::remove(folder + "/trace");
    part({{"EMULATOR_TRACE", folder + "/trace"}}, kernels);
    std::filesystem::remove(folder + "/trace");
    part({{"EMULATOR_MEMORY", std::to_string(4 << 20)}}, memory);
    part({{"EMULATOR_CARD", "8.9"}}, images);
    part({{"EMULATOR_CARD", "8.0"}}, [] { store_at(63, 0); });
    part({{"EMULATOR_CARD", "8.0"}}, [] { store_at(64, 0); }, "store: block 0,0,0 thread 3,0,0 touches 0x", 99);
    part({{"EMULATOR_CARD", "8.0"}}, [] { store_at(0, 2); }, "store: block 0,0,0 thread 3,0,0 touches a misaligned", 99);
    part({{"EMULATOR_CARD", "8.6"}}, stuck, "stuck: block 0: 32 threads wait for each other\n");
    part({{"EMULATOR_CARD", "none"}}, no_card);
    part({{"EMULATOR_LATE", "1"}}, late);
    part({{"EMULATOR_LATE", "1"}, {"EMULATOR_TRACE", folder + "/trace"}}, kernels);
    std::filesystem::remove(folder + "/trace");
    part({{"EMULATOR_FAIL", "cuMemAlloc_v2:2:2"}}, failures);
    part({{"EMULATOR_FAIL", "cuMemsetD8Async:1:700"}}, lasting);
}
