// Causal attention in bf16 for CPUs with AVX-512 BF16: blocks of 64 queries x 64 keys, as FlashAttention-2 has them
// (arXiv 2307.08691), with products by vdpbf16ps, which adds pairs of bf16 products to float32.
//
// Scores are computed transposed, so that a vector holds 16 queries of one key: maximum, sum and log-sum-exp of a
// query stay in its lane. Every product has one form, `product` below. Its left side is read as 32-bit words of two
// bf16 numbers that are neighbours along the inner dimension, each broadcast to all lanes. Its right side is packed:
//     rows   [S][N]             a head as it is, without gaps
//     pairs  [S / 2][N] words   rows 2 s and 2 s + 1 side by side: the inner dimension is positions
//     lanes  [S / 64][N / 2][64] words   of each 64 rows, two neighbouring columns of each row: it is features
// All are padded with zeros to a multiple of 64 positions. Sums are float32. The order of all additions follows from
// the shape alone, so results do not depend on the number of threads.

#include "cpu_kernel.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace {

using Word = uint32_t;  // two bf16 numbers
using Bf16 = uint16_t;
using Vector = __m512;

constexpr int64_t LANES = 16, VECTORS = BLOCK / LANES;
constexpr float SLACK = 8.0f;  // the maximum is raised when a score exceeds it by a factor of 2^8: sums stay small

// --- vectors --------------------------------------------------------------------------------------------------------

inline __m512bh as_pairs(__m512i words) { return (__m512bh)words; }
inline __m512i as_words(__m512bh pairs) { return (__m512i)pairs; }

// 2^x with a relative error below 3e-7; 0 for x below -150.
inline Vector exp2(Vector x) {
    const Vector f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the integer below it
    Vector p = _mm512_set1_ps(0.0018775752f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0089893444f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055826314f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24015363f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69315308f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99999994f));
    return _mm512_scalef_ps(p, x);
}

// Words of bf16 numbers: in each lane, the first vector's number and then the second's.
inline __m512i paired(Vector first, Vector second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, as_words(_mm512_cvtne2ps_pbh(second, first)));
}

inline void store_bf16(void* at, Vector numbers) {
    _mm256_storeu_si256(static_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(numbers));
}

inline void transpose(__m512i (&rows)[16]) {
    __m512i other[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

// --- packing --------------------------------------------------------------------------------------------------------

// The head of one batch row: `length` rows of `width` numbers.
struct Head {
    Bf16* data;
    int64_t row;
};

inline Head head_of(const View& view, int64_t batch, int64_t head) {
    return {static_cast<Bf16*>(view.data) + batch * view.batch + head * view.head, view.row};
}

// 16 numbers of a row as 32-bit lanes; zeros beyond the last row.
inline __m512i sixteen(const Head& head, int64_t row, int64_t column, int64_t length) {
    if (row >= length) return _mm512_setzero_si512();
    const auto* at = reinterpret_cast<const __m256i*>(head.data + row * head.row + column);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(at));
}

void pack_rows(const Head& head, int64_t first, int64_t length, int64_t width, Word* to) {
    for (int64_t row = first; row < first + BLOCK; ++row, to += width / 2) {
        if (row < length) {
            std::memcpy(to, head.data + row * head.row, width * sizeof(Bf16));
        } else {
            std::memset(to, 0, width * sizeof(Bf16));
        }
    }
}

void pack_pairs(const Head& head, int64_t first, int64_t length, int64_t width, Word* to) {
    for (int64_t row = first; row < first + BLOCK; row += 2, to += width) {
        for (int64_t n = 0; n < width; n += LANES) {
            const __m512i low = sixteen(head, row, n, length), high = sixteen(head, row + 1, n, length);
            _mm512_storeu_si512(to + n, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

void pack_lanes(const Head& head, int64_t first, int64_t length, int64_t width, Word* to) {
    for (int64_t vector = 0; vector < VECTORS; ++vector) {
        for (int64_t n = 0; n < width; n += 2 * LANES) {
            const auto words = std::min(LANES, (width - n) / 2);
            const auto mask = static_cast<__mmask16>((1u << words) - 1);
            __m512i rows[16];
            for (int64_t i = 0; i < LANES; ++i) {
                const int64_t row = first + vector * LANES + i;
                rows[i] = row < length ? _mm512_maskz_loadu_epi32(mask, head.data + row * head.row + n)
                                       : _mm512_setzero_si512();
            }
            transpose(rows);
            for (int64_t w = 0; w < words; ++w) {
                _mm512_storeu_si512(to + (n / 2 + w) * BLOCK + vector * LANES, rows[w]);
            }
        }
    }
}

// Rows of bf16 from columns [N][64] of float32, each lane times its factor.
void unpack_lanes(const float* from, const float* factors, int64_t first, int64_t length, int64_t width,
                  const Head& to) {
    for (int64_t vector = 0; vector < VECTORS && first + vector * LANES < length; ++vector) {
        const Vector factor = _mm512_loadu_ps(factors + vector * LANES);
        for (int64_t n = 0; n < width; n += LANES) {
            __m512i rows[16];
            for (int64_t i = 0; i < LANES; ++i) {
                const Vector numbers = _mm512_loadu_ps(from + (n + i) * BLOCK + vector * LANES);
                rows[i] = _mm512_castps_si512(_mm512_mul_ps(numbers, factor));
            }
            transpose(rows);
            const int64_t row = first + vector * LANES, count = std::min(LANES, length - row);
            for (int64_t i = 0; i < count; ++i) {
                store_bf16(to.data + (row + i) * to.row + n, _mm512_castsi512_ps(rows[i]));
            }
        }
    }
}

void unpack_rows(const float* from, float factor, int64_t first, int64_t length, int64_t width, const Head& to) {
    for (int64_t row = first; row < std::min(first + BLOCK, length); ++row, from += width) {
        for (int64_t n = 0; n < width; n += LANES) {
            const Vector numbers = _mm512_mul_ps(_mm512_loadu_ps(from + n), _mm512_set1_ps(factor));
            store_bf16(to.data + row * to.row + n, numbers);
        }
    }
}

// --- products -------------------------------------------------------------------------------------------------------

// Words of the left side: word (row, k) stands at data[row * per_row + k * per_k].
struct Left {
    const Word* data;
    int64_t per_row, per_k;
};

inline __m512bh broadcast(const Left& left, int64_t row, int64_t k) {
    return as_pairs(_mm512_set1_epi32(static_cast<int>(left.data[row * left.per_row + k * left.per_k])));
}

// R rows x V vectors of `to` (stride: numbers per row) plus, or (FRESH) equal to, the product over k < `inner`.
template <int R, int V, bool FRESH>
inline void tile(const Left& left, const Word* right, int64_t per_k, int64_t inner, float* to, int64_t stride) {
    Vector sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            sums[r][v] = FRESH ? _mm512_setzero_ps() : _mm512_loadu_ps(to + r * stride + v * LANES);
        }
    }
    for (int64_t k = 0; k < inner; ++k) {
        __m512bh packed[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) packed[v] = as_pairs(_mm512_loadu_si512(right + k * per_k + v * LANES));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512bh word = broadcast(left, r, k);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], word, packed[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) _mm512_storeu_ps(to + r * stride + v * LANES, sums[r][v]);
    }
}

template <int R, int V, bool FRESH>
void tiles(Left left, const Word* right, int64_t per_k, int64_t inner, float* to, int64_t stride, int64_t rows) {
    for (int64_t row = 0; row < rows; row += R, left.data += R * left.per_row, to += R * stride) {
        tile<R, V, FRESH>(left, right, per_k, inner, to, stride);
    }
}

// The product of `rows` rows, a multiple of 16, and any number of vectors: as many sums at once as registers hold.
template <bool FRESH>
void product(const Left& left, const Word* right, int64_t per_k, int64_t inner, float* to, int64_t stride,
             int64_t rows, int64_t vectors) {
    for (; vectors >= 4; vectors -= 4, right += 4 * LANES, to += 4 * LANES) {
        tiles<4, 4, FRESH>(left, right, per_k, inner, to, stride, rows);
    }
    if (vectors == 3) tiles<8, 3, FRESH>(left, right, per_k, inner, to, stride, rows);
    if (vectors == 2) tiles<8, 2, FRESH>(left, right, per_k, inner, to, stride, rows);
    if (vectors == 1) tiles<16, 1, FRESH>(left, right, per_k, inner, to, stride, rows);
}

// --- what attends to what -------------------------------------------------------------------------------------------

// Of 64 queries x 16 keys: the vectors of queries of which any sees any key, and whether all see all.
struct Seen {
    int64_t from, to;
    bool all;
};

inline Seen seen_of(const int32_t* first, int64_t query, int64_t key, int64_t length) {
    Seen seen{0, std::min(VECTORS, (length - query + LANES - 1) / LANES), false};
    while (seen.from < seen.to && key > query + seen.from * LANES + LANES - 1) ++seen.from;
    while (seen.to > seen.from && first[query + (seen.to - 1) * LANES] > key + LANES - 1) --seen.to;
    seen.all = key + LANES - 1 <= query + seen.from * LANES && first[query + seen.to * LANES - 1] <= key;
    return seen;
}

// Which of the 16 queries from `query` see a key.
inline __mmask16 sees(const int32_t* first, int64_t query, int64_t key) {
    const __m512i counted = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i rows = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(query)), counted);
    const __m512i keys = _mm512_set1_epi32(static_cast<int>(key));
    return _mm512_cmple_epi32_mask(keys, rows) & _mm512_cmple_epi32_mask(_mm512_loadu_si512(first + query), keys);
}

// --- forward --------------------------------------------------------------------------------------------------------

// What one worker computes 64 queries in.
struct Queries {
    Word* lanes;                    // [N / 2][64]
    float *scores, *sums, *totals;  // [64 keys][64], output [N][64] before division, denominators [64]
    float* maximum;                 // [64], in units of log 2
    Word* weights;                  // [32 pairs of keys][64]

    Queries(Parts& parts, int64_t width)
        : lanes(parts.take<Word>(width / 2 * BLOCK)),
          scores(parts.take<float>(BLOCK * BLOCK)),
          sums(parts.take<float>(width * BLOCK)),
          totals(parts.take<float>(BLOCK)),
          maximum(parts.take<float>(BLOCK)),
          weights(parts.take<Word>(BLOCK / 2 * BLOCK)) {}
};

// Raises the maxima of 16 queries to that of their scores with 64 keys, if any exceeds its maximum by far.
void raise_maximum(const Queries& queries, const Seen (&seen)[4], const int32_t* first, int64_t query, int64_t key,
                   int64_t vector, float factor, int64_t width) {
    Vector highest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t chunk = 0; chunk < 4; ++chunk) {
        if (vector < seen[chunk].from || vector >= seen[chunk].to) continue;
        for (int64_t j = chunk * LANES; j < (chunk + 1) * LANES; ++j) {
            const Vector score = _mm512_loadu_ps(queries.scores + j * BLOCK + vector * LANES);
            const __mmask16 mask = seen[chunk].all ? 0xffff : sees(first, query + vector * LANES, key + j);
            highest = _mm512_mask_max_ps(highest, mask, score, highest);
        }
    }
    highest = _mm512_mul_ps(highest, _mm512_set1_ps(factor));
    float* maxima = queries.maximum + vector * LANES;
    const Vector before = _mm512_loadu_ps(maxima), limit = _mm512_add_ps(before, _mm512_set1_ps(SLACK));
    if (!_mm512_cmp_ps_mask(highest, limit, _CMP_GT_OQ)) return;
    const Vector after = _mm512_max_ps(before, highest), shrink = exp2(_mm512_sub_ps(before, after));
    _mm512_storeu_ps(maxima, after);
    float* total = queries.totals + vector * LANES;
    _mm512_storeu_ps(total, _mm512_mul_ps(_mm512_loadu_ps(total), shrink));
    for (float* sum = queries.sums + vector * LANES; sum < queries.sums + width * BLOCK; sum += BLOCK) {
        _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), shrink));
    }
}

// The weights of 16 keys, and their sums.
void weigh(const Queries& queries, const Seen& seen, const int32_t* first, int64_t query, int64_t key, int64_t chunk,
           float factor) {
    const Vector factors = _mm512_set1_ps(factor);
    for (int64_t vector = seen.from; vector < seen.to; ++vector) {
        const Vector maximum = _mm512_loadu_ps(queries.maximum + vector * LANES);
        Vector total = _mm512_loadu_ps(queries.totals + vector * LANES);
#pragma GCC unroll 4
        for (int64_t j = chunk * LANES; j < (chunk + 1) * LANES; j += 2) {
            const float* scores = queries.scores + j * BLOCK + vector * LANES;
            Vector even = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores), factors, maximum));
            Vector odd = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + BLOCK), factors, maximum));
            if (!seen.all) {
                even = _mm512_maskz_mov_ps(sees(first, query + vector * LANES, key + j), even);
                odd = _mm512_maskz_mov_ps(sees(first, query + vector * LANES, key + j + 1), odd);
            }
            total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
            _mm512_storeu_si512(queries.weights + j / 2 * BLOCK + vector * LANES, paired(even, odd));
        }
        _mm512_storeu_ps(queries.totals + vector * LANES, total);
    }
}

// 64 queries with 64 keys, of which the packed rows of keys and pairs of values are given.
void attend(const Queries& queries, const Word* keys, const Word* values, const int32_t* first, int64_t query,
            int64_t key, const Problem& problem) {
    const int64_t width = problem.width, words = width / 2;
    const float factor = problem.scale * LOG2E;
    Seen seen[4];
    bool all = true;
    for (int64_t chunk = 0; chunk < 4; ++chunk) {
        seen[chunk] = seen_of(first, query, key + chunk * LANES, problem.length);
        all &= seen[chunk].all && seen[chunk].from == 0 && seen[chunk].to == VECTORS;
        const auto& [from, to, _] = seen[chunk];
        product<true>({keys + chunk * LANES * words, words, 1}, queries.lanes + from * LANES, BLOCK, words,
                      queries.scores + chunk * LANES * BLOCK + from * LANES, BLOCK, LANES, to - from);
    }
    for (int64_t vector = 0; vector < VECTORS; ++vector) {
        raise_maximum(queries, seen, first, query, key, vector, factor, width);
    }
    for (int64_t chunk = 0; chunk < 4; ++chunk) weigh(queries, seen[chunk], first, query, key, chunk, factor);
    if (all) {
        product<false>({values, 1, width}, queries.weights, BLOCK, BLOCK / 2, queries.sums, BLOCK, width, VECTORS);
        return;
    }
    for (int64_t chunk = 0; chunk < 4; ++chunk) {
        const auto& [from, to, _] = seen[chunk];
        const int64_t pair = chunk * LANES / 2;
        product<false>({values + pair * width, 1, width}, queries.weights + pair * BLOCK + from * LANES, BLOCK,
                       LANES / 2, queries.sums + from * LANES, BLOCK, width, to - from);
    }
}

// The output of 64 queries of a head, and their log-sum-exp.
void forward_block(const Problem& problem, const Queries& queries, const Word* keys, const Word* values,
                   const int32_t* first, int64_t b, int64_t h, int64_t query) {
    const int64_t width = problem.width, length = problem.length;
    pack_lanes(head_of(problem.q, b, h), query, length, width, queries.lanes);
    std::fill_n(queries.sums, width * BLOCK, 0.0f);
    std::fill_n(queries.totals, BLOCK, 0.0f);
    std::fill_n(queries.maximum, BLOCK, NONE);
    for (int64_t key = first[query] / BLOCK * BLOCK; key <= query; key += BLOCK) {
        attend(queries, keys + key * width / 2, values + key * width / 2, first, query, key, problem);
    }
    float* lse = problem.lse + (b * problem.heads + h) * length;
    float shares[BLOCK];
    for (int64_t i = 0; i < BLOCK; ++i) {
        shares[i] = 1.0f / queries.totals[i];
        if (query + i < length) lse[query + i] = (queries.maximum[i] + std::log2(queries.totals[i])) * LN2;
    }
    unpack_lanes(queries.sums, shares, query, length, width, head_of(problem.out, b, h));
}

// Whether whole heads keep nearly all threads busy. If not, blocks of a head are shared out, for `more` times the work.
inline bool by_heads(const Problem& problem, double more) {
    const int64_t heads = problem.batch * problem.kv_heads;
    const int64_t rounds = (heads + problem.threads - 1) / problem.threads;
    return rounds * problem.threads <= more * heads;
}

struct Forward {
    const Problem& problem;
    const int64_t width, blocks, padded, words, group, kv_heads;
    const std::vector<int32_t> first;

    explicit Forward(const Problem& given)
        : problem(given),
          width(given.width),
          blocks((given.length + BLOCK - 1) / BLOCK),
          padded(blocks * BLOCK),
          words(padded * width / 2),
          group(given.heads / given.kv_heads),
          kv_heads(given.batch * given.kv_heads),
          first(first_keys(given, padded)) {}

    void operator()() const {
        if (by_heads(problem, 1.1)) {
            together();
        } else {
            apart();
        }
    }

    void pack(int64_t kv_head, int64_t block, Word* keys, Word* values) const {
        const int64_t b = kv_head / problem.kv_heads, k = kv_head % problem.kv_heads, at = block * BLOCK * width / 2;
        pack_rows(head_of(problem.k, b, k), block * BLOCK, problem.length, width, keys + at);
        pack_pairs(head_of(problem.v, b, k), block * BLOCK, problem.length, width, values + at);
    }

    void attend_to(const Queries& queries, const Word* keys, const Word* values, int64_t head, int64_t block) const {
        const int64_t b = head / problem.heads, h = head % problem.heads;
        forward_block(problem, queries, keys, values, first.data() + b * padded, b, h, block * BLOCK);
    }

    // A key-value head and its queries by one worker.
    void together() const {
        const auto run_head = [&](Parts parts, int64_t kv_head) {
            const Queries queries(parts, width);
            Word *const keys = parts.take<Word>(words), *const values = parts.take<Word>(words);
            if (!parts.at) return parts.used;
            for (int64_t block = 0; block < blocks; ++block) pack(kv_head, block, keys, values);
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
                for (int64_t block = 0; block < blocks; ++block) attend_to(queries, keys, values, head, block);
            }
            return parts.used;
        };
        const int64_t bytes = run_head(Parts{nullptr}, 0);
        const Memory scratch = allocate(std::min<int64_t>(problem.threads, kv_heads) * bytes);
        run(problem, kv_heads, [&](int64_t kv_head, int64_t worker) {
            run_head(Parts{scratch.get() + worker * bytes}, kv_head);
        });
    }

    // Each block of queries by any worker, after all keys and values have been packed.
    void apart() const {
        const int64_t heads = problem.batch * problem.heads;
        const Memory packed = allocate(2 * kv_heads * words * sizeof(Word));
        Word* const keys = reinterpret_cast<Word*>(packed.get());
        Word* const values = keys + kv_heads * words;
        run(problem, kv_heads * blocks, [&](int64_t index, int64_t) {
            const int64_t head = index / blocks;
            pack(head, index % blocks, keys + head * words, values + head * words);
        });
        Parts counted{nullptr};
        Queries(counted, width);
        const Memory scratch = allocate(problem.threads * counted.used);
        run(problem, heads * blocks, [&](int64_t index, int64_t worker) {
            const int64_t head = index / blocks, at = head / group * words;
            Parts parts{scratch.get() + worker * counted.used};
            const Queries queries(parts, width);
            attend_to(queries, keys + at, values + at, head, blocks - 1 - index % blocks);  // the longest first
        });
    }
};

// --- backward -------------------------------------------------------------------------------------------------------

// A head of keys and values.
struct Keys {
    Word *rows, *pairs, *value_rows;

    Keys(Parts& parts, int64_t padded, int64_t width)
        : rows(parts.take<Word>(padded * width / 2)),
          pairs(parts.take<Word>(padded * width / 2)),
          value_rows(parts.take<Word>(padded * width / 2)) {}

    void pack(const Problem& problem, int64_t b, int64_t kv_head) const {
        const Head k = head_of(problem.k, b, kv_head), v = head_of(problem.v, b, kv_head);
        for (int64_t key = 0; key < problem.length; key += BLOCK) {
            const int64_t at = key * problem.width / 2;
            pack_rows(k, key, problem.length, problem.width, rows + at);
            pack_pairs(k, key, problem.length, problem.width, pairs + at);
            pack_rows(v, key, problem.length, problem.width, value_rows + at);
        }
    }
};

// A head of queries, the gradient of its output, and of each query log2-sum-exp2 and the product of gradient and output.
struct Outputs {
    Word *lanes, *pairs, *grad_lanes, *grad_pairs;
    float *lse, *delta;

    Outputs(Parts& parts, int64_t padded, int64_t width)
        : lanes(parts.take<Word>(padded * width / 2)),
          pairs(parts.take<Word>(padded * width / 2)),
          grad_lanes(parts.take<Word>(padded * width / 2)),
          grad_pairs(parts.take<Word>(padded * width / 2)),
          lse(parts.take<float>(padded)),
          delta(parts.take<float>(padded)) {}

    void pack(const Problem& problem, int64_t b, int64_t h, int64_t query) const {
        const int64_t width = problem.width, length = problem.length, at = query * width / 2;
        const Head q = head_of(problem.q, b, h), grad = head_of(problem.grad, b, h), out = head_of(problem.out, b, h);
        pack_lanes(q, query, length, width, lanes + at);
        pack_pairs(q, query, length, width, pairs + at);
        pack_lanes(grad, query, length, width, grad_lanes + at);
        pack_pairs(grad, query, length, width, grad_pairs + at);
        for (int64_t row = query; row < query + BLOCK; ++row) {
            // Rows beyond the last have weights of zero.
            lse[row] = row < length ? problem.lse[(b * problem.heads + h) * length + row] * LOG2E : -NONE;
            Vector sum = _mm512_setzero_ps();
            for (int64_t n = 0; n < width; n += LANES) {
                const __m512i left = sixteen(grad, row, n, length), right = sixteen(out, row, n, length);
                sum = _mm512_dpbf16_ps(sum, as_pairs(left), as_pairs(right));
            }
            delta[row] = _mm512_reduce_add_ps(sum);
        }
    }
};

// Of 64 queries x 64 keys: weights and gradients of scores in bf16, as rows [64 keys][64], the latter as pairs too.
struct Scores {
    Word *weights, *changes, *change_pairs;

    explicit Scores(Parts& parts)
        : weights(parts.take<Word>(BLOCK * BLOCK / 2)),
          changes(parts.take<Word>(BLOCK * BLOCK / 2)),
          change_pairs(parts.take<Word>(BLOCK * BLOCK / 2)) {}
};

// A block of 64 queries x 64 keys.
struct Block {
    const Problem& problem;
    const Keys& keys;
    const Outputs& outputs;
    const Scores& scores;
    const int32_t* first;
    int64_t query, key;
};

// Weights and gradients of scores of C keys from `at` of the block, and 16 V queries from those of `vector`.
template <int C, int V, bool DKV, bool DQ>
inline void weigh_again(const Block& block, int64_t at, int64_t vector, bool all) {
    const int64_t words = block.problem.width / 2, lane = vector * LANES;
    const Left keys{block.keys.rows + (block.key + at) * words, words, 1};
    const Left values{block.keys.value_rows + (block.key + at) * words, words, 1};
    const Word* const queries = block.outputs.lanes + block.query * words + lane;
    const Word* const grads = block.outputs.grad_lanes + block.query * words + lane;
    Vector scores[C][V], changes[C][V];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) scores[c][v] = changes[c][v] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < words; ++k) {
        __m512bh query[V], grad[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            query[v] = as_pairs(_mm512_loadu_si512(queries + k * BLOCK + v * LANES));
            grad[v] = as_pairs(_mm512_loadu_si512(grads + k * BLOCK + v * LANES));
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const __m512bh key = broadcast(keys, c, k), value = broadcast(values, c, k);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                scores[c][v] = _mm512_dpbf16_ps(scores[c][v], key, query[v]);
                changes[c][v] = _mm512_dpbf16_ps(changes[c][v], value, grad[v]);
            }
        }
    }
    const Vector factor = _mm512_set1_ps(block.problem.scale * LOG2E);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
        const int64_t query = block.query + lane + v * LANES;
        const Vector lse = _mm512_loadu_ps(block.outputs.lse + query), delta = _mm512_loadu_ps(block.outputs.delta + query);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            Vector weight = exp2(_mm512_fmsub_ps(scores[c][v], factor, lse));
            if (!all) weight = _mm512_maskz_mov_ps(sees(block.first, query, block.key + at + c), weight);
            changes[c][v] = _mm512_mul_ps(weight, _mm512_sub_ps(changes[c][v], delta));
            if constexpr (DKV) {
                const int64_t word = (at + c) * BLOCK / 2 + (lane + v * LANES) / 2;
                store_bf16(block.scores.weights + word, weight);
                store_bf16(block.scores.changes + word, changes[c][v]);
            }
            if constexpr (DQ) {
                Word* to = block.scores.change_pairs + (at + c) / 2 * BLOCK + lane + v * LANES;
                if (c % 2) _mm512_storeu_si512(to, paired(changes[c - 1][v], changes[c][v]));
            }
        }
    }
}

template <bool DKV, bool DQ>
void weigh_again(const Block& block, int64_t chunk, const Seen& seen) {
    const int64_t begin = chunk * LANES, end = begin + LANES;
    int64_t vector = seen.from;
    for (; vector + 2 <= seen.to; vector += 2) {
        for (int64_t at = begin; at < end; at += 4) weigh_again<4, 2, DKV, DQ>(block, at, vector, seen.all);
    }
    if (vector < seen.to) {
        for (int64_t at = begin; at < end; at += 8) weigh_again<8, 1, DKV, DQ>(block, at, vector, seen.all);
    }
}

// Adds the block's share to the gradients of its keys and values, [64][N], and of its queries, [N][64].
template <bool DKV, bool DQ>
void add_gradients(const Block& block, float* dk, float* dv, float* dq) {
    const int64_t width = block.problem.width, vectors = width / LANES;
    for (int64_t chunk = 0; chunk < 4; ++chunk) {
        const int64_t key = block.key + chunk * LANES;
        const Seen seen = seen_of(block.first, block.query, key, block.problem.length);
        if (seen.from >= seen.to) continue;
        weigh_again<DKV, DQ>(block, chunk, seen);
        if constexpr (DKV) {
            const int64_t begin = chunk * LANES * BLOCK / 2 + seen.from * LANES / 2;
            const int64_t pair = (block.query + seen.from * LANES) / 2 * width;
            const int64_t inner = (seen.to - seen.from) * LANES / 2, to = chunk * LANES * width;
            product<false>({block.scores.weights + begin, BLOCK / 2, 1}, block.outputs.grad_pairs + pair, width, inner,
                           dv + to, width, LANES, vectors);
            product<false>({block.scores.changes + begin, BLOCK / 2, 1}, block.outputs.pairs + pair, width, inner,
                           dk + to, width, LANES, vectors);
        }
        if constexpr (DQ) {
            const Left left{block.keys.pairs + key / 2 * width, 1, width};
            product<false>(left, block.scores.change_pairs + chunk * LANES / 2 * BLOCK + seen.from * LANES, BLOCK,
                           LANES / 2, dq + seen.from * LANES, BLOCK, width, seen.to - seen.from);
        }
    }
}

struct Backward {
    const Problem& problem;
    const int64_t width, blocks, padded, group, kv_heads;
    const std::vector<int32_t> first;

    explicit Backward(const Problem& given)
        : problem(given),
          width(given.width),
          blocks((given.length + BLOCK - 1) / BLOCK),
          padded(blocks * BLOCK),
          group(given.heads / given.kv_heads),
          kv_heads(given.batch * given.kv_heads),
          first(first_keys(given, padded)) {}

    void operator()() const {
        // Apart, weights are computed twice: 7 products of a block in place of 5.
        if (by_heads(problem, 1.4)) {
            together();
        } else {
            apart();
        }
    }

    void write_keys(const float* dk, const float* dv, int64_t kv_head, int64_t key) const {
        const int64_t b = kv_head / problem.kv_heads, k = kv_head % problem.kv_heads;
        unpack_rows(dk, problem.scale, key, problem.length, width, head_of(problem.dk, b, k));
        unpack_rows(dv, 1.0f, key, problem.length, width, head_of(problem.dv, b, k));
    }

    void write_queries(const float* dq, int64_t b, int64_t h, int64_t query) const {
        float factors[BLOCK];
        std::fill_n(factors, BLOCK, problem.scale);
        unpack_lanes(dq, factors, query, problem.length, width, head_of(problem.dq, b, h));
    }

    // All gradients of a key-value head and of its queries by one worker.
    void together() const {
        const auto run_head = [&](Parts parts, int64_t kv_head) {
            const Keys keys(parts, padded, width);
            const Outputs outputs(parts, padded, width);
            const Scores scores(parts);
            float *const dk = parts.take<float>(padded * width), *const dv = parts.take<float>(padded * width);
            float* const dq = parts.take<float>(padded * width);
            if (!parts.at) return parts.used;
            const int64_t b = kv_head / problem.kv_heads, k = kv_head % problem.kv_heads;
            keys.pack(problem, b, k);
            std::fill_n(dk, padded * width, 0.0f);
            std::fill_n(dv, padded * width, 0.0f);
            for (int64_t h = k * group; h < (k + 1) * group; ++h) {
                for (int64_t query = 0; query < padded; query += BLOCK) outputs.pack(problem, b, h, query);
                std::fill_n(dq, padded * width, 0.0f);
                for (int64_t key = 0; key < padded; key += BLOCK) {
                    const int32_t* seen = first.data() + b * padded;
                    for (int64_t query = key; query < padded && reaches(seen, query, key); query += BLOCK) {
                        add_gradients<true, true>({problem, keys, outputs, scores, seen, query, key}, dk + key * width,
                                                  dv + key * width, dq + query * width);
                    }
                }
                for (int64_t query = 0; query < padded; query += BLOCK) {
                    write_queries(dq + query * width, b, h, query);
                }
            }
            for (int64_t key = 0; key < padded; key += BLOCK) {
                write_keys(dk + key * width, dv + key * width, kv_head, key);
            }
            return parts.used;
        };
        const int64_t bytes = run_head(Parts{nullptr}, 0);
        const Memory scratch = allocate(std::min<int64_t>(problem.threads, kv_heads) * bytes);
        run(problem, kv_heads, [&](int64_t kv_head, int64_t worker) {
            run_head(Parts{scratch.get() + worker * bytes}, kv_head);
        });
    }

    // Blocks of keys and blocks of queries by workers of their own, which weigh them twice. The sums are the same.
    void apart() const {
        const int64_t heads = problem.batch * problem.heads;
        std::vector<Keys> keys;
        std::vector<Outputs> outputs;
        const auto place = [&](Parts parts) {
            keys.clear(), outputs.clear();
            for (int64_t head = 0; head < kv_heads; ++head) keys.emplace_back(parts, padded, width);
            for (int64_t head = 0; head < heads; ++head) outputs.emplace_back(parts, padded, width);
            return parts.used;
        };
        const Memory packed = allocate(place(Parts{nullptr}));
        place(Parts{packed.get()});
        run(problem, kv_heads, [&](int64_t head, int64_t) {
            keys[head].pack(problem, head / problem.kv_heads, head % problem.kv_heads);
        });
        run(problem, heads * blocks, [&](int64_t index, int64_t) {
            const int64_t head = index / blocks;
            outputs[head].pack(problem, head / problem.heads, head % problem.heads, index % blocks * BLOCK);
        });
        const auto run_keys = [&](Parts parts, int64_t kv_head, int64_t key) {
            const Scores scores(parts);
            float *const dk = parts.take<float>(BLOCK * width), *const dv = parts.take<float>(BLOCK * width);
            if (!parts.at) return parts.used;
            std::fill_n(dk, BLOCK * width, 0.0f);
            std::fill_n(dv, BLOCK * width, 0.0f);
            const int32_t* seen = first.data() + kv_head / problem.kv_heads * padded;
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
                for (int64_t query = key; query < padded && reaches(seen, query, key); query += BLOCK) {
                    const Block block{problem, keys[kv_head], outputs[head], scores, seen, query, key};
                    add_gradients<true, false>(block, dk, dv, nullptr);
                }
            }
            write_keys(dk, dv, kv_head, key);
            return parts.used;
        };
        const auto run_queries = [&](Parts parts, int64_t head, int64_t query) {
            const Scores scores(parts);
            float* const dq = parts.take<float>(BLOCK * width);
            std::fill_n(dq, BLOCK * width, 0.0f);
            const int64_t b = head / problem.heads, h = head % problem.heads;
            const int32_t* seen = first.data() + b * padded;
            for (int64_t key = seen[query] / BLOCK * BLOCK; key <= query; key += BLOCK) {
                const Block block{problem, keys[head / group], outputs[head], scores, seen, query, key};
                add_gradients<false, true>(block, nullptr, nullptr, dq);
            }
            write_queries(dq, b, h, query);
        };
        const int64_t bytes = run_keys(Parts{nullptr}, 0, 0);
        const Memory scratch = allocate(problem.threads * bytes);
        run(problem, (kv_heads + heads) * blocks, [&](int64_t index, int64_t worker) {
            const Parts parts{scratch.get() + worker * bytes};
            const int64_t head = index / blocks, block = index % blocks;
            if (head < kv_heads) {
                run_keys(parts, head, block * BLOCK);  // the first keys are seen by most queries
            } else {
                run_queries(parts, head - kv_heads, (blocks - 1 - block) * BLOCK);
            }
        });
    }
};

}  // namespace

extern "C" {

// Both return 0, or 1 where memory is short.

int titan_attention_forward(const Problem* problem) {
    try {
        const Forward forward(*problem);
        forward();
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

int titan_attention_backward(const Problem* problem) {
    try {
        const Backward backward(*problem);
        backward();
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

}  // extern "C"
