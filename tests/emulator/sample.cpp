#include "ptx.cuh"
#include "../../kernels/sample.cu"
#include <algorithm>
#include <chrono>
namespace emulator { int launch(void (*)(void*), void*, const unsigned*, const unsigned*, size_t, unsigned); }

// The rules in doubles: the token drawn, or all that rounding may make of it.
struct Want { int token; };
static std::vector<std::pair<double,int>> kept_of(const std::vector<float>& row, const Draw& d) {
    std::vector<std::pair<double,int>> all;
    for (size_t i = 0; i < row.size(); i++) if (row[i] > -INFINITY) all.push_back({row[i], (int)i});
    std::sort(all.begin(), all.end(), [](auto a, auto b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
    double top = all[0].first;
    for (auto& x : all) x.first = std::exp((x.first - top) * d.inverse_temperature);
    if (d.top_k > 0 && all.size() > d.top_k) all.resize(d.top_k);
    if (d.top_p < 1) { double total = 0, sum = 0; for (auto& x : all) total += x.first; size_t n = 0; while (n < all.size() && sum < d.top_p * total) sum += all[n++].first; all.resize(std::max<size_t>(n, 1)); }
    if (d.min_p > 0) while (all.back().first < d.min_p) all.pop_back();
    return all;
}
int main() {
    const u32 vocabulary = 5003; int bad = 0, rows = 0; double worst = 0;
    auto t = std::chrono::steady_clock::now();
    for (int round = 0; round < 60; round++) {
        srand(round);
        std::vector<float> logits(vocabulary);
        for (auto& x : logits) x = (rand() / (float)RAND_MAX - 0.5f) * (round % 3 == 0 ? 4 : 20);
        if (round % 5 == 0) for (auto& x : logits) x = std::round(x);  // ties
        Draw d{}; d.inverse_temperature = round % 7 == 0 ? 0 : 1.0f / (0.5f + (round % 4) * 0.4f); d.top_k = round % 2 ? 0 : 1 + rand() % 300; d.top_p = round % 3 == 1 ? 1 : 0.3f + 0.6f * rand() / RAND_MAX; d.min_p = round % 4 == 2 ? 0.05f : 0;
        d.repetition = 1.3f; d.presence = 0.4f; d.frequency = 0.1f; d.uniform = rand() / (RAND_MAX + 1.0f); d.mask = round % 6 == 1 ? 0 : NONE;
        std::vector<Penalty> penalties; if (round % 2) for (u32 i = 0; i < 40; i++) penalties.push_back({i * 97, i % 3, 0}); d.penalties = penalties.size();
        std::vector<u32> masks((vocabulary + 31) / 32, 0xaaaaaaaau);
        auto want = logits;
        for (auto& p : penalties) { float& x = want[p.id]; x = x > 0 ? x / d.repetition : x * d.repetition; if (p.count) x -= d.presence + d.frequency * p.count; }
        if (d.mask != NONE) for (u32 i = 0; i < vocabulary; i += 2) want[i] = -INFINITY;
        double raw = 0; for (auto x : logits) raw += std::exp((double)x);
        auto raws = logits;
        Drawn drawn{}; float* l = logits.data(); u32 v = vocabulary; const Draw* dp = &d; Penalty* pp = penalties.data(); const u32* mp = masks.data(); Drawn* op = &drawn;
        void* args[] = {&l, &v, &dp, &pp, &mp, &op}; struct C { void** a; } c{args}; unsigned g[] = {1, 1, 1}, b[] = {THREADS, 1, 1};
        if (emulator::launch([](void* p) { emulator::call(sample, ((C*)p)->a); }, &c, g, b, 0, round)) return 1;
        int token = -1;
        if (d.inverse_temperature == 0) token = std::max_element(want.begin(), want.end()) - want.begin();
        else { auto kept = kept_of(want, d); std::sort(kept.begin(), kept.end(), [](auto a, auto b) { return a.second < b.second; }); double total = 0, sum = 0; for (auto& x : kept) total += x.first; for (auto& x : kept) { sum += x.first; if (sum > d.uniform * total) { token = x.second; break; } } }
        rows++; if (drawn.token != (u32)token || drawn.status != 0) { bad++; printf("round %d: %u not %d, status %u, k %u p %g m %g T %g\n", round, drawn.token, token, drawn.status, d.top_k, d.top_p, d.min_p, d.inverse_temperature); }
        worst = std::max(worst, std::fabs(drawn.log_probability - (raws[drawn.token] - std::log(raw))));
    }
    printf("%d of %d rows differ, log probabilities by at most %g, %.0f ms\n", bad, rows, worst, std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count() * 1e3);
}
