// What the emulator reports of kernels that do what a card leaves undefined: each of these does one such thing.
#include "hopper.cuh"
#include "check.h"
#include <string>
#include <sys/wait.h>
#include <unistd.h>

enum class Wrong {
    NOTHING,
    COPY_NOT_ALIGNED,
    COPY_TO_OTHER_MEMORY,
    COPY_WITHOUT_FENCE,
    REGISTERS_WITHOUT_FENCE,
    REGISTERS_CHANGED_BEFORE,
    REGISTERS_CHANGED_DURING,
    SUMS_CHANGED_DURING,
    SUMS_OF_NO_PRODUCT,
};

// A product of a warpgroup, whose left matrix is in registers and whose right one comes by a copy.
template <Wrong WRONG> static void product(const unsigned char* source) {
    DYNAMIC_SHARED(shared);
    int to = WRONG == Wrong::COPY_NOT_ALIGNED ? 8 : WRONG == Wrong::COPY_TO_OTHER_MEMORY ? -16 : threadIdx.x * 16;
    copy_async(shared + to, source, 16);
    copy_group();
    copy_wait<0>();
    if (WRONG != Wrong::COPY_WITHOUT_FENCE) stores_before_products();
    __syncthreads();
    int d[16] = {};
    unsigned a[1][4] = {};
    if (WRONG != Wrong::REGISTERS_WITHOUT_FENCE) products_begin(d, a);
    if (WRONG == Wrong::REGISTERS_CHANGED_BEFORE) a[0][1] = 1;
    if (WRONG != Wrong::SUMS_OF_NO_PRODUCT) products(d, a[0], tile_descriptor<128>(shared), 0);
    products_end();
    if (WRONG == Wrong::REGISTERS_CHANGED_DURING) a[0][1] = 1;
    if (WRONG == Wrong::SUMS_CHANGED_DURING) d[3] = 1;
    products_done(d, a);
}

// Runs the kernel in a process of its own, which a report ends with code 97.
template <Wrong WRONG> static void reports(const char* what) {
    int ends[2];
    if (pipe(ends)) std::abort();
    std::fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        alignas(16) static const unsigned char source[16] = {};
        check::run(product<WRONG>, 1, 1, 128, 8 << 10, 2, source);
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char part[256];
    for (ssize_t length; (length = read(ends[0], part, sizeof part)) > 0;) said.append(part, length);
    close(ends[0]);
    if (!said.empty() && said.back() == '\n') said.pop_back();
    int status = 0;
    waitpid(child, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (WRONG == Wrong::NOTHING) check::expect(code == 0 && said.empty(), "a right kernel is not reported: %d, `%s`", code, said.c_str());
    else check::expect(code == 97 && said.find(what) != std::string::npos, "reported: %s; said: %d, `%s`", what, code, said.c_str());
}

int main() {
    reports<Wrong::NOTHING>("");
    reports<Wrong::COPY_NOT_ALIGNED>("begins a copy that is not aligned");
    reports<Wrong::COPY_TO_OTHER_MEMORY>("copies to memory that is not its launch's shared memory");
    reports<Wrong::COPY_WITHOUT_FENCE>("multiplies what a copy has brought and no fence has followed");
    reports<Wrong::REGISTERS_WITHOUT_FENCE>("begins a product whose registers no fence has named");
    reports<Wrong::REGISTERS_CHANGED_BEFORE>("changes registers between the fence and the product");
    reports<Wrong::REGISTERS_CHANGED_DURING>("changes registers that a product still reads");
    reports<Wrong::SUMS_CHANGED_DURING>("changes sums that a product still adds to");
    reports<Wrong::SUMS_OF_NO_PRODUCT>("waits for sums of which there are no products");
    return check::verdict();
}
