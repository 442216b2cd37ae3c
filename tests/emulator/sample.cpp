// sample.cu against the same rules in doubles.
#include "ptx.cuh"
#include "../../kernels/sample.cu"
#include "check.h"

const u32 VOCABULARY = 5003, STRIDE = 5008;
const int ROWS = 2;

// Rows of a launch: logits, draws, penalties, and a mask that allows odd ids.
struct Batch {
    std::vector<float> logits = std::vector<float>(ROWS * STRIDE, NAN);
    std::vector<Draw> draws;
    std::vector<Penalty> penalties;
    std::vector<u32> wanted;
    std::vector<u32> masks = std::vector<u32>((VOCABULARY + 31) / 32, 0xaaaaaaaau);
};

static void add_row(Batch& batch, int round) {
    std::srand(round);
    auto uniform = [] { return float(std::rand()) / (float(RAND_MAX) + 1.0f) * 0.999999f; };
    float* row = &batch.logits[batch.draws.size() * STRIDE];
    for (u32 id = 0; id < VOCABULARY; id++) {
        row[id] = (uniform() - 0.5f) * (round % 3 == 0 ? 4 : 20);
        // Ties.
        if (round % 5 == 0) row[id] = std::round(row[id]);
    }
    Draw draw{};
    draw.inverse_temperature = round % 7 == 0 ? 0 : 1.0f / (0.5f + float(round % 4) * 0.4f);
    draw.top_k = round % 2 ? 0 : 1 + u32(std::rand()) % 300;
    draw.top_p = round % 3 == 1 ? 1 : 0.3f + 0.6f * uniform();
    draw.min_p = round % 4 == 2 ? 0.05f : 0;
    draw.repetition = 1.3f;
    draw.presence = 0.4f;
    draw.frequency = 0.1f;
    draw.uniform = uniform();
    draw.mask = round % 6 == 1 ? 0 : NONE;
    draw.first_penalty = u32(batch.penalties.size());
    draw.penalties = round % 2 ? 40 : 0;
    for (u32 i = 0; i < draw.penalties; i++) batch.penalties.push_back({i * 97, i % 3, 0});
    draw.first_wanted = u32(batch.wanted.size());
    draw.wanted = round % 3 ? 0 : 1030;
    for (u32 i = 0; i < draw.wanted; i++) batch.wanted.push_back((i * 97 + round) % VOCABULARY);
    batch.draws.push_back(draw);
}

static std::vector<Drawn> run_batch(Batch& batch, unsigned seed, std::vector<float>& values) {
    std::vector<Drawn> drawn(ROWS);
    values.assign(batch.wanted.size(), NAN);
    check::run(sample, ROWS, 1, THREADS, 0, seed, batch.logits.data(), VOCABULARY, batch.draws.data(), batch.penalties.data(),
               batch.masks.data(), batch.wanted.data(), drawn.data(), values.data(), STRIDE);
    return drawn;
}

// A row's logits after penalties and mask.
static std::vector<float> adjusted(const Batch& batch, int row) {
    const Draw& draw = batch.draws[row];
    std::vector<float> logits(&batch.logits[row * STRIDE], &batch.logits[row * STRIDE] + VOCABULARY);
    for (u32 i = 0; i < draw.penalties; i++) {
        const Penalty& p = batch.penalties[draw.first_penalty + i];
        float& x = logits[p.id];
        x = x > 0 ? x / draw.repetition : x * draw.repetition;
        if (p.count > 0) x -= draw.presence + draw.frequency * float(p.count);
    }
    for (u32 id = 0; id < VOCABULARY; id++)
        if (draw.mask != NONE && !(batch.masks[draw.mask + id / 32] >> id % 32 & 1)) logits[id] = -INFINITY;
    return logits;
}

struct Candidate {
    double weight;
    u32 id;
};

// What top-k, top-p and min-p leave, by id.
static std::vector<Candidate> kept(const std::vector<float>& logits, const Draw& draw) {
    std::vector<Candidate> all;
    for (u32 id = 0; id < VOCABULARY; id++)
        if (logits[id] > -INFINITY) all.push_back({logits[id], id});
    std::sort(all.begin(), all.end(),
              [](Candidate a, Candidate b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; });
    double largest = all[0].weight;
    for (auto& c : all) c.weight = std::exp((c.weight - largest) * draw.inverse_temperature);
    if (draw.top_k > 0 && all.size() > draw.top_k) all.resize(draw.top_k);
    if (draw.top_p < 1) {
        double total = 0, sum = 0;
        for (const auto& c : all) total += c.weight;
        size_t count = 0;
        while (count < all.size() && sum < draw.top_p * total) sum += all[count++].weight;
        all.resize(std::max<size_t>(count, 1));
    }
    if (draw.min_p > 0)
        while (all.back().weight < draw.min_p) all.pop_back();
    std::sort(all.begin(), all.end(), [](Candidate a, Candidate b) { return a.id < b.id; });
    return all;
}

static u32 expected(const std::vector<float>& logits, const Draw& draw) {
    if (draw.inverse_temperature == 0) return u32(std::max_element(logits.begin(), logits.end()) - logits.begin());
    std::vector<Candidate> all = kept(logits, draw);
    double total = 0, sum = 0;
    for (const auto& c : all) total += c.weight;
    for (const auto& c : all) {
        sum += c.weight;
        if (sum > draw.uniform * total) return c.id;
    }
    return all.back().id;
}

static double log_probability(const Batch& batch, int row, u32 token) {
    double total = 0;
    const float* logits = &batch.logits[row * STRIDE];
    for (u32 id = 0; id < VOCABULARY; id++) total += std::exp(double(logits[id]));
    return logits[token] - std::log(total);
}

// No number drawn here lies so close to where one token ends that F32 would draw the next. Log probabilities are off by three
// roundings of 2^-24 of numbers up to 20, and what 5003 / 1024 + 42 additions make of their sum: less than 1e-5.
static void check_draws() {
    int wrong = 0;
    check::Worst worst;
    for (int round = 0; round < 60; round += ROWS) {
        Batch batch;
        for (int row = 0; row < ROWS; row++) add_row(batch, round + row);
        const Batch before = batch;
        std::vector<float> values;
        std::vector<Drawn> drawn = run_batch(batch, round, values);
        for (int row = 0; row < ROWS; row++)
            for (u32 i = 0, at = before.draws[row].first_wanted; i < before.draws[row].wanted; i++, at++)
                wrong += values[at] != before.logits[row * STRIDE + before.wanted[at]];
        for (int row = 0; row < ROWS; row++) {
            u32 want = expected(adjusted(before, row), before.draws[row]);
            if (drawn[row].token != want || drawn[row].status != DRAWN) {
                wrong++;
                std::printf("round %d: %u instead of %u, status %u\n", round + row, drawn[row].token, want, drawn[row].status);
                continue;
            }
            const Drawn& d = drawn[row];
            wrong += d.logit != before.logits[row * STRIDE + want];
            worst.add(d.logit - d.largest - std::log(double(d.total)) - log_probability(before, row, want), 1e-5);
        }
    }
    check::expect(wrong == 0 && worst.fine(), "sample: %d of 60 tokens differ, log probabilities %.2f of the error allowed", wrong,
                  worst.part);
}

static void check_statuses() {
    Batch batch;
    add_row(batch, 2);
    add_row(batch, 7);
    batch.logits[VOCABULARY - 1] = NAN;
    std::fill(batch.masks.begin(), batch.masks.end(), 0);
    std::vector<float> values;
    std::vector<Drawn> drawn = run_batch(batch, 1, values);
    check::expect(drawn[0].status == NOT_FINITE && drawn[1].status == NOTHING_ALLOWED, "statuses: %u, %u", drawn[0].status,
                  drawn[1].status);
}

// What is out from the start is minus infinity, and never drawn.
static void check_infinities() {
    Batch batch;
    add_row(batch, 3);
    add_row(batch, 14);
    for (int row = 0; row < ROWS; row++)
        for (u32 id = 0; id < VOCABULARY; id++)
            if (id != 77) batch.logits[row * STRIDE + id] = -INFINITY;
    batch.draws[0].mask = batch.draws[1].mask = NONE;
    std::vector<float> values;
    std::vector<Drawn> drawn = run_batch(batch, 1, values);
    check::expect(drawn[0].status == DRAWN && drawn[0].token == 77 && drawn[1].status == DRAWN && drawn[1].token == 77,
                  "one token alone: %u, %u", drawn[0].token, drawn[1].token);
}

int main() {
    check_draws();
    check_infinities();
    check_statuses();
    return check::verdict();
}
