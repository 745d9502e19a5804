// Causal attention in float32 for CPUs with AVX2 and FMA: blocks of 64 queries x 64 keys, as FlashAttention-2 has them
// (arXiv 2307.08691).
//
// Scores are computed transposed, so that a vector holds 8 queries of one key: maximum, sum and log-sum-exp of a query
// stay in its lane. Every product has one form, `product` below: each number of the left side is broadcast to all lanes
// and multiplies a row of the right. Sides are copied once, without gaps and padded with zeros to whole blocks:
//     rows   [S][N]            a head as it is
//     lanes  [S / 64][N][64]   of each 64 rows, a column of all of them
// The order of all additions follows from the shape alone, so results do not depend on the number of threads.

#include "cpu_kernel.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace {

using Vector = __m256;

constexpr int64_t LANES = 8, VECTORS = BLOCK / LANES, CHUNK = 16;

// Of 2^f for |f| <= 1/2, the highest power first: the least relative error, 1.6e-8 before rounding.
constexpr float POLYNOMIAL[] = {1.5345811e-4f, 1.3399931e-3f, 9.6184891e-3f, 5.5503286e-2f,
                                2.4022646e-1f, 6.9314718e-1f, 1.0f};

// --- vectors --------------------------------------------------------------------------------------------------------

// 2^x with a relative error of one rounding; 0 for x below -126.5.
inline Vector exp2(Vector x) {
    // The factor for -127 is 0, as all bits of its exponent are. Of two operands, one of them NaN, max has the second.
    x = _mm256_max_ps(_mm256_set1_ps(-127.0f), x);
    const Vector whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector f = _mm256_sub_ps(x, whole);
    Vector p = _mm256_set1_ps(POLYNOMIAL[0]);
#pragma GCC unroll 8
    for (int i = 1; i < 7; ++i) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(POLYNOMIAL[i]));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

inline float sum_of(Vector x) {
    alignas(32) float lanes[LANES];
    _mm256_store_ps(lanes, x);
    float sum = 0.0f;
    for (float lane : lanes) sum += lane;
    return sum;
}

inline void transpose(Vector (&rows)[LANES]) {
    Vector other[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        other[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        other[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        rows[i] = _mm256_shuffle_ps(other[i], other[i + 2], 0x44);
        rows[i + 1] = _mm256_shuffle_ps(other[i], other[i + 2], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(other[i + 1], other[i + 3], 0x44);
        rows[i + 3] = _mm256_shuffle_ps(other[i + 1], other[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        other[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
        other[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
    }
    std::copy_n(other, LANES, rows);
}

// --- packing --------------------------------------------------------------------------------------------------------

// The head of one batch row: `length` rows of `width` numbers.
struct Head {
    float* data;
    int64_t row;
};

inline Head head_of(const View& view, int64_t batch, int64_t head) {
    return {static_cast<float*>(view.data) + batch * view.batch + head * view.head, view.row};
}

// The 64 rows from `first`.
void pack_rows(const Head& head, int64_t first, int64_t length, int64_t width, float* to) {
    for (int64_t row = first; row < first + BLOCK; ++row, to += width) {
        if (row < length) {
            std::copy_n(head.data + row * head.row, width, to);
        } else {
            std::fill_n(to, width, 0.0f);
        }
    }
}

// Columns [N][64] of rows [64][N].
void pack_lanes(const float* rows, int64_t width, float* to) {
    for (int64_t lane = 0; lane < BLOCK; lane += LANES) {
        for (int64_t n = 0; n < width; n += LANES) {
            Vector eight[LANES];
            for (int64_t i = 0; i < LANES; ++i) eight[i] = _mm256_loadu_ps(rows + (lane + i) * width + n);
            transpose(eight);
            for (int64_t i = 0; i < LANES; ++i) _mm256_storeu_ps(to + (n + i) * BLOCK + lane, eight[i]);
        }
    }
}

// Rows of a head from columns [N][64], each lane times its factor.
void unpack_lanes(const float* from, const float* factors, int64_t first, int64_t length, int64_t width,
                  const Head& to) {
    for (int64_t lane = 0; lane < std::min(BLOCK, length - first); lane += LANES) {
        const Vector factor = _mm256_loadu_ps(factors + lane);
        const int64_t count = std::min(LANES, length - first - lane);
        for (int64_t n = 0; n < width; n += LANES) {
            Vector eight[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                eight[i] = _mm256_mul_ps(_mm256_loadu_ps(from + (n + i) * BLOCK + lane), factor);
            }
            transpose(eight);
            for (int64_t i = 0; i < count; ++i) {
                _mm256_storeu_ps(to.data + (first + lane + i) * to.row + n, eight[i]);
            }
        }
    }
}

// --- products -------------------------------------------------------------------------------------------------------

// Number (row, k) of the left side stands at data[row * per_row + k * per_k].
struct Left {
    const float* data;
    int64_t per_row, per_k;
};

// R rows x V vectors of `to` (stride: numbers per row) plus, or (FRESH) equal to, the product over k < `inner`.
template <int R, int V, bool FRESH>
inline void tile(const Left& left, const float* right, int64_t per_k, int64_t inner, float* to, int64_t stride) {
    Vector sums[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            sums[r][v] = FRESH ? _mm256_setzero_ps() : _mm256_loadu_ps(to + r * stride + v * LANES);
        }
    }
    for (int64_t k = 0; k < inner; ++k) {
        Vector row[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) row[v] = _mm256_loadu_ps(right + k * per_k + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const Vector number = _mm256_broadcast_ss(left.data + r * left.per_row + k * left.per_k);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) sums[r][v] = _mm256_fmadd_ps(number, row[v], sums[r][v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) _mm256_storeu_ps(to + r * stride + v * LANES, sums[r][v]);
    }
}

template <int V, bool FRESH>
void tiles(Left left, const float* right, int64_t per_k, int64_t inner, float* to, int64_t stride, int64_t rows) {
    for (; rows >= 6; rows -= 6, left.data += 6 * left.per_row, to += 6 * stride) {
        tile<6, V, FRESH>(left, right, per_k, inner, to, stride);
    }
    for (; rows >= 4; rows -= 4, left.data += 4 * left.per_row, to += 4 * stride) {
        tile<4, V, FRESH>(left, right, per_k, inner, to, stride);
    }
    if (rows) tile<2, V, FRESH>(left, right, per_k, inner, to, stride);
}

// The product of an even number of rows and any number of vectors: 12 sums at once are what 16 registers hold.
template <bool FRESH>
void product(const Left& left, const float* right, int64_t per_k, int64_t inner, float* to, int64_t stride,
             int64_t rows, int64_t vectors) {
    for (; vectors >= 2; vectors -= 2, right += 2 * LANES, to += 2 * LANES) {
        tiles<2, FRESH>(left, right, per_k, inner, to, stride, rows);
    }
    if (vectors) tiles<1, FRESH>(left, right, per_k, inner, to, stride, rows);
}

// --- what attends to what -------------------------------------------------------------------------------------------

// Keys [begin, end) of a block, the vectors [from, to) of its queries of which any sees any of them, and whether all
// of these see all.
struct Piece {
    int64_t begin, end, from, to;
    bool all;

    int64_t vectors() const { return to - from; }
};

Piece piece_of(const int32_t* first, int64_t query, int64_t key, int64_t begin, int64_t end, int64_t length) {
    Piece piece{begin, end, 0, std::min(VECTORS, (length - query + LANES - 1) / LANES), false};
    const int64_t lowest = key + begin, highest = key + end - 1;
    while (piece.from < piece.to && lowest > query + piece.from * LANES + LANES - 1) ++piece.from;
    while (piece.to > piece.from && first[query + (piece.to - 1) * LANES] > highest) --piece.to;
    piece.all = highest <= query + piece.from * LANES && first[query + piece.to * LANES - 1] <= lowest;
    return piece;
}

// Runs task(piece) for the pieces of a block: one of 64 keys where all queries see all of them, else those of 16 keys
// that any query sees.
template <class Task>
void by_pieces(const int32_t* first, int64_t query, int64_t key, int64_t length, const Task& task) {
    const Piece whole = piece_of(first, query, key, 0, BLOCK, length);
    if (whole.all && whole.from == 0) return task(whole);
    for (int64_t begin = 0; begin < BLOCK; begin += CHUNK) {
        const Piece piece = piece_of(first, query, key, begin, begin + CHUNK, length);
        if (piece.vectors() > 0) task(piece);
    }
}

// All bits of the lanes of the 8 queries from `query` that see a key.
inline Vector sees(const int32_t* first, int64_t query, int64_t key) {
    const __m256i counted = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), keys = _mm256_set1_epi32(static_cast<int>(key));
    const __m256i rows = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(query)), counted);
    const __m256i begins = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + query));
    const __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(keys, rows), _mm256_cmpgt_epi32(begins, keys));
    return _mm256_castsi256_ps(_mm256_xor_si256(hidden, _mm256_set1_epi32(-1)));
}

// --- forward --------------------------------------------------------------------------------------------------------

// What one worker computes 64 queries in.
struct Queries {
    float *rows, *lanes;             // [64][N], [N][64]
    float *scores, *sums;            // [64 keys][64], which become weights; output [N][64] before division
    float *totals, *maxima;          // denominators [64]; maxima [64] in units of log 2

    Queries(Parts& parts, int64_t width)
        : rows(parts.take<float>(BLOCK * width)),
          lanes(parts.take<float>(BLOCK * width)),
          scores(parts.take<float>(BLOCK * BLOCK)),
          sums(parts.take<float>(BLOCK * width)),
          totals(parts.take<float>(BLOCK)),
          maxima(parts.take<float>(BLOCK)) {}
};

// Raises the maxima of 8 queries to that of their scores with a piece's keys.
void raise_maximum(const Queries& queries, const Piece& piece, const int32_t* first, int64_t query, int64_t key,
                   int64_t vector, float factor, int64_t width) {
    const Vector none = _mm256_set1_ps(NONE);
    Vector highest = none;
    for (int64_t j = piece.begin; j < piece.end; ++j) {
        Vector score = _mm256_loadu_ps(queries.scores + j * BLOCK + vector * LANES);
        if (!piece.all) score = _mm256_blendv_ps(none, score, sees(first, query + vector * LANES, key + j));
        highest = _mm256_max_ps(score, highest);
    }
    float* const maxima = queries.maxima + vector * LANES;
    const Vector before = _mm256_loadu_ps(maxima);
    const Vector after = _mm256_max_ps(before, _mm256_mul_ps(highest, _mm256_set1_ps(factor)));
    if (!_mm256_movemask_ps(_mm256_cmp_ps(after, before, _CMP_GT_OQ))) return;
    const Vector shrink = exp2(_mm256_sub_ps(before, after));
    _mm256_storeu_ps(maxima, after);
    float* const total = queries.totals + vector * LANES;
    _mm256_storeu_ps(total, _mm256_mul_ps(_mm256_loadu_ps(total), shrink));
    for (float* sum = queries.sums + vector * LANES; sum < queries.sums + width * BLOCK; sum += BLOCK) {
        _mm256_storeu_ps(sum, _mm256_mul_ps(_mm256_loadu_ps(sum), shrink));
    }
}

// Turns the scores of 8 queries with a piece's keys into weights, and adds those up.
void weigh(const Queries& queries, const Piece& piece, const int32_t* first, int64_t query, int64_t key,
           int64_t vector, float factor) {
    const Vector factors = _mm256_set1_ps(factor), maximum = _mm256_loadu_ps(queries.maxima + vector * LANES);
    Vector total = _mm256_loadu_ps(queries.totals + vector * LANES);
    for (int64_t j = piece.begin; j < piece.end; ++j) {
        float* const score = queries.scores + j * BLOCK + vector * LANES;
        Vector weight = exp2(_mm256_fmsub_ps(_mm256_loadu_ps(score), factors, maximum));
        if (!piece.all) weight = _mm256_and_ps(weight, sees(first, query + vector * LANES, key + j));
        _mm256_storeu_ps(score, weight);
        total = _mm256_add_ps(total, weight);
    }
    _mm256_storeu_ps(queries.totals + vector * LANES, total);
}

// 64 queries with 64 keys, of which the packed rows of keys and values are given.
void attend(const Queries& queries, const float* keys, const float* values, const int32_t* first, int64_t query,
            int64_t key, const Problem& problem) {
    const int64_t width = problem.width;
    const float factor = problem.scale * LOG2E;
    by_pieces(first, query, key, problem.length, [&](const Piece& piece) {
        const int64_t lane = piece.from * LANES, count = piece.end - piece.begin;
        float* const scores = queries.scores + piece.begin * BLOCK + lane;
        product<true>({keys + piece.begin * width, width, 1}, queries.lanes + lane, BLOCK, width, scores, BLOCK, count,
                      piece.vectors());
        for (int64_t vector = piece.from; vector < piece.to; ++vector) {
            raise_maximum(queries, piece, first, query, key, vector, factor, width);
            weigh(queries, piece, first, query, key, vector, factor);
        }
        product<false>({values + piece.begin * width, 1, width}, scores, BLOCK, count, queries.sums + lane, BLOCK,
                       width, piece.vectors());
    });
}

// The output of 64 queries of a head, and their log-sum-exp.
void forward_block(const Problem& problem, const Queries& queries, const float* keys, const float* values,
                   const int32_t* first, int64_t b, int64_t h, int64_t query) {
    const int64_t width = problem.width, length = problem.length;
    pack_rows(head_of(problem.q, b, h), query, length, width, queries.rows);
    pack_lanes(queries.rows, width, queries.lanes);
    std::fill_n(queries.sums, width * BLOCK, 0.0f);
    std::fill_n(queries.totals, BLOCK, 0.0f);
    std::fill_n(queries.maxima, BLOCK, NONE);
    for (int64_t key = first[query] / BLOCK * BLOCK; key <= query; key += BLOCK) {
        attend(queries, keys + key * width, values + key * width, first, query, key, problem);
    }
    float* const lse = problem.lse + (b * problem.heads + h) * length;
    float shares[BLOCK];
    for (int64_t i = 0; i < BLOCK; ++i) {
        shares[i] = 1.0f / queries.totals[i];
        if (query + i < length) lse[query + i] = (queries.maxima[i] + std::log2(queries.totals[i])) * LN2;
    }
    unpack_lanes(queries.sums, shares, query, length, width, head_of(problem.out, b, h));
}

// The sizes of a problem in whole blocks.
struct Sizes {
    const int64_t blocks, padded, numbers, group, heads, kv_heads;  // numbers of a padded head; heads of the batch

    explicit Sizes(const Problem& problem)
        : blocks((problem.length + BLOCK - 1) / BLOCK),
          padded(blocks * BLOCK),
          numbers(padded * problem.width),
          group(problem.heads / problem.kv_heads),
          heads(problem.batch * problem.heads),
          kv_heads(problem.batch * problem.kv_heads) {}
};

// Each block of queries by any worker, after all keys and values have been packed.
void forward(const Problem& problem) {
    const Sizes sizes(problem);
    const int64_t width = problem.width;
    const std::vector<int32_t> first = first_keys(problem, sizes.padded);
    const Memory packed = allocate(2 * sizes.kv_heads * sizes.numbers * sizeof(float));
    float* const keys = reinterpret_cast<float*>(packed.get());
    float* const values = keys + sizes.kv_heads * sizes.numbers;
    run(problem, sizes.kv_heads * sizes.blocks, [&](int64_t index, int64_t) {
        const int64_t head = index / sizes.blocks, row = index % sizes.blocks * BLOCK;
        const int64_t b = head / problem.kv_heads, k = head % problem.kv_heads, at = head * sizes.numbers + row * width;
        pack_rows(head_of(problem.k, b, k), row, problem.length, width, keys + at);
        pack_rows(head_of(problem.v, b, k), row, problem.length, width, values + at);
    });
    Parts counted{nullptr};
    Queries(counted, width);
    const Memory scratch = allocate(problem.threads * counted.used);
    run(problem, sizes.heads * sizes.blocks, [&](int64_t index, int64_t worker) {
        const int64_t head = index / sizes.blocks, at = head / sizes.group * sizes.numbers;
        const int64_t b = head / problem.heads, block = sizes.blocks - 1 - index % sizes.blocks;  // the longest first
        Parts parts{scratch.get() + worker * counted.used};
        const Queries queries(parts, width);
        forward_block(problem, queries, keys + at, values + at, first.data() + b * sizes.padded, b,
                      head % problem.heads, block * BLOCK);
    });
}

// --- backward -------------------------------------------------------------------------------------------------------

// What one worker computes the gradients of a head of queries in.
struct Gradients {
    float *keys, *values;                        // rows
    float *queries, *grads;                      // rows
    float *query_lanes, *grad_lanes;             // lanes
    float *lse, *delta;                          // [S]: log2-sum-exp2; products of output and its gradient
    float *dq, *dk, *dv;                         // rows
    float *weights, *changes;                    // [64 keys][64]: of a block, and the gradients of its scores

    Gradients(Parts& parts, const Sizes& sizes)
        : keys(parts.take<float>(sizes.numbers)),
          values(parts.take<float>(sizes.numbers)),
          queries(parts.take<float>(sizes.numbers)),
          grads(parts.take<float>(sizes.numbers)),
          query_lanes(parts.take<float>(sizes.numbers)),
          grad_lanes(parts.take<float>(sizes.numbers)),
          lse(parts.take<float>(sizes.padded)),
          delta(parts.take<float>(sizes.padded)),
          dq(parts.take<float>(sizes.numbers)),
          dk(parts.take<float>(sizes.numbers)),
          dv(parts.take<float>(sizes.numbers)),
          weights(parts.take<float>(BLOCK * BLOCK)),
          changes(parts.take<float>(BLOCK * BLOCK)) {}

    void pack(const Problem& problem, const Sizes& sizes, int64_t b, int64_t h) const {
        const int64_t width = problem.width, length = problem.length, k = h / sizes.group;
        const Head out = head_of(problem.out, b, h);
        for (int64_t row = 0; row < sizes.padded; row += BLOCK) {
            const int64_t at = row * width;
            pack_rows(head_of(problem.k, b, k), row, length, width, keys + at);
            pack_rows(head_of(problem.v, b, k), row, length, width, values + at);
            pack_rows(head_of(problem.q, b, h), row, length, width, queries + at);
            pack_rows(head_of(problem.grad, b, h), row, length, width, grads + at);
            pack_lanes(queries + at, width, query_lanes + at);
            pack_lanes(grads + at, width, grad_lanes + at);
        }
        for (int64_t row = 0; row < length; ++row) {
            Vector sum = _mm256_setzero_ps();
            for (int64_t n = 0; n < width; n += LANES) {
                const Vector grad = _mm256_loadu_ps(grads + row * width + n);
                sum = _mm256_fmadd_ps(grad, _mm256_loadu_ps(out.data + row * out.row + n), sum);
            }
            delta[row] = sum_of(sum);
            lse[row] = problem.lse[(b * problem.heads + h) * length + row] * LOG2E;
        }
        std::fill(delta + length, delta + sizes.padded, 0.0f);
        std::fill(lse + length, lse + sizes.padded, -NONE);  // rows beyond the last have weights of zero
        std::fill_n(dq, sizes.numbers, 0.0f);
        std::fill_n(dk, sizes.numbers, 0.0f);
        std::fill_n(dv, sizes.numbers, 0.0f);
    }
};

// Adds the share of 64 queries and 64 keys to the gradients of all three, without the scale of scores.
void add_gradients(const Problem& problem, const Gradients& head, const int32_t* first, int64_t query, int64_t key) {
    const int64_t width = problem.width, vectors = width / LANES;
    const Vector factor = _mm256_set1_ps(problem.scale * LOG2E);
    by_pieces(first, query, key, problem.length, [&](const Piece& piece) {
        const int64_t lane = piece.from * LANES, lanes = piece.vectors() * LANES, count = piece.end - piece.begin;
        const int64_t row = query + lane, at = (key + piece.begin) * width;
        float *const weights = head.weights + piece.begin * BLOCK, *const changes = head.changes + piece.begin * BLOCK;
        product<true>({head.keys + at, width, 1}, head.query_lanes + query * width + lane, BLOCK, width, weights + lane,
                      BLOCK, count, piece.vectors());
        product<true>({head.values + at, width, 1}, head.grad_lanes + query * width + lane, BLOCK, width,
                      changes + lane, BLOCK, count, piece.vectors());
        for (int64_t at_lane = lane; at_lane < lane + lanes; at_lane += LANES) {
            const Vector lse = _mm256_loadu_ps(head.lse + query + at_lane);
            const Vector delta = _mm256_loadu_ps(head.delta + query + at_lane);
            for (int64_t j = 0; j < count; ++j) {
                float *const score = weights + j * BLOCK + at_lane, *const change = changes + j * BLOCK + at_lane;
                Vector weight = exp2(_mm256_fmsub_ps(_mm256_loadu_ps(score), factor, lse));
                if (!piece.all) {
                    weight = _mm256_and_ps(weight, sees(first, query + at_lane, key + piece.begin + j));
                }
                _mm256_storeu_ps(score, weight);
                _mm256_storeu_ps(change, _mm256_mul_ps(weight, _mm256_sub_ps(_mm256_loadu_ps(change), delta)));
            }
        }
        product<false>({weights + lane, BLOCK, 1}, head.grads + row * width, width, lanes, head.dv + at, width, count,
                       vectors);
        product<false>({changes + lane, BLOCK, 1}, head.queries + row * width, width, lanes, head.dk + at, width, count,
                       vectors);
        product<false>({changes + lane, 1, BLOCK}, head.keys + at, width, count, head.dq + row * width, width, lanes,
                       vectors);
    });
}

// Writes rows of a head: of `count` heads, `apart` numbers from one to the next, the sum in their order, times a factor.
void write_rows(const float* from, int64_t count, int64_t apart, float factor, int64_t length, int64_t width,
                const Head& to) {
    const Vector factors = _mm256_set1_ps(factor);
    for (int64_t row = 0; row < length; ++row, from += width) {
        for (int64_t n = 0; n < width; n += LANES) {
            Vector sum = _mm256_loadu_ps(from + n);
            for (int64_t i = 1; i < count; ++i) sum = _mm256_add_ps(sum, _mm256_loadu_ps(from + i * apart + n));
            _mm256_storeu_ps(to.data + row * to.row + n, _mm256_mul_ps(sum, factors));
        }
    }
}

// A head of queries by one worker. What those that share keys have for them is kept apart, and added up afterwards.
void backward(const Problem& problem) {
    const Sizes sizes(problem);
    const int64_t width = problem.width, length = problem.length, group = sizes.group;
    const std::vector<int32_t> first = first_keys(problem, sizes.padded);
    Parts counted{nullptr};
    Gradients(counted, sizes);
    const Memory scratch = allocate(std::min<int64_t>(problem.threads, sizes.heads) * counted.used);
    const Memory shares = allocate(group > 1 ? 2 * sizes.heads * sizes.numbers * sizeof(float) : 1);
    float* const of_keys = reinterpret_cast<float*>(shares.get());
    float* const of_values = of_keys + sizes.heads * sizes.numbers;
    const auto write_keys = [&](int64_t kv_head, const float* dk, const float* dv) {
        const int64_t b = kv_head / problem.kv_heads, k = kv_head % problem.kv_heads;
        write_rows(dk, group, sizes.numbers, problem.scale, length, width, head_of(problem.dk, b, k));
        write_rows(dv, group, sizes.numbers, 1.0f, length, width, head_of(problem.dv, b, k));
    };
    run(problem, sizes.heads, [&](int64_t index, int64_t worker) {
        const int64_t b = index / problem.heads, h = index % problem.heads;
        Parts parts{scratch.get() + worker * counted.used};
        const Gradients head(parts, sizes);
        head.pack(problem, sizes, b, h);
        const int32_t* const seen = first.data() + b * sizes.padded;
        for (int64_t key = 0; key < sizes.padded; key += BLOCK) {
            for (int64_t query = key; query < sizes.padded && reaches(seen, query, key); query += BLOCK) {
                add_gradients(problem, head, seen, query, key);
            }
        }
        write_rows(head.dq, 1, 0, problem.scale, length, width, head_of(problem.dq, b, h));
        if (group == 1) return write_keys(index, head.dk, head.dv);
        std::copy_n(head.dk, sizes.numbers, of_keys + index * sizes.numbers);
        std::copy_n(head.dv, sizes.numbers, of_values + index * sizes.numbers);
    });
    if (group == 1) return;
    run(problem, sizes.kv_heads, [&](int64_t kv_head, int64_t) {
        const int64_t at = kv_head * group * sizes.numbers;
        write_keys(kv_head, of_keys + at, of_values + at);
    });
}

// 0, or 1 where memory is short.
int status_of(void (*compute)(const Problem&), const Problem& problem) {
    try {
        compute(problem);
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

}  // namespace

extern "C" {

int titan_attention_forward(const Problem* problem) { return status_of(forward, *problem); }

int titan_attention_backward(const Problem* problem) { return status_of(backward, *problem); }

}  // extern "C"
