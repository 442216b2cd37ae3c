// Runs kernels on a card at the shapes of Llama 3.1 8B, holds them against plain ones and times them: see first.sh.
#include <cuda.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <string>
#include <vector>

static void check(CUresult result, const char* what, int line) {
    if (result == CUDA_SUCCESS) return;
    const char* name = "?";
    cuGetErrorName(result, &name);
    std::fprintf(stderr, "line %d: %s: %s\n", line, what, name);
    std::exit(1);
}
#define CHECK(call) check(call, #call, __LINE__)

static CUstream stream;
static int processors;

static CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr pointer;
    CHECK(cuMemAlloc(&pointer, bytes));
    return pointer;
}

struct Kernel {
    CUmodule module;
    CUfunction function;
    Kernel(const std::string& folder, const std::string& file, const char* name) {
        CHECK(cuModuleLoad(&module, (folder + "/" + file + ".cubin").c_str()));
        CHECK(cuModuleGetFunction(&function, module, name));
        int stack = 0;
        CHECK(cuFuncGetAttribute(&stack, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function));
        if (stack > 0) std::printf("%s: %d bytes of local memory\n", file.c_str(), stack);
    }
    void operator()(unsigned x, unsigned y, unsigned threads, unsigned shared, std::vector<void*> arguments) {
        CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared));
        CHECK(cuLaunchKernel(function, x, y, 1, threads, 1, 1, shared, stream, arguments.data(), nullptr));
    }
};

// Median milliseconds of a run.
template <class Run> static double time(Run run) {
    CUevent begin, end;
    CHECK(cuEventCreate(&begin, 0));
    CHECK(cuEventCreate(&end, 0));
    for (int i = 0; i < 3; i++) run();
    std::vector<float> times;
    for (int i = 0; i < 15; i++) {
        CHECK(cuEventRecord(begin, stream));
        for (int j = 0; j < 4; j++) run();
        CHECK(cuEventRecord(end, stream));
        CHECK(cuEventSynchronize(end));
        float ms;
        CHECK(cuEventElapsedTime(&ms, begin, end));
        times.push_back(ms / 4);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static uint32_t state = 1;
static uint32_t draw() {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}
static float bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}
static uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float e4m3(uint8_t x) {
    int power = x >> 3 & 15, steps = x & 7;
    float a = power == 0 ? std::ldexp((float)steps, -9) : std::ldexp((float)(8 + steps), power - 10);
    return x & 0x80 ? -a : a;
}

static const char* FORMATS[] = {"int8", "fp8", "bf16"};

// Random numbers in a format, as bytes.
static std::vector<uint8_t> numbers(int format, size_t count) {
    std::vector<uint8_t> bytes(count * (format == 2 ? 2 : 1));
    if (format == 2)
        for (size_t i = 0; i < count; i++) {
            uint16_t x = to_bf16((float)draw() / (1 << 23) - 1);
            std::memcpy(&bytes[i * 2], &x, 2);
        }
    else
        for (auto& byte : bytes) {
            byte = (uint8_t)draw();
            // Neither NaN nor the largest powers.
            if (format == 1) byte = (byte & 0x80) | (byte & 0x7f) % 0x60;
        }
    return bytes;
}
static float number(int format, const std::vector<uint8_t>& bytes, size_t at) {
    if (format == 0) return (float)(int8_t)bytes[at];
    if (format == 1) return e4m3(bytes[at]);
    uint16_t x;
    std::memcpy(&x, &bytes[at * 2], 2);
    return bf16(x);
}
static CUdeviceptr upload(const void* data, size_t bytes) {
    CUdeviceptr to = allocate(bytes);
    CHECK(cuMemcpyHtoD(to, data, bytes));
    return to;
}

static CUtensorMap tensor_map(CUdeviceptr data, int format, int rows, int bytes, int box_rows) {
    CUtensorMap map;
    int size = format == 2 ? 2 : 1;
    cuuint64_t dims[] = {(cuuint64_t)(bytes / size), (cuuint64_t)rows}, strides[] = {(cuuint64_t)bytes};
    cuuint32_t box[] = {(cuuint32_t)(128 / size), (cuuint32_t)box_rows}, steps[] = {1, 1};
    CHECK(cuTensorMapEncodeTiled(&map, format == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2,
                                 (void*)data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

// A layer: `k` inputs, `n` outputs.
static void linear(const std::string& folder, int k, int n) {
    const int most = 4096;
    for (int format = 0; format < 3; format++) {
        int size = format == 2 ? 2 : 1, bytes = k * size;
        // Several layers by turns, so that weights come from memory.
        int layers = std::max(1, (int)((256ll << 20) / ((long long)n * bytes)));
        auto x = numbers(format, (size_t)most * k), w = numbers(format, (size_t)n * k);
        std::vector<float> row_scales(most), column_scales(n);
        for (auto& s : row_scales) s = (1 + draw() % 7) / 127.0f;
        for (auto& s : column_scales) s = (1 + draw() % 7) / 127.0f;
        CUdeviceptr dx = upload(x.data(), x.size()), rs = upload(row_scales.data(), most * 4), cs = upload(column_scales.data(), n * 4);
        std::vector<CUdeviceptr> dw;
        for (int i = 0; i < layers; i++) dw.push_back(upload(w.data(), w.size()));
        CUdeviceptr dy = allocate((size_t)most * n * 2), bias = 0;
        for (int rows : {1, 16, 64, 128, 256, 1024, 4096}) {
            for (int way = 0; way < 3; way++) {
                int consumers = way;  // 0: mma.sync
                std::string file = way == 0 ? std::string("linear_") + FORMATS[format]
                                            : std::string("linear_sm90_") + FORMATS[format] + "_" + std::to_string(consumers);
                Kernel kernel(folder, file, way == 0 ? "linear" : "linear_sm90");
                CHECK(cuMemsetD8(dy, 0xff, (size_t)rows * n * 2));
                int layer = 0;
                std::vector<CUtensorMap> maps;
                CUtensorMap xm;
                if (way > 0) {
                    xm = tensor_map(dx, format, rows, bytes, consumers * 64);
                    for (auto p : dw) maps.push_back(tensor_map(p, format, n, bytes, 128));
                }
                auto run = [&] {
                    layer = (layer + 1) % layers;
                    if (way == 0) {
                        kernel((rows + 127) / 128, (n + 127) / 128, 256, 3 * 2 * 128 * 128,
                               {&dx, &dw[layer], &rs, &cs, &bias, &dy, &rows, &n, &bytes, &n});
                    } else {
                        int tiles = (rows + consumers * 64 - 1) / (consumers * 64) * ((n + 127) / 128);
                        int stages = consumers == 1 ? 8 : 6, stage = (consumers * 64 + 128) * 128;
                        kernel(std::min(tiles, processors), 1, 128 + consumers * 128, stages * stage + 1024,
                               {&xm, &maps[layer], &rs, &cs, &bias, &dy, &rows, &n, &bytes, &n});
                    }
                };
                run();
                CHECK(cuStreamSynchronize(stream));
                std::vector<uint16_t> y((size_t)rows * n);
                CHECK(cuMemcpyDtoH(y.data(), dy, y.size() * 2));
                // Some of the results, in doubles.
                double error = 0, norm = 0;
                for (int i = 0; i < 400; i++) {
                    int row = i == 0 ? rows - 1 : draw() % rows, column = i == 0 ? n - 1 : draw() % n;
                    double sum = 0;
                    for (int j = 0; j < k; j++)
                        sum += (double)number(format, x, (size_t)row * k + j) * number(format, w, (size_t)column * k + j);
                    if (format != 2) sum *= (double)row_scales[row] * column_scales[column];
                    double e = bf16(y[(size_t)row * n + column]) - sum;
                    error += e * e;
                    norm += sum * sum;
                }
                size_t unwritten = std::count(y.begin(), y.end(), 0xffff);
                double ms = time(run);
                std::printf("linear %s %dx%d rows %d %s: relative error %.2g, %zu unwritten, %.4f ms, %.0f TOP/s, %.0f GB/s\n",
                            FORMATS[format], k, n, rows, way == 0 ? "mma.sync" : way == 1 ? "wgmma 64" : "wgmma 128",
                            std::sqrt(error / norm), unwritten, ms, 2.0 * rows * n * k / ms / 1e9,
                            ((double)n * bytes + (double)rows * (bytes + n * 2)) / ms / 1e6);
                std::fflush(stdout);
                CHECK(cuModuleUnload(kernel.module));
            }
        }
        for (auto p : dw) CHECK(cuMemFree(p));
        for (auto p : {dx, rs, cs, dy}) CHECK(cuMemFree(p));
    }
}

struct Item {
    uint32_t first_query, queries, table, from, to, part;
};

// A token each of `sequences` that have `context` positions.
static void decode(const std::string& folder, int sequences, int context) {
    const int heads = 32, kv_heads = 8, dim = 128, block = 64, none = -1;
    for (int format = 0; format < 3; format++) {
        int size = format == 2 ? 2 : 1, blocks = (context + block - 1) / block, all = sequences * blocks;
        size_t count = (size_t)all * kv_heads * block * dim;
        auto keys = numbers(format, count), values = numbers(format, count), q = numbers(2, (size_t)sequences * (heads + 2 * kv_heads) * dim);
        std::vector<float> scales((size_t)all * kv_heads * block);
        for (auto& s : scales) s = (1 + draw() % 7) / 512.0f;
        std::vector<uint32_t> tables(all), queries(sequences), positions(sequences, context - 1);
        for (int i = 0; i < all; i++) tables[i] = i;
        for (int i = all - 1; i > 0; i--) std::swap(tables[i], tables[draw() % (i + 1)]);
        std::vector<Item> items;
        for (int i = 0; i < sequences; i++) {
            queries[i] = i;
            items.push_back({(uint32_t)i, 1, (uint32_t)(i * blocks), 0, (uint32_t)context, (uint32_t)none});
        }
        CUdeviceptr dq = upload(q.data(), q.size()), dk = upload(keys.data(), keys.size()), dv = upload(values.data(), values.size());
        CUdeviceptr ds = upload(scales.data(), scales.size() * 4), di = upload(items.data(), items.size() * sizeof(Item));
        CUdeviceptr du = upload(queries.data(), queries.size() * 4), dp = upload(positions.data(), positions.size() * 4);
        CUdeviceptr dt = upload(tables.data(), tables.size() * 4), dy = allocate((size_t)sequences * heads * dim * 2), null = 0;
        CHECK(cuMemsetD8(dy, 0xff, (size_t)sequences * heads * dim * 2));
        float scale = 1 / std::sqrt((float)dim);
        Kernel kernel(folder, std::string("attention_") + FORMATS[format] + "_1", "attention");
        unsigned shared = 2 * (2 * block * dim * size + (format == 2 ? 0 : 2 * block * 4));
        auto run = [&] {
            kernel(sequences, kv_heads, 32, shared, {&dq, &dk, &dv, &ds, &ds, &di, &du, &dp, &dt, &scale, &dy, &null, &null});
        };
        run();
        CHECK(cuStreamSynchronize(stream));
        std::vector<uint16_t> y((size_t)sequences * heads * dim);
        CHECK(cuMemcpyDtoH(y.data(), dy, y.size() * 2));
        double error = 0, norm = 0;
        for (int i = 0; i < 8; i++) {
            int s = draw() % sequences, h = draw() % heads, kv = h / (heads / kv_heads);
            std::vector<double> weights(context), result(dim);
            double most = -1e300, total = 0;
            auto at = [&](int p) { return ((size_t)tables[s * blocks + p / block] * kv_heads + kv) * block; };
            for (int p = 0; p < context; p++) {
                double sum = 0;
                for (int d = 0; d < dim; d++)
                    sum += (double)number(2, q, ((size_t)s * (heads + 2 * kv_heads) + h) * dim + d) * number(format, keys, (at(p) + p % block) * dim + d);
                weights[p] = sum * scale * (format == 2 ? 1 : scales[at(p) + p % block]);
                most = std::max(most, weights[p]);
            }
            for (auto& w : weights) total += w = std::exp(w - most);
            for (int d = 0; d < dim; d++) {
                for (int p = 0; p < context; p++)
                    result[d] += weights[p] / total * number(format, values, at(p) * dim + (size_t)d * block + p % block) * (format == 2 ? 1 : scales[at(p) + p % block]);
                double e = bf16(y[((size_t)s * heads + h) * dim + d]) - result[d];
                error += e * e;
                norm += result[d] * result[d];
            }
        }
        double ms = time(run), bytes = (double)count * size * 2 + (format == 2 ? 0 : scales.size() * 8.0);
        std::printf("decode %s, %d sequences of %d: relative error %.2g, %zu unwritten, %.4f ms, %.0f GB/s\n", FORMATS[format], sequences,
                    context, std::sqrt(error / norm), (size_t)std::count(y.begin(), y.end(), 0xffff), ms, bytes / ms / 1e6);
        std::fflush(stdout);
        for (auto p : {dq, dk, dv, ds, di, du, dp, dt, dy}) CHECK(cuMemFree(p));
    }
}

int main(int, char** arguments) {
    std::string folder = arguments[1];
    CUdevice device;
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    char name[100];
    int driver;
    CHECK(cuDeviceGetName(name, sizeof name, device));
    CHECK(cuDriverGetVersion(&driver));
    std::printf("%s, %d multiprocessors, driver for CUDA %d.%d\n", name, processors, driver / 1000, driver % 1000 / 10);
    size_t bytes = 1ull << 30;
    CUdeviceptr from = allocate(bytes), to = allocate(bytes);
    CHECK(cuMemsetD8(from, 7, bytes));
    double ms = time([&] { CHECK(cuMemcpyDtoDAsync(to, from, bytes, stream)); });
    std::printf("copy of 1 GiB: %.0f GB/s read and written\n", 2.0 * bytes / ms / 1e6);
    CHECK(cuMemFree(from));
    CHECK(cuMemFree(to));
    decode(folder, 256, 1024);
    decode(folder, 64, 4000);
    linear(folder, 4096, 6144);
    linear(folder, 4096, 28672);
    linear(folder, 14336, 4096);
}
