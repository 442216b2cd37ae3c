#include "ptx.cuh"
#include "types.cuh"
#ifndef WIDTH
#define WIDTH 896
#endif
#ifndef OUTPUT
#define OUTPUT 0
#endif
#include "../../kernels/add_norm.cu"
#include "../../kernels/gated.cu"
#include "../../kernels/quantize.cu"
#include "../../kernels/embed.cu"
namespace emulator { int launch(void (*)(void*), void*, const unsigned*, const unsigned*, size_t, unsigned); }
template <class K> int run(K k, std::vector<void*> args, unsigned gx, unsigned bx, unsigned seed) {
    static K kernel; kernel = k; static std::vector<void*>* a; a = &args; unsigned g[] = {gx, 1, 1}, b[] = {bx, 1, 1};
    return emulator::launch([](void*) { emulator::call(kernel, a->data()); }, nullptr, g, b, 0, seed);
}
float number() { return rand() / (float)RAND_MAX * 2 - 1; }
// What a row of outputs stands for, and its largest error against `want`, in steps of the format.
double error(const std::vector<u8>& out, const std::vector<float>& scales, int row, const double* want) {
    double most = 0, worst = 0;
    for (int i = 0; i < WIDTH; i++) most = std::max(most, std::fabs(want[i]));
    for (int i = 0; i < WIDTH; i++) {
        double got, step;
#if OUTPUT == 2
        got = widen(((const Bf16*)out.data())[row * WIDTH + i]); step = std::fabs(want[i]) / 128 + 1e-6;
#elif OUTPUT == 0
        got = (i8)out[row * WIDTH + i] * (double)scales[row]; step = most / 127;
#else
        got = e4m3_to_float(out[row * WIDTH + i]) * (double)scales[row]; step = std::max(std::fabs(want[i]) / 8, most / 448 / 512);
#endif
        double e = std::fabs(got - want[i]) / step;
        if (!(e <= worst)) worst = e;
    }
    return worst;
}
int main() {
    const int rows = 5;
    std::vector<Bf16> residual(rows * WIDTH), delta(residual), weight(WIDTH), pair(rows * 2 * WIDTH), table(40 * WIDTH), picked_rows(residual);
    for (auto* v : {&residual, &delta, &weight, &pair, &table}) for (auto& x : *v) x = to_bf16(number() * 3);
    std::vector<u8> out(rows * WIDTH * 2, 0xee); std::vector<float> scales(rows, NAN);
    auto before = residual; float eps = 1e-5f; void* o = out.data(); float* sc = scales.data(); Bf16* r = residual.data(); const Bf16 *d = delta.data(), *w = weight.data(), *p = pair.data(), *t = table.data(); const u32* none = nullptr;
    int rc = run(add_norm, {&r, &d, &w, &none, &eps, &o, &sc}, rows, THREADS, 3); double worst = 0; bool same = true;
    std::vector<double> want(WIDTH);
    auto normed = [&](int row) { double s = 0; for (int i = 0; i < WIDTH; i++) { double x = round_bf16(widen(before[row * WIDTH + i]) + widen(delta[row * WIDTH + i])); want[i] = x; s += x * x; } for (auto& x : want) x = x / std::sqrt(s / WIDTH + eps); for (int i = 0; i < WIDTH; i++) want[i] *= widen(weight[i]); };
    for (int row = 0; row < rows; row++) { normed(row); worst = std::max(worst, error(out, scales, row, want.data())); for (int i = 0; i < WIDTH; i++) same &= widen(residual[row * WIDTH + i]) == round_bf16(widen(before[row * WIDTH + i]) + widen(delta[row * WIDTH + i])); }
    printf("output %d width %d: add_norm rc %d, %.2f steps, residual %s\n", OUTPUT, WIDTH, rc, worst, same ? "right" : "WRONG");
    std::vector<u32> picked{3, 1}; const u32* pk = picked.data(); residual = before; r = residual.data(); worst = 0;
    rc = run(add_norm, {&r, &d, &w, &pk, &eps, &o, &sc}, 2, THREADS, 4);
    for (int i = 0; i < 2; i++) { normed(picked[i]); worst = std::max(worst, error(out, scales, i, want.data())); }
    printf("  picked rc %d, %.2f steps, residual %s\n", rc, worst, std::memcmp(residual.data(), before.data(), before.size() * 2) ? "WRONG" : "kept");
    rc = run(gated, {&p, &o, &sc}, rows, THREADS, 5); worst = 0;
    for (int row = 0; row < rows; row++) { for (int i = 0; i < WIDTH; i++) { double g = widen(pair[row * 2 * WIDTH + i]); want[i] = g / (1 + std::exp(-g)) * widen(pair[row * 2 * WIDTH + WIDTH + i]); } worst = std::max(worst, error(out, scales, row, want.data())); }
    printf("  gated rc %d, %.2f steps\n", rc, worst);
    rc = run(quantize, {&d, &o, &sc}, rows, THREADS, 6); worst = 0;
    for (int row = 0; row < rows; row++) { for (int i = 0; i < WIDTH; i++) want[i] = widen(delta[row * WIDTH + i]); worst = std::max(worst, error(out, scales, row, want.data())); }
    printf("  quantize rc %d, %.2f steps\n", rc, worst);
    delta[WIDTH + 7] = Bf16{0x7fc0}; delta[2 * WIDTH] = Bf16{0xff80}; for (int i = 0; i < WIDTH; i++) delta[3 * WIDTH + i] = Bf16{0};
    rc = run(quantize, {&d, &o, &sc}, rows, THREADS, 6);
    if (OUTPUT != 2) printf("  scales with NaN, infinity, zeros: %g %g %g %g\n", scales[0], scales[1], scales[2], scales[3]);
    std::vector<u32> tokens{0, 39, 7, 7, 12}; const u32* tk = tokens.data(); int n = rows; std::vector<Bf16> got(rows * WIDTH); Bf16* gp = got.data();
    rc = run(embed, {&t, &tk, &gp, &n}, (rows + ROWS - 1) / ROWS, ROWS * 32, 1); same = true;
    for (int i = 0; i < rows; i++) same &= !std::memcmp(&got[i * WIDTH], &table[tokens[i] * WIDTH], WIDTH * 2);
    printf("  embed rc %d, %s\n", rc, same ? "right" : "WRONG");
}
