// sample.cu against the same rules in doubles.
#include "ptx.cuh"
#include "../../kernels/sample.cu"
#include "check.h"
#include <cfloat>

const u32 VOCABULARY = 5003;
const int ROWS = 3;

// Rows of a launch: logits, draws, penalties, and a mask that allows odd ids. Rows begin at multiples of 16 floats; what lies between
// them is nonsense.
struct Batch {
    u32 vocabulary = VOCABULARY, stride = (vocabulary + 15) / 16 * 16;
    std::vector<float> logits = std::vector<float>(ROWS * stride, NAN);
    std::vector<Draw> draws;
    std::vector<Penalty> penalties;
    std::vector<u32> wanted;
    std::vector<u32> masks = std::vector<u32>((vocabulary + 31) / 32, 0xaaaaaaaau);

    float* row(size_t row) { return &logits[row * stride]; }
    const float* row(size_t row) const { return &logits[row * stride]; }
};

static void add_row(Batch& batch, int round) {
    std::srand(round);
    auto uniform = [] { return float(std::rand()) / (float(RAND_MAX) + 1.0f) * 0.999999f; };
    float* row = batch.row(batch.draws.size());
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
    std::vector<Drawn> drawn(batch.draws.size());
    values.assign(batch.wanted.size(), NAN);
    check::run(sample, drawn.size(), 1, THREADS, 0, seed, batch.logits.data(), batch.vocabulary, batch.draws.data(),
               batch.penalties.data(), batch.masks.data(), batch.wanted.data(), drawn.data(), values.data(), batch.stride);
    return drawn;
}

// A row's logits after penalties and mask.
static std::vector<float> adjusted(const Batch& batch, int row) {
    const Draw& draw = batch.draws[row];
    std::vector<float> logits(batch.row(row), batch.row(row) + batch.vocabulary);
    for (u32 i = 0; i < draw.penalties; i++) {
        const Penalty& p = batch.penalties[draw.first_penalty + i];
        float& x = logits[p.id];
        x = x > 0 ? x / draw.repetition : x * draw.repetition;
        if (p.count > 0) x -= draw.presence + draw.frequency * float(p.count);
    }
    for (u32 id = 0; id < batch.vocabulary; id++)
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
    for (u32 id = 0; id < logits.size(); id++)
        if (logits[id] > -INFINITY) all.push_back({logits[id], id});
    std::sort(all.begin(), all.end(),
              [](Candidate a, Candidate b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; });
    double largest = all[0].weight;
    for (auto& c : all) {
        c.weight = std::exp((c.weight - largest) * draw.inverse_temperature);
        if (c.weight < 0x1p-40) c.weight = 0;
    }
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
    const float* logits = batch.row(row);
    for (u32 id = 0; id < batch.vocabulary; id++) total += std::exp(double(logits[id]));
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
                wrong += values[at] != before.row(row)[before.wanted[at]];
        for (int row = 0; row < ROWS; row++) {
            u32 want = expected(adjusted(before, row), before.draws[row]);
            if (drawn[row].token != want || drawn[row].status != DRAWN) {
                wrong++;
                std::printf("round %d: %u instead of %u, status %u\n", round + row, drawn[row].token, want, drawn[row].status);
                continue;
            }
            const Drawn& d = drawn[row];
            wrong += d.logit != before.row(row)[want];
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
            if (id != 77) batch.row(row)[id] = -INFINITY;
    batch.draws[0].mask = batch.draws[1].mask = NONE;
    std::vector<float> values;
    std::vector<Drawn> drawn = run_batch(batch, 1, values);
    check::expect(drawn[0].status == DRAWN && drawn[0].token == 77 && drawn[1].status == DRAWN && drawn[1].token == 77,
                  "one token alone: %u, %u", drawn[0].token, drawn[1].token);
}

// Rows of one kind.
struct Kind {
    const char* name;
    u32 vocabulary;
    // Of logits: minus infinity is out.
    float (*logit)(u32 id);
    // Allows a token; null: all are.
    bool (*allowed)(u32 id);
    float inverse;
    u32 top_k;
    float top_p, min_p;
};

// Like a model's: few tokens are probable.
static float peaked(u32) {
    float x = 0;
    for (int i = 0; i < 8; i++) x += check::number();
    return x * 4;
}
static float flat(u32) { return check::number() * 0.1f; }
static float equal(u32) { return 1.5f; }
static float zeros(u32 id) { return id % 3 ? 0.0f : -0.0f; }
// Many are equal, in a list and beyond.
static float steps(u32 id) { return std::round(peaked(id) * 2) / 2; }
static float few_steps(u32) { return std::round(check::number()); }
static float sparse(u32 id) { return id % 997 == 5 ? check::number() : -INFINITY; }
static float extreme(u32 id) { return id % 2 ? -FLT_MAX : id % 1000 ? FLT_MIN : 1e-3f * check::number(); }
static bool third(u32 id) { return id % 3 == 1; }
static bool seldom(u32 id) { return id % 2503 == 7; }
static bool but_last(u32 id) { return id < 20000; }
static bool one(u32 id) { return id == 20002; }

const u32 WIDE = 20003;
const Kind KINDS[] = {
    {"greedy", WIDE, peaked, nullptr, 0, 0, 1, 0},
    {"greedy, masked", WIDE, steps, third, 0, 0, 1, 0},
    {"greedy, equal", WIDE, equal, third, 0, 0, 1, 0},
    {"greedy, zeros", WIDE, zeros, nullptr, 0, 0, 1, 0},
    {"temperature", WIDE, peaked, nullptr, 1.25f, 0, 1, 0},
    {"temperature, flat", WIDE, flat, but_last, 1, 0, 1, 0},
    {"temperature, one token", WIDE, peaked, one, 1, 0, 1, 0},
    {"top-k", WIDE, peaked, nullptr, 1, 50, 1, 0},
    {"top-k of one", WIDE, steps, but_last, 1, 1, 1, 0},
    {"top-k and top-p", WIDE, peaked, nullptr, 0.5f, 600, 0.95f, 0},
    {"all", WIDE, peaked, third, 1, 50, 0.9f, 0.02f},
    {"top-k, ties", WIDE, steps, nullptr, 0.25f, 77, 1, 0},
    {"top-k, ties and top-p", WIDE, steps, nullptr, 0.25f, 77, 0.8f, 0},
    {"top-k, zeros", WIDE, zeros, nullptr, 1, 77, 0.5f, 0},
    {"top-k, more ties than a list takes", WIDE, few_steps, nullptr, 1, 500, 0.9f, 0},
    {"top-k of equal ones", WIDE, equal, third, 1, 100, 1, 0},
    {"top-k, larger than a list", WIDE, peaked, nullptr, 0.1f, 9000, 0.9f, 0},
    {"top-k, larger than the mask's", WIDE, peaked, seldom, 0.2f, 50, 0.9f, 0},
    {"top-k, larger than what is not out", WIDE, sparse, nullptr, 1, 50, 0.9f, 0},
    {"top-k, larger than a third", WIDE, peaked, third, 0.1f, 9000, 0.9f, 0},
    {"top-p", WIDE, peaked, nullptr, 1, 0, 0.9f, 0},
    {"top-p, masked", WIDE, peaked, third, 1, 0, 0.9f, 0},
    {"top-p, few", WIDE, peaked, seldom, 0.1f, 0, 0.9f, 0},
    {"top-p, tiny", WIDE, peaked, nullptr, 1, 0, 1e-6f, 0},
    {"top-p of nearly all", WIDE, peaked, nullptr, 1, 0, 1 - 1e-6f, 0},
    {"top-p, ties", WIDE, steps, nullptr, 0.5f, 0, 0.6f, 0},
    {"top-p, flat", WIDE, flat, nullptr, 1, 0, 0.9f, 0},
    {"top-p, nearly all of flat", WIDE, flat, nullptr, 1, 0, 1 - 1e-6f, 0},
    {"top-p, tiny, flat", WIDE, flat, nullptr, 1, 0, 1e-3f, 0},
    {"top-p, equal", WIDE, equal, nullptr, 1, 0, 0.3f, 0},
    {"top-p and min-p, flat", WIDE, flat, third, 1, 0, 0.9f, 0.93f},
    {"min-p", WIDE, peaked, nullptr, 1, 0, 1, 0.05f},
    {"min-p, tiny", WIDE, peaked, nullptr, 0.2f, 0, 1, 1e-3f},
    {"min-p before top-p", WIDE, peaked, nullptr, 0.2f, 0, 0.99f, 0.1f},
    {"hot", WIDE, peaked, nullptr, 1e-30f, 0, 0.7f, 0},
    {"cold", WIDE, peaked, nullptr, 1e4f, 40, 0.7f, 0},
    {"next to greedy", WIDE, steps, nullptr, FLT_MAX, 0, 0.7f, 0},
    {"extreme", WIDE, extreme, nullptr, 1, 0, 0.7f, 0},
    {"one token", 1, peaked, nullptr, 1, 0, 1, 0},
    {"one token, greedy", 1, peaked, nullptr, 0, 0, 1, 0},
    {"one token, all", 1, peaked, nullptr, 1, 5, 0.5f, 0.5f},
    {"three tokens", 3, peaked, nullptr, 0.1f, 2, 0.9f, 0.01f},
    {"33 tokens", 33, peaked, nullptr, 0.1f, 0, 0.9f, 0},
    {"130 tokens", 130, flat, third, 1, 40, 0.9f, 0},
    {"4097 tokens", 4097, peaked, nullptr, 0.3f, 0, 0.95f, 0},
};

// Gives a row penalties: of its largest logit, and of some others.
static void penalise(Batch& batch, int at) {
    const float* row = batch.row(at);
    Draw& draw = batch.draws[at];
    u32 largest = u32(std::max_element(row, row + batch.vocabulary) - row);
    draw.repetition = 1.3f;
    draw.presence = 0.4f;
    draw.frequency = 0.1f;
    draw.first_penalty = u32(batch.penalties.size());
    batch.penalties.push_back({largest, 2, 0});
    for (u32 id = 0; id < batch.vocabulary && id < 4000; id += 97)
        if (id != largest) batch.penalties.push_back({id, id % 3, 0});
    draw.penalties = u32(batch.penalties.size()) - draw.first_penalty;
}

static void check_kinds() {
    int wrong = 0, seed = 100;
    check::Worst worst;
    for (const Kind& kind : KINDS) {
        std::srand(++seed);
        Batch batch{kind.vocabulary};
        std::fill(batch.masks.begin(), batch.masks.end(), 0);
        Draw draw{};
        draw.inverse_temperature = kind.inverse;
        draw.top_k = kind.top_k;
        draw.top_p = kind.top_p;
        draw.min_p = kind.min_p;
        draw.mask = kind.allowed ? 0 : NONE;
        for (u32 id = 0; id < kind.vocabulary; id++)
            if (kind.allowed && kind.allowed(id)) batch.masks[id / 32] |= 1u << id % 32;
        for (int row = 0; row < ROWS; row++) {
            for (u32 id = 0; id < kind.vocabulary; id++) batch.row(row)[id] = kind.logit(id);
            // The first token, one that is in between, and one of the last.
            double share = std::fabs(check::number());
            draw.uniform = row == 0 ? 0 : row == 1 ? share * 0.99 : 0.99 + share * 0.0099;
            batch.draws.push_back(draw);
            if (row == 1) penalise(batch, row);
        }
        const Batch before = batch;
        std::vector<float> values;
        std::vector<Drawn> drawn = run_batch(batch, seed, values);
        for (int row = 0; row < ROWS; row++) {
            u32 want = expected(adjusted(before, row), before.draws[row]);
            const Drawn& d = drawn[row];
            if (d.token != want || d.status != DRAWN || d.logit != before.row(row)[want]) {
                wrong++;
                std::printf("%s: %u instead of %u, status %u\n", kind.name, d.token, want, d.status);
                continue;
            }
            worst.add(d.logit - d.largest - std::log(double(d.total)) - log_probability(before, row, want), 1e-5);
        }
    }
    check::expect(wrong == 0 && worst.fine(), "kinds of rows: %d tokens differ, log probabilities %.2f of the error allowed", wrong,
                  worst.part);
}

int main() {
    check_draws();
    check_kinds();
    check_infinities();
    check_statuses();
    return check::verdict();
}
