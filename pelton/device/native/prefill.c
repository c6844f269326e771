/* Attention of long rows, of attention.h's two kinds: products in bfloat16 with float32 sums, by AMX tiles or AVX-512's
   dot products of pairs; the softmax in float32.

   A piece is some query tokens of a row, with the query heads of one key head: up to PIECE_QUERIES
   queries. It passes over its keys in steps of STEP. A step's keys and values are packed once for
   all of the piece's queries, as the right operands of a tile product:

       keys    [16 keys][32 dims]:   [dims / 2][16 keys][2 dims]
       values  [16 dims][32 keys]:   [keys / 2][16 dims][2 keys]

   Every code of quantised keys and values is a number of bfloat16, and is packed as that; a key's scale
   comes to its scores, a value's to its weights.

   Then, 32 queries at a time: scores, their weights, rounded to bfloat16, and the sums. Steps begin
   at multiples of STEP and a query's arithmetic is its own, so a token's result depends neither on
   the number of threads nor on its neighbours. */

#include "prefill.h"

#include "linear.h"

#ifndef __AVX512BF16__

int pelton_prefill_takes(const attention_args *args, int64_t query_len) {
    (void)args, (void)query_len;
    return 0;
}

int pelton_prefill(const attention_args *args) {
    (void)args;
    return 0;
}

#else

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>

#include "pool.h"
#include "softmax.h"
#include "tiles.h"
#include "vec.h"

#define STEP 128
#define BLOCK 32 /* queries whose scores are held at a time */
#define PIECE_QUERIES 256
/* Shorter rows fill too little of a tile, or pack keys for too few queries. */
#define MIN_QUERIES 24

typedef struct {
    int64_t row, first, count; /* tokens first..first + count of a row */
} piece;

typedef struct {
    attention_args a;
    int64_t group, dims; /* head_dim up to a multiple of 32 */
    int64_t num_queries; /* of a piece at most, up to a multiple of BLOCK */
    const piece *pieces;
    int64_t num_pieces, part_bytes;
    char *parts;
    float factor; /* of a score: so that its weight is a power of 2 */
    _Atomic int64_t next;
} job;

typedef struct {
    bf16 *query;   /* tiles [num_queries / 16][dims / 32] */
    bf16 *keys;    /* tiles [STEP / 16][dims / 32] */
    bf16 *values;  /* tiles [dims / 16][STEP / 32] */
    bf16 *weights; /* tiles [BLOCK / 16][STEP / 32] */
    float *scores; /* [BLOCK][STEP] */
    float *sums;   /* [num_queries][dims] */
    v16f *total;   /* [num_queries], to be summed over the lanes */
    float *top;    /* [num_queries] */
    float *scales; /* of codes: [2][STEP], the step's keys' and values' */
} memory;

/* Where a part's memory lies; with `at` NULL, how many bytes it takes. */
static int64_t lay_out(const job *j, char *at, memory *m) {
    char *start = at;
    int64_t bytes = (int64_t)sizeof(bf16), n = j->num_queries;
    m->query = (bf16 *)at, at += n * j->dims * bytes;
    m->keys = (bf16 *)at, at += STEP * j->dims * bytes;
    m->values = (bf16 *)at, at += STEP * j->dims * bytes;
    m->weights = (bf16 *)at, at += BLOCK * STEP * bytes;
    m->scores = (float *)at, at += BLOCK * STEP * (int64_t)sizeof(float);
    m->sums = (float *)at, at += n * j->dims * (int64_t)sizeof(float);
    m->total = (v16f *)at, at += n * (int64_t)sizeof(v16f);
    m->top = (float *)at, at += round_up(n, LANES) * (int64_t)sizeof(float);
    m->scales = (float *)at, at += 2 * STEP * (int64_t)sizeof(float);
    return at - start;
}

/* ---- products ---- */

/* c[32][32] of the tiles a[2][a_tiles] and b[2][b_tiles], the first num_tiles of each. */
static inline __attribute__((always_inline)) void
multiply_lanes(const bf16 *a, int64_t a_tiles, const bf16 *b, int64_t b_tiles, int64_t num_tiles,
               float *c, int64_t c_stride, int adds) {
    enum { ROWS = 8 };
    for (int row = 0; row < BLOCK; row += ROWS) {
        v16f sums[ROWS][2];
        float *to = c + row * c_stride;
        for (int r = 0; r < ROWS; r++)
            for (int side = 0; side < 2; side++)
                sums[r][side] = adds ? load_f32(to + r * c_stride + side * LANES) : (v16f){0};
        const bf16 *left = a + row / 16 * a_tiles * TILE + row % 16 * 32;
        for (int64_t tile = 0; tile < num_tiles; tile++)
            for (int pair = 0; pair < 16; pair++) {
                v16u first = *(const v16u *)(b + tile * TILE + pair * 32);
                v16u second = *(const v16u *)(b + (b_tiles + tile) * TILE + pair * 32);
                for (int r = 0; r < ROWS; r++) {
                    uint32_t both;
                    memcpy(&both, left + tile * TILE + r * 32 + pair * 2, sizeof both);
                    sums[r][0] = dot_pair(sums[r][0], first, both);
                    sums[r][1] = dot_pair(sums[r][1], second, both);
                }
            }
        for (int r = 0; r < ROWS; r++)
            for (int side = 0; side < 2; side++)
                store_f32(to + r * c_stride + side * LANES, sums[r][side]);
    }
}

#ifdef __AMX_BF16__
static inline __attribute__((always_inline)) void
multiply_tiles(const bf16 *a, int64_t a_tiles, const bf16 *b, int64_t b_tiles, int64_t num_tiles,
               float *c, int64_t c_stride, int adds) {
    float *below = c + 16 * c_stride;
    size_t stride = (size_t)c_stride * sizeof(float);
    if (adds) {
        _tile_loadd(0, c, stride);
        _tile_loadd(1, c + LANES, stride);
        _tile_loadd(2, below, stride);
        _tile_loadd(3, below + LANES, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        _tile_loadd(4, a + tile * TILE, 64);
        _tile_loadd(6, b + tile * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + (b_tiles + tile) * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + (a_tiles + tile) * TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + LANES, stride);
    _tile_stored(2, below, stride);
    _tile_stored(3, below + LANES, stride);
}
#endif

static inline void multiply(const job *j, const bf16 *a, int64_t a_tiles, const bf16 *b,
                            int64_t b_tiles, int64_t num_tiles, float *c, int64_t c_stride,
                            int adds) {
#ifdef __AMX_BF16__
    if (j->a.use_amx) {
        multiply_tiles(a, a_tiles, b, b_tiles, num_tiles, c, c_stride, adds);
        return;
    }
#endif
    (void)j;
    multiply_lanes(a, a_tiles, b, b_tiles, num_tiles, c, c_stride, adds);
}

/* ---- packing ---- */

/* 32 of the head's dims from `dim` on, 0 behind the last; key NULL: zeros. */
static inline __m512i line_of(const job *j, const bf16 *key, int64_t dim) {
    if (!key)
        return _mm512_setzero_si512();
    if (dim + 32 <= j->a.head_dim)
        return _mm512_loadu_si512(key + dim);
    return _mm512_maskz_loadu_epi16((1u << (j->a.head_dim - dim)) - 1, key + dim);
}

/* The same of a key or value as it is stored. */
static inline __m512i stored_line_of(const job *j, const char *key, int64_t dim) {
    int kind = j->a.kv_kind;
    if (!key || !are_codes(kind))
        return line_of(j, (const bf16 *)key, dim);
    __mmask32 there = (__mmask32)((1ull << least(32, j->a.head_dim - dim)) - 1);
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, key + dim));
    __m512 low, high;
    if (kind == IS_INT8) {
        low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(wide)));
        high = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(wide, 1)));
    } else {
        wide = many_half_codes(kind, wide);
        low = _mm512_cvtph_ps(_mm512_castsi512_si256(wide));
        high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(wide, 1));
    }
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

static void pack_keys(const job *j, const char *const *keys, bf16 *to) {
    int64_t tiles = j->dims / 32;
    for (int64_t tile = 0; tile < tiles; tile++) {
        __m512i lines[16];
        for (int i = 0; i < 16; i++)
            lines[i] = stored_line_of(j, keys[i], tile * 32);
        transpose(lines);
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(to + tile * TILE + i * 32, lines[i]);
    }
}

/* Two neighbours' values into each dim's line of `pair`, a multiple of 2 of the step's keys. */
static inline void pack_values(const job *j, const char *first, const char *second, int64_t pair,
                               bf16 *values) {
    static const uint16_t order[2][32] __attribute__((aligned(64))) = {
        {0,  32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8,  40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    bf16 *to = values + pair / 32 * TILE + pair % 32 / 2 * 32;
    for (int64_t dim = 0; dim < j->dims; dim += 32, to += 2 * (STEP / 32) * TILE) {
        __m512i a = stored_line_of(j, first, dim), b = stored_line_of(j, second, dim);
        _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(to + STEP / 32 * TILE, _mm512_permutex2var_epi16(a, high, b));
    }
}

/* Of keys first..last and their values, 0 for the others. */
static void read_scales(const job *j, int64_t head, const char *const *keys, int64_t first,
                        int64_t last, float *scales) {
    int64_t heads = j->a.num_kv_heads;
    int64_t to_key = (2 * heads - head) * j->a.head_dim + head * (int64_t)sizeof(bf16);
    memset(scales, 0, 2 * STEP * sizeof *scales);
    for (int64_t key = first; key < last; key++) {
        bf16 stored[2];
        memcpy(stored, keys[key] + to_key, sizeof *stored);
        memcpy(stored + 1, keys[key] + to_key + heads * (int64_t)sizeof(bf16), sizeof *stored);
        scales[key] = bf16_to_float(stored[0]);
        scales[STEP + key] = bf16_to_float(stored[1]);
    }
    for (int64_t i = 0; i < 2 * STEP; i += LANES)
        store_f32(scales + i, scale_lanes(j->a.kv_kind, load_f32(scales + i)));
}

/* Keys first..last of the step that begins at `base`, with those that stand beside them in a tile,
   of which nobody sees any. */
static void pack_step(const job *j, int64_t row, int64_t head, int64_t base, int64_t first,
                      int64_t last, memory m) {
    int64_t head_bytes = j->a.head_dim * (int64_t)stored_bytes(j->a.kv_kind);
    int64_t to_value = j->a.num_kv_heads * head_bytes;
    const char *keys[STEP] = {0};
    for (int64_t key = first; key < last;) {
        int64_t together, token_bytes;
        const char *from = key_at(&j->a, row, base + key, &together, &token_bytes);
        from += head * head_bytes;
        int64_t stop = key + least(last - key, together);
        for (; key < stop; key++, from += token_bytes)
            keys[key] = from;
    }
    if (are_codes(j->a.kv_kind))
        read_scales(j, head, keys, first, last, m.scales);
    for (int64_t key = first / 32 * 32; key < last; key += 32) {
        pack_keys(j, keys + key, m.keys + key * j->dims);
        pack_keys(j, keys + key + 16, m.keys + (key + 16) * j->dims);
        for (int64_t i = key; i < key + 32; i += 2)
            pack_values(j, keys[i] ? keys[i] + to_value : NULL,
                        keys[i + 1] ? keys[i + 1] + to_value : NULL, i, m.values);
    }
}

static void pack_queries(const job *j, const piece *p, int64_t head, bf16 *to) {
    int64_t count = p->count * j->group, tiles = j->dims / 32;
    const bf16 *query = (const bf16 *)j->a.query;
    int64_t token = j->a.query_start_loc[p->row] + p->first;
    for (int64_t i = 0; i < round_up(count, BLOCK); i++) {
        const bf16 *from = NULL;
        if (i < count)
            from = query + (token + i / j->group) * j->a.query_stride +
                   (head * j->group + i % j->group) * j->a.head_dim;
        for (int64_t tile = 0; tile < tiles; tile++)
            _mm512_store_si512(to + (i / 16 * tiles + tile) * TILE + i % 16 * 32,
                               line_of(j, from, tile * 32));
    }
}

/* ---- softmax ---- */

static __attribute__((noinline)) void cap(const job *j, float *scores, int64_t lo, int64_t hi) {
    for (int64_t key = lo; key < hi; key += LANES)
        store_f32(scores + key, capped(load_f32(scores + key), j->a.scale, j->a.softcap));
}

/* One query's scores of keys lo..hi of a step become weights; it sees from..to of them. What it has
   summed is scaled to the new top. weights: its line of a row of tiles. scales: [STEP], of values as
   codes, or NULL. */
static inline __attribute__((always_inline)) void
weigh(const job *j, const float *scores, int64_t lo, int64_t hi, int64_t from, int64_t to,
      const float *scales, bf16 *weights, float *top, v16f *total, float *sums) {
    __m512 nothing = _mm512_set1_ps(NOTHING), best = nothing;
    int sees_all = from <= lo && to >= hi;
    if (sees_all)
        for (int64_t key = lo; key < hi; key += 2 * LANES)
            best = _mm512_max_ps(best, _mm512_max_ps(_mm512_load_ps(scores + key),
                                                     _mm512_load_ps(scores + key + LANES)));
    else
        for (int64_t key = lo; key < hi; key += LANES)
            best = _mm512_mask_max_ps(best, seen(key, from, to), best, _mm512_load_ps(scores + key));
    float highest = _mm512_reduce_max_ps(best), old = *top;
    /* Times the factor only where there is a score: nothing is nothing in every scale. */
    highest = highest == NOTHING ? NOTHING : highest * j->factor;
    float new_top = highest > old ? highest : old;
    __m512 factor = _mm512_set1_ps(j->factor), off = _mm512_set1_ps(new_top);
    if (new_top != old) {
        __m512 kept = power_of_2(_mm512_set1_ps(old - new_top));
        *total = (v16f)_mm512_mul_ps((__m512)*total, kept);
        for (int64_t dim = 0; dim < j->dims; dim += LANES)
            _mm512_store_ps(sums + dim, _mm512_mul_ps(_mm512_load_ps(sums + dim), kept));
        *top = new_top;
    }
    __m512 first_sum = (__m512)*total, second_sum = _mm512_setzero_ps();
    for (int64_t key = lo; key < hi; key += 2 * LANES) {
        __m512 first = _mm512_fmsub_ps(_mm512_load_ps(scores + key), factor, off);
        __m512 second = _mm512_fmsub_ps(_mm512_load_ps(scores + key + LANES), factor, off);
        first = power_of_2(first);
        second = power_of_2(second);
        if (!sees_all) {
            first = _mm512_maskz_mov_ps(seen(key, from, to), first);
            second = _mm512_maskz_mov_ps(seen(key + LANES, from, to), second);
        }
        first_sum = _mm512_add_ps(first_sum, first);
        second_sum = _mm512_add_ps(second_sum, second);
        if (scales) {
            first = _mm512_mul_ps(first, _mm512_load_ps(scales + key));
            second = _mm512_mul_ps(second, _mm512_load_ps(scales + key + LANES));
        }
        _mm512_store_si512(weights + key / 32 * TILE,
                           (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    *total = (v16f)_mm512_add_ps(first_sum, second_sum);
}

/* ---- pieces ---- */

/* The keys that a token of a row sees: *start..*end. */
static inline void keys_of(const job *j, int64_t row, int64_t token, int64_t *start, int64_t *end) {
    keys_seen(&j->a, row, token, token + 1, start, end);
}

/* Queries first..first + BLOCK of a piece and the step of keys from `base` on. */
static void attend_block(const job *j, const piece *p, int64_t first, int64_t base, memory m) {
    int64_t tiles = j->dims / 32, count = least(BLOCK, p->count * j->group - first);
    int64_t lo, hi, none;
    keys_of(j, p->row, p->first + first / j->group, &lo, &none);
    keys_of(j, p->row, p->first + (first + count - 1) / j->group, &none, &hi);
    lo = most(lo - base, 0) / 32 * 32;
    hi = least(round_up(hi - base, 32), STEP);
    if (lo >= hi)
        return;
    for (int64_t key = lo; key < hi; key += 32)
        multiply(j, m.query + first * j->dims, tiles, m.keys + key * j->dims, tiles, tiles,
                 m.scores + key, STEP, 0);
    for (int64_t i = 0; i < BLOCK; i++) {
        int64_t query = first + i, from = 0, to = 0;
        bf16 *weights = m.weights + i / 16 * (STEP / 32) * TILE + i % 16 * 32;
        if (i >= count) {
            for (int64_t key = lo; key < hi; key += 32)
                _mm512_store_si512(weights + key / 32 * TILE, _mm512_setzero_si512());
            continue;
        }
        keys_of(j, p->row, p->first + query / j->group, &from, &to);
        float *scores = m.scores + i * STEP, *sums = m.sums + query * j->dims;
        int has_codes = are_codes(j->a.kv_kind);
        for (int64_t key = lo; has_codes && key < hi; key += LANES)
            store_f32(scores + key, load_f32(scores + key) * load_f32(m.scales + key));
        if (j->a.softcap > 0)
            cap(j, scores, lo, hi);
        if (has_codes)
            weigh(j, scores, lo, hi, from - base, to - base, m.scales + STEP, weights,
                  m.top + query, m.total + query, sums);
        else
            weigh(j, scores, lo, hi, from - base, to - base, NULL, weights, m.top + query,
                  m.total + query, sums);
    }
    for (int64_t dim = 0; dim < j->dims; dim += 32)
        multiply(j, m.weights + lo / 32 * TILE, STEP / 32,
                 m.values + (dim / 16 * (STEP / 32) + lo / 32) * TILE, STEP / 32, (hi - lo) / 32,
                 m.sums + first * j->dims + dim, j->dims, 1);
}

static void finish(const job *j, const piece *p, int64_t head, memory m) {
    int64_t token = j->a.query_start_loc[p->row] + p->first;
    for (int64_t i = 0; i < p->count * j->group; i++) {
        int64_t row = token + i / j->group, query_head = head * j->group + i % j->group, dim = 0;
        bf16 *out = (bf16 *)j->a.out + row * j->a.out_stride + query_head * j->a.head_dim;
        const float *sums = m.sums + i * j->dims;
        float total = sum_of_lanes(m.total[i]), share = total == 0 ? 0 : 1 / total;
        for (; dim + LANES <= j->a.head_dim; dim += LANES)
            store_bf16(out + dim, load_f32(sums + dim) * share);
        for (; dim < j->a.head_dim; dim++)
            out[dim] = float_to_bf16(sums[dim] * share);
        if (j->a.lse)
            j->a.lse[row * j->a.num_heads + query_head] = m.top[i] * LN_2 + logf(total);
    }
}

static void attend(const job *j, const piece *p, int64_t head, memory m) {
    int64_t count = p->count * j->group, start, end, none;
    pack_queries(j, p, head, m.query);
    memset(m.sums, 0, (size_t)(round_up(count, BLOCK) * j->dims) * sizeof *m.sums);
    for (int64_t i = 0; i < count; i++) {
        m.top[i] = NOTHING;
        m.total[i] = (v16f){0};
        if (j->a.sinks) {
            m.top[i] = j->a.sinks[head * j->group + i % j->group] * LOG2_E;
            m.total[i][0] = 1;
        }
    }
    keys_of(j, p->row, p->first, &start, &none);
    keys_of(j, p->row, p->first + p->count - 1, &none, &end);
    for (int64_t base = start / STEP * STEP; base < end; base += STEP) {
        pack_step(j, p->row, head, base, most(start - base, 0), least(end - base, STEP), m);
        for (int64_t first = 0; first < count; first += BLOCK)
            attend_block(j, p, first, base, m);
    }
    finish(j, p, head, m);
}

static void attend_part(void *argument, int part, int parts) {
    job *j = argument;
    memory m;
    (void)parts;
    lay_out(j, j->parts + part * j->part_bytes, &m);
#ifdef __AMX_BF16__
    if (j->a.use_amx)
        configure_tiles();
#endif
    int64_t item, num_items = j->num_pieces * j->a.num_kv_heads;
    /* The last piece of a prompt has the most keys: it comes first. */
    while ((item = atomic_fetch_add(&j->next, 1)) < num_items)
        attend(j, j->pieces + j->num_pieces - 1 - item / j->a.num_kv_heads, item % j->a.num_kv_heads,
               m);
#ifdef __AMX_BF16__
    if (j->a.use_amx)
        _tile_release();
#endif
}

int pelton_prefill_takes(const attention_args *args, int64_t query_len) {
    return args->dtype == IS_BF16 && args->scale > 0 &&
           query_len * (args->num_heads / args->num_kv_heads) >= MIN_QUERIES;
}

/* Pieces of so many tokens, into `pieces` unless that is NULL. Returns how many. */
static int64_t list_pieces(const attention_args *a, int64_t tokens, piece *pieces) {
    int64_t count = 0;
    for (int64_t row = 0; row < a->num_rows; row++) {
        int64_t length = a->query_start_loc[row + 1] - a->query_start_loc[row];
        if (!pelton_prefill_takes(a, length))
            continue;
        for (int64_t first = 0; first < length; first += tokens, count++)
            if (pieces)
                pieces[count] = (piece){row, first, least(tokens, length - first)};
    }
    return count;
}

int pelton_prefill(const attention_args *args) {
    job j = {.a = *args};
    int64_t parts = pelton_num_threads();
    j.group = args->num_heads / args->num_kv_heads;
    j.dims = round_up(args->head_dim, 32);
    j.factor = args->softcap > 0 ? LOG2_E : args->scale * LOG2_E;
    int64_t tokens = most(PIECE_QUERIES / j.group, 1);
    j.num_pieces = list_pieces(args, tokens, NULL);
    if (!j.num_pieces)
        return 0;
    /* Smaller pieces pack keys more often, but there should be some for every thread. */
    while (tokens > 1 && tokens * j.group > 2 * BLOCK && j.num_pieces * args->num_kv_heads < 4 * parts) {
        tokens = (tokens + 1) / 2;
        j.num_pieces = list_pieces(args, tokens, NULL);
    }
    j.num_queries = round_up(tokens * j.group, BLOCK);
    memory m;
    j.part_bytes = round_up(lay_out(&j, NULL, &m), 4096);
    j.parts = pelton_scratch((long)(parts * j.part_bytes + j.num_pieces * (int64_t)sizeof(piece)));
    if (!j.parts)
        return 1;
    piece *pieces = (piece *)(j.parts + parts * j.part_bytes);
    list_pieces(args, tokens, pieces);
    j.pieces = pieces;
    pelton_run(attend_part, &j);
    return 0;
}

#endif
