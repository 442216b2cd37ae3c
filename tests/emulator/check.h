// What the checks share: launches, random numbers, memory that ends where it ends, and a verdict.
#pragma once
#include "emulator.h"
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <vector>
#include <sys/mman.h>

namespace check {

inline bool failed = false;

// Says what was checked; the program fails where it does not hold.
__attribute__((format(printf, 2, 3))) inline void expect(bool holds, const char* what, ...) {
    std::va_list arguments;
    va_start(arguments, what);
    std::printf("%s: ", holds ? "ok" : "FAILED");
    std::vprintf(what, arguments);
    std::printf("\n");
    va_end(arguments);
    failed |= !holds;
}

// What `main` returns.
inline int verdict() {
    return failed;
}

// In [-1, 1].
inline float number() {
    return float(std::rand()) / float(RAND_MAX) * 2 - 1;
}

// `count` elements right before a page that cannot be touched: what reads or writes beyond them ends the program.
template <class T> T* guarded(size_t count) {
    const size_t page = 4096;
    size_t bytes = count * sizeof(T), pages = (bytes + page - 1) / page * page;
    char* memory = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(memory + pages, page, PROT_NONE);
    return (T*)(memory + pages - bytes);
}

template <class T> struct Same {
    typedef T type;
};

// Runs a kernel with these arguments.
template <class... P>
void run(void (*kernel)(P...), unsigned grid_x, unsigned grid_y, unsigned threads, size_t shared, unsigned seed,
         typename Same<P>::type... arguments) {
    struct Context {
        void (*kernel)(P...);
        std::tuple<P...> arguments;
    } context{kernel, {arguments...}};
    unsigned grid[] = {grid_x, grid_y, 1}, size[] = {threads, 1, 1};
    auto body = [](void* context) { std::apply(((Context*)context)->kernel, ((Context*)context)->arguments); };
    if (emulator::launch((const void*)kernel, body, &context, grid, size, shared, seed)) expect(false, "a launch of %u x %u blocks ends", grid_x, grid_y);
}

// The worst of errors, each as a part of what is allowed.
struct Worst {
    double part = 0;
    void add(double error, double allowed) {
        double p = error == 0 ? 0 : std::fabs(error) / allowed;
        // Not a number is worst of all, and stays.
        if (part == part && !(p <= part)) part = p;
    }
    bool fine() const { return part <= 1; }
};

}  // namespace check
