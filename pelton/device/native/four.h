/* Attention of up to four queries that share a key head, in bfloat16 by AMX tiles; for attention.c.

   Keys and values are multiplied as they lie in their blocks, 16 of them at a time, and nothing is
   turned: keys are the left operand, and of values, where a product wants the numbers of two keys
   side by side and finds two dims of one, each weight comes once with a 0 behind it and once before.

       scores  [16 keys][4 queries]  =  keys [16][32 dims] . queries [32 / 2][4][2]
       sums    [8][16 pairs of dims] =  weights [8][16 keys][2] . values [16][16 pairs][2]

   Rows 0 to 3 of the sums are the even dims of each query, 4 to 7 the odd ones. A step is 64 keys. The
   unit of tiles works on the scores of a step and the sums of another while the vectors turn the
   scores of a third into weights: what it stores can only be read some time later. */
#ifndef PELTON_FOUR_H
#define PELTON_FOUR_H

#include "softmax.h"
#include "tiles.h"
#include "vec.h"

#define FOUR_QUERIES 4
#define FOUR_KEYS 64
#define FOUR_GROUPS (FOUR_KEYS / 16)
#define FOUR_DIMS 256

/* 16 keys of a head and their values, rows of 32-dims tiles `stride` bytes apart. */
typedef struct {
    const char *keys, *values;
    size_t stride;
} four_keys;

/* Of the keys of a step, groups first..last. */
typedef struct {
    const four_keys *groups;
    int first, last;
} four_step;

/* Of one part. */
typedef struct {
    uint32_t query[FOUR_DIMS / 32][16][FOUR_QUERIES];
    uint32_t weights[2][FOUR_GROUPS][2 * FOUR_QUERIES][LANES];
    float scores[2][FOUR_GROUPS][16][FOUR_QUERIES];
    float sums[FOUR_DIMS / 32][2 * FOUR_QUERIES][LANES];
    float kept[2][2 * FOUR_QUERIES]; /* a line of the cache, so that all lies at begins of lines */
    bf16 edges[2][2][16 * FOUR_DIMS]; /* keys and values beside which are some that nobody may read */
} four_memory;

#ifdef __AMX_BF16__

/* Tiles, which the compiler wants to read as numbers. */
#define EVEN_SCORES 0
#define ODD_SCORES 1
#define FIRST_QUERY 2
#define SECOND_QUERY 3
#define MANY 4 /* keys or values */
#define FIRST_SUMS 5
#define SECOND_SUMS 6
#define WEIGHTS 7

static inline void configure_four(void) {
    tile_config config __attribute__((aligned(64))) = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = tile >= FIRST_SUMS ? 2 * FOUR_QUERIES : 16;
        config.row_bytes[tile] = tile < MANY ? 4 * FOUR_QUERIES : 64;
    }
    __asm__ volatile("" ::"m"(config)); /* as in configure_tiles */
    _tile_loadconfig(&config);
}

/* queries: `count` of them, of head_dim elements each. */
static inline void pack_four(const bf16 *const *queries, int64_t count, int64_t head_dim,
                             four_memory *f) {
    for (int64_t q = 0; q < FOUR_QUERIES; q++)
        for (int64_t pair = 0; pair < head_dim / 2; pair++) {
            uint32_t both = 0;
            if (q < count)
                memcpy(&both, queries[q] + 2 * pair, sizeof both);
            f->query[pair / 16][pair % 16][q] = both;
        }
    memset(f->weights, 0, sizeof f->weights);
}

static inline __attribute__((always_inline)) void
score_four(four_step step, int64_t head_dim, const four_memory *f,
           float (*scores)[16][FOUR_QUERIES]) {
    int64_t tiles = head_dim / 32;
    const four_keys *keys = step.groups;
    _tile_loadd(FIRST_QUERY, f->query[0], 4 * FOUR_QUERIES);
    if (tiles == 2)
        _tile_loadd(SECOND_QUERY, f->query[1], 4 * FOUR_QUERIES);
#define SCORE(to, i) \
    do { \
        _tile_zero(to); \
        _tile_loadd(MANY, keys[i].keys, keys[i].stride); \
        _tile_dpbf16ps(to, MANY, FIRST_QUERY); \
        for (int64_t tile = 1; tile < tiles; tile++) { \
            if (tiles > 2) \
                _tile_loadd(SECOND_QUERY, f->query[tile], 4 * FOUR_QUERIES); \
            _tile_loadd(MANY, keys[i].keys + tile * 64, keys[i].stride); \
            _tile_dpbf16ps(to, MANY, SECOND_QUERY); \
        } \
        _tile_stored(to, scores[i], 4 * FOUR_QUERIES); \
    } while (0)
    for (int i = step.first; i < step.last; i += 2) {
        SCORE(EVEN_SCORES, i);
        if (i + 1 < step.last)
            SCORE(ODD_SCORES, i + 1);
    }
#undef SCORE
}

/* Scores of 16 keys, a vector for each query. */
static inline void turn_four(const float (*scores)[FOUR_QUERIES], __m512 *queries) {
    __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512 line[4], low[2], high[2];
    for (int i = 0; i < 4; i++)
        line[i] = _mm512_loadu_ps(scores[4 * i]);
    for (int i = 0; i < 2; i++) {
        low[i] = _mm512_unpacklo_ps(line[2 * i], line[2 * i + 1]);
        high[i] = _mm512_unpackhi_ps(line[2 * i], line[2 * i + 1]);
    }
    __m512d a = (__m512d)low[0], b = (__m512d)low[1], c = (__m512d)high[0], d = (__m512d)high[1];
    queries[0] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpacklo_pd(a, b));
    queries[1] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpackhi_pd(a, b));
    queries[2] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpacklo_pd(c, d));
    queries[3] = _mm512_permutexvar_ps(order, (__m512)_mm512_unpackhi_pd(c, d));
}

/* Weights of a step for the unit of tiles, rounded; query q sees keys from[q]..to[q] of the step. top: as
   a power of 2. kept: how much remains of what the query has summed. */
static inline __attribute__((always_inline)) void
weigh_four(int count, four_step step, const float (*scores)[16][FOUR_QUERIES], float scale,
           float softcap, const int64_t *from, const int64_t *to, float *top, v16f *total,
           uint32_t (*weights)[2 * FOUR_QUERIES][LANES], float *kept) {
    int first = step.first, last = step.last;
    float factor = softcap > 0 ? LOG2_E : scale * LOG2_E;
    __m512 score[FOUR_GROUPS][FOUR_QUERIES], nothing = _mm512_set1_ps(NOTHING);
    for (int i = 0; i < FOUR_GROUPS; i++)
        if (i >= first && i < last)
            turn_four(scores[i], score[i]);
        else
            for (int q = 0; q < FOUR_QUERIES; q++)
                score[i][q] = nothing;
    for (int q = 0; q < count; q++) {
        __m512 best = nothing, sum = _mm512_setzero_ps();
        __mmask16 visible[FOUR_GROUPS];
        int sees_all = from[q] <= 16 * first && to[q] >= 16 * last;
        for (int i = 0; i < FOUR_GROUPS; i++) {
            visible[i] = sees_all ? 0xffff : seen(16 * i, from[q], to[q]);
            if (i < first || i >= last)
                visible[i] = 0;
            if (softcap > 0)
                score[i][q] = (__m512)capped((v16f)score[i][q], scale, softcap);
            score[i][q] = _mm512_mul_ps(score[i][q], _mm512_set1_ps(factor));
            score[i][q] = _mm512_mask_mov_ps(nothing, visible[i], score[i][q]);
            best = _mm512_max_ps(best, score[i][q]);
        }
        float before = top[q], now = _mm512_reduce_max_ps(best);
        if (now > before)
            top[q] = now;
        else
            now = before;
        for (int i = 0; i < FOUR_GROUPS; i++) {
            __m512 weight = power_of_2(_mm512_sub_ps(score[i][q], _mm512_set1_ps(now)));
            weight = _mm512_maskz_mov_ps(visible[i], weight);
            sum = _mm512_add_ps(sum, weight);
            __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weight));
            _mm512_storeu_si512(weights[i][q], bits);
            _mm512_storeu_si512(weights[i][FOUR_QUERIES + q], _mm512_slli_epi32(bits, 16));
        }
        kept[q] = _mm512_cvtss_f32(power_of_2(_mm512_set1_ps(before - now)));
        total[q] = total[q] * kept[q] + (v16f)sum;
    }
}

/* A step's share of the sums. */
static inline __attribute__((always_inline)) void
value_four(four_step step, int64_t head_dim, const uint32_t (*weights)[2 * FOUR_QUERIES][LANES],
           four_memory *f) {
    for (int64_t tile = 0; tile < head_dim / 32; tile += 2) {
        int has_second = tile + 1 < head_dim / 32;
        _tile_zero(FIRST_SUMS);
        _tile_zero(SECOND_SUMS);
        for (int i = step.first; i < step.last; i++) {
            const char *values = step.groups[i].values + tile * 64;
            _tile_loadd(WEIGHTS, weights[i], 64);
            _tile_loadd(MANY, values, step.groups[i].stride);
            _tile_dpbf16ps(FIRST_SUMS, WEIGHTS, MANY);
            if (has_second) {
                _tile_loadd(MANY, values + 64, step.groups[i].stride);
                _tile_dpbf16ps(SECOND_SUMS, WEIGHTS, MANY);
            }
        }
        _tile_stored(FIRST_SUMS, f->sums[tile], 64);
        if (has_second)
            _tile_stored(SECOND_SUMS, f->sums[tile + 1], 64);
    }
}

/* What value_four left, to what remains of the sums [count, dim_pad]. */
static inline void add_four(int64_t count, int64_t head_dim, const four_memory *f, const float *kept,
                           float *sums, int64_t dim_pad) {
    __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t q = 0; q < count; q++)
        for (int64_t tile = 0; tile < head_dim / 32; tile++) {
            __m512 even = _mm512_loadu_ps(f->sums[tile][q]);
            __m512 odd = _mm512_loadu_ps(f->sums[tile][FOUR_QUERIES + q]);
            float *to = sums + q * dim_pad + tile * 32;
            store_f32(to, load_f32(to) * kept[q] + (v16f)_mm512_permutex2var_ps(even, low, odd));
            to += LANES;
            store_f32(to, load_f32(to) * kept[q] + (v16f)_mm512_permutex2var_ps(even, high, odd));
        }
}

#endif
#endif
