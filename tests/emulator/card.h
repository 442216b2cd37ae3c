// The card that driver.cpp shows: what its environment says of it, its limits, and the driver's errors.
#pragma once
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_TIMEOUT = 702,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

const struct { int code; const char *name, *text; } ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

struct Settings {
    int card = 90;
    bool none = false;
    size_t memory = 4ull << 30;
    unsigned seed = 1;
    std::string failing, trace;
    int failing_call = 0, failing_code = 0;
    bool late = false;

    Settings() {
        if (const char* text = std::getenv("EMULATOR_CARD")) {
            int major = 0, minor = 0;
            none = std::string(text) == "none";
            if (!none && std::sscanf(text, "%d.%d", &major, &minor) != 2) refuse("EMULATOR_CARD", text);
            card = major * 10 + minor;
        }
        if (const char* text = std::getenv("EMULATOR_MEMORY")) memory = number("EMULATOR_MEMORY", text);
        if (const char* text = std::getenv("EMULATOR_SEED")) seed = (unsigned)number("EMULATOR_SEED", text);
        if (const char* text = std::getenv("EMULATOR_TRACE")) trace = text;
        if (const char* text = std::getenv("EMULATOR_LATE")) late = number("EMULATOR_LATE", text) > 0;
        if (const char* text = std::getenv("EMULATOR_FAIL")) {
            char name[64];
            if (std::sscanf(text, "%63[^:]:%d:%d", name, &failing_call, &failing_code) != 3) refuse("EMULATOR_FAIL", text);
            failing = name;
        }
    }
    static void refuse(const char* variable, const char* text) {
        std::fprintf(stderr, "%s=%s means nothing\n", variable, text);
        std::_Exit(98);
    }
    static unsigned long long number(const char* variable, const char* text) {
        char* end;
        unsigned long long value = std::strtoull(text, &end, 10);
        if (end == text || *end) refuse(variable, text);
        return value;
    }

    // Of a block and of a multiprocessor, in KiB.
    int shared_most() const { return card == 75 ? 64 : card == 80 || card == 87 ? 163 : card / 10 == 8 || card / 10 == 12 ? 99 : 227; }
    int shared_all() const { return card == 75 ? 64 : shared_most() + 1; }
    int threads_all() const { return card == 75 ? 1024 : card == 80 || card / 10 == 9 || card / 10 == 10 ? 2048 : 1536; }
};

inline const Settings& settings() {
    static const Settings& read = *new Settings;
    return read;
}

const int SHARED_UNASKED = 48 << 10;

// Of an attribute of the card; -1 where it is not known here.
inline int attribute(int which) {
    const Settings& s = settings();
    switch (which) {
    case 1: case 2: case 3: return 1024;          // threads of a block, its dimensions
    case 4: return 64;
    case 5: return 0x7fffffff;                    // dimensions of a grid
    case 6: case 7: return 65535;
    case 8: return SHARED_UNASKED;                // shared memory of a block
    case 9: return 64 << 10;                      // constant memory
    case 10: return 32;                           // threads of a warp
    case 12: case 82: return 65536;               // registers of a block, of a multiprocessor
    case 13: return 1500000;                      // clock, kHz
    case 16: return 4;                            // multiprocessors
    case 17: case 18: case 32: return 0;          // time limit, integrated, ECC
    case 19: case 31: case 41: return 1;          // host memory mapped, concurrent kernels, unified addresses
    case 20: return 0;                            // compute mode: default
    case 33: return 1;                            // bus and device on it, domain
    case 34: case 50: return 0;
    case 36: return 1000000;                      // memory clock, kHz
    case 37: return 1024;                         // bits of its bus
    case 38: return 4 << 20;                      // L2
    case 39: return s.threads_all();
    case 40: return 1;                            // copy engines
    case 75: return s.card / 10;
    case 76: return s.card % 10;
    case 78: return 0;                            // priorities of streams
    case 81: return s.shared_all() << 10;
    case 83: case 88: case 89: return 0;          // managed memory
    case 95: return 0;                            // cooperative launches
    case 97: return s.shared_most() << 10;
    case 106: return s.card == 86 || s.card == 75 ? 16 : s.card == 89 ? 24 : 32;
    case 111: return s.card == 75 ? 0 : 1 << 10;  // shared memory that each block loses
    case 115: return 0;                           // memory pools
    case 120: case 127: return s.card >= 90;      // clusters, tensor maps
    default: return -1;
    }
}
