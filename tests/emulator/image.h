// What the stand-in for NVRTC makes and the one for the driver loads: this, then a shared object.
#pragma once
#include <cstddef>
#include <cstdint>

namespace image {

const char MAGIC[8] = {'E', 'M', 'U', 'L', 'A', 'T', 'E', 'D'};

// CUBIN runs on cards of the same major version from its own on, EXACT (sm_90a) on that one alone, PTX on all from its own on.
enum Kind { CUBIN, EXACT, PTX };

// `stamp`: of the emulator's headers, which say how what is compiled meets the driver.
struct Header {
    char magic[8];
    uint32_t stamp, card, kind;
    uint64_t length, sum;
};

// Of the bytes (FNV-1a), so that a damaged one is refused instead of run.
inline uint64_t sum(const char* bytes, size_t length) {
    uint64_t sum = 0xcbf29ce484222325;
    for (size_t i = 0; i < length; i++) sum = (sum ^ (unsigned char)bytes[i]) * 0x100000001b3;
    return sum;
}

}  // namespace image
