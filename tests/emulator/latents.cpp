// head_linear.cu and latent_store.cu: what latent attention makes of queries and latents, against sums in doubles. HEADS, RANK, PLAIN_DIM,
// ROPE_DIM, as in latent_store.cu; VALUES: numbers of a head's value.
#include "ptx.cuh"
#include "types.cuh"
#define BLOCK 64
#define BLOCK_BYTES (3 * BLOCK * (RANK + ROPE_DIM) * 2)
namespace storing {
#include "../../kernels/latent_store.cu"
}
#include "../../kernels/head_linear.cu"
#include "check.h"

const int QUERY = PLAIN_DIM + ROPE_DIM, HALF_DIM = ROPE_DIM / 2;
const int POSITIONS = 200;
const float EPS = 1e-2f;

static Bf16* random_numbers(size_t count) {
    Bf16* all = check::guarded<Bf16>(count);
    for (size_t i = 0; i < count; i++) all[i] = to_bf16(check::number());
    return all;
}

// Each head's `width` numbers times its matrix, into rows of `y_row` numbers; the others stay as they are.
static void check_products(int rows, int columns, int width, int x_row, int x_head, int y_row, int y_head) {
    const Bf16 *x = random_numbers(size_t(rows - 1) * x_row + (HEADS - 1) * x_head + width), *w = random_numbers(size_t(HEADS) * columns * width);
    size_t size = size_t(rows) * y_row;
    Bf16* y = check::guarded<Bf16>(size);
    const u16 UNWRITTEN = 0x7fff;
    for (size_t i = 0; i < size; i++) y[i].bits = UNWRITTEN;
    check::run(head_linear, (rows + TILE_ROWS - 1) / TILE_ROWS, HEADS * ((columns + TILE_COLUMNS - 1) / TILE_COLUMNS), THREADS, TILE_SHARED_BYTES, 1,
               (const u8*)x, (const u8*)w, y, rows, columns, width * 2, x_row * 2, x_head * 2, y_row, y_head);
    check::Worst worst;
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < HEADS; head++)
            for (int n = 0; n < columns; n++) {
                double sum = 0, magnitude = 0;
                for (int k = 0; k < width; k++) {
                    double product = double(widen(x[size_t(row) * x_row + head * x_head + k])) * widen(w[(size_t(head) * columns + n) * width + k]);
                    sum += product;
                    magnitude += std::fabs(product);
                }
                Bf16& at = y[size_t(row) * y_row + head * y_head + n];
                worst.add(widen(at) - sum, std::fabs(sum) / 256 + magnitude * width * 0x1p-24);
                at.bits = UNWRITTEN;
            }
    size_t others = 0;
    for (size_t i = 0; i < size; i++) others += y[i].bits != UNWRITTEN;
    check::expect(worst.fine() && others == 0, "%d rows of %d heads, %d to %d: %.2f of the error allowed, %d others written", rows, HEADS, width, columns,
                  worst.part, int(others));
}

// The rotation of ROPE_DIM numbers, and how far off BF16 may be.
static void check_rotated(const Bf16* from, const float* rotation, const Bf16* to, check::Worst& worst) {
    for (int d = 0; d < HALF_DIM; d++) {
        double a = widen(from[d]), b = widen(from[HALF_DIM + d]), cos = rotation[d], sin = rotation[HALF_DIM + d];
        double want[2] = {a * cos - b * sin, b * cos + a * sin};
        for (int half = 0; half < 2; half++)
            worst.add(widen(to[half * HALF_DIM + d]) - want[half], std::fabs(want[half]) / 256 + (std::fabs(a) + std::fabs(b)) * 0x1p-22);
    }
}

static void check_store(int tokens) {
    const Bf16 *queries = random_numbers(size_t(tokens) * HEADS * QUERY), *latents = random_numbers(size_t(tokens) * KEPT);
    std::vector<Bf16> qkv(size_t(tokens) * HEADS * KEPT, to_bf16(7));
    std::vector<float> rotations, norm;
    for (int p = 0; p < POSITIONS; p++)
        for (int d = 0; d < ROPE_DIM; d++) rotations.push_back(d < HALF_DIM ? std::cos(p * 0.1f * (d + 1)) : std::sin(p * 0.1f * (d - HALF_DIM + 1)));
    for (int d = 0; d < RANK; d++) norm.push_back(1 + check::number() / 2);
    // Two blocks, of which a layer has the second third.
    std::vector<u8> pool(2 * BLOCK_BYTES, 0x55);
    const size_t layer = BLOCK_BYTES / 3;
    std::vector<u32> positions, slots;
    for (int token = 0; token < tokens; token++) {
        positions.push_back(u32(token * 37 % POSITIONS));
        slots.push_back(u32(token * 29 % (2 * BLOCK)));
    }
    check::run(storing::latent_store, tokens, HEADS / 4 + 1, 128, 0, 3, queries, latents, qkv.data(), rotations.data(), positions.data(), slots.data(),
               norm.data(), EPS, pool.data() + layer);
    check::Worst rotated, normalised;
    size_t others = 0;
    for (int token = 0; token < tokens; token++) {
        const float* rotation = &rotations[positions[token] * ROPE_DIM];
        for (int head = 0; head < HEADS; head++) {
            size_t row = size_t(token) * HEADS + head;
            check_rotated(queries + row * QUERY + PLAIN_DIM, rotation, &qkv[row * KEPT + RANK], rotated);
            for (int d = 0; d < RANK; d++) others += widen(qkv[row * KEPT + d]) != 7;
        }
        const Bf16* latent = latents + size_t(token) * KEPT;
        Bf16* key = (Bf16*)&pool[slots[token] / BLOCK * BLOCK_BYTES + layer] + slots[token] % BLOCK * KEPT;
        check_rotated(latent + RANK, rotation, key + RANK, rotated);
        double squares = 0;
        for (int d = 0; d < RANK; d++) squares += double(widen(latent[d])) * widen(latent[d]);
        for (int d = 0; d < RANK; d++) {
            double want = widen(latent[d]) / std::sqrt(squares / RANK + EPS) * norm[d];
            normalised.add(widen(key[d]) - want, std::fabs(want) * (1.0 / 256 + 1e-5));
        }
        std::memset((void*)key, 0x55, KEPT * 2);
    }
    for (u8 byte : pool) others += byte != 0x55;
    check::expect(rotated.fine() && normalised.fine() && others == 0, "latent_store of %d tokens: %.2f and %.2f of the error allowed, %d others written", tokens,
                  rotated.part, normalised.part, int(others));
}

int main() {
    for (int rows : {1, 130}) {
        check_products(rows, RANK, PLAIN_DIM, HEADS * QUERY, QUERY, HEADS * KEPT, KEPT);
        check_products(rows, VALUES, RANK, HEADS * RANK, RANK, HEADS * VALUES, VALUES);
    }
    check_store(1);
    check_store(90);
    return check::verdict();
}
