/* Attention over paged keys and values, straight from the blocks and causal, or over a step's own
   tokens, each of which sees all of its row. Rows that prefill.c takes are left to it.

   A tile is a few query tokens of a row, with the query heads of one key head: TILE_QUERIES in all or
   one token. It passes over its keys in tiles of 64: keys are turned, so that lanes are keys, and
   values stay as they are, so that lanes are dimensions; both become float32 in memory that stays in
   the cache, and from there every query head of the tile reads them. Up to four queries in bfloat16 go
   to AMX tiles instead (four.h), where the CPU has them.

   Few queries cost less than their keys' way from memory. So where there are rows enough, a thread
   takes all heads of a row, whose keys are one stream then, and asks for the next row's while it
   attends to this one's.

   Key tiles begin at multiples of 64 and chunks of them at multiples of KEY_CHUNK. A chunk's softmax
   starts anew, and chunks are merged in order, whoever computed them: so a token's result depends
   neither on the number of threads nor on its neighbours. Keys that a token does not see have weight
   0, which changes no bit of its sums.

   Of quantised keys and values the codes are what is multiplied. A key's scale comes to its scores, a
   value's to its weights. */

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>

#include "attention.h"
#include "element.h"
#include "four.h"
#include "pool.h"
#include "prefill.h"
#include "softmax.h"
#include "vec.h"

#define KEY_TILE 64
#define KEY_VECTORS (KEY_TILE / LANES)
#define KEY_CHUNK 512
#define TILE_QUERIES 48
#define QUERY_BLOCK 6 /* sums of so many queries, WIDTH vectors each, stay in registers */
#ifdef __AVX512F__
#define WIDTH 4
#else
#define WIDTH 1
#endif

/* Tokens first..first + count of a row, and the chunks of keys that one part computes. */
typedef struct {
    int64_t row, first, count, first_chunk, last_chunk;
} tile;

typedef struct {
    attention_args a;
    int64_t group, dim_pad, num_queries; /* of a tile at most, in heads */
    int is_by_row;                       /* a part takes all heads of a tile, else one */
    int64_t heads_at_once;
    tile *tiles;
    int64_t num_tiles;
    int64_t num_whole; /* tiles before their keys were split; what merges reads runs of tiles */
    int64_t *whole;    /* [num_whole + 1]: first tile of each, or NULL where none was split */
    char *states;      /* [num_tiles, Hk], where tiles are split */
    int64_t state_floats, part_floats;
    float *parts; /* each of part_floats, and four_memory at its begin */
    _Atomic int64_t next;
} job;

/* Of a tile's keys and values. */
typedef struct {
    v16f keys[KEY_VECTORS], values[KEY_VECTORS];
} scales;

/* A softmax under way over num_queries queries. */
typedef struct {
    float *top;  /* [num_queries] */
    v16f *total; /* [num_queries], to be summed over the lanes */
    float *sums; /* [num_queries, dim_pad] */
} state;

static inline float max_of_lanes(v16f value) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)value);
#else
    float top = value[0];
    for (int i = 1; i < LANES; i++)
        top = value[i] > top ? value[i] : top;
    return top;
#endif
}

static inline float exp_of(float x) { return exp_v16(splat(x))[0]; }

static inline state state_at(const job *j, float *memory) {
    int64_t padded = round_up(j->num_queries, LANES);
    return (state){memory, (v16f *)(memory + padded), memory + padded + j->num_queries * LANES};
}

static void clear(const job *j, state s, int64_t num_queries) {
    for (int64_t m = 0; m < num_queries; m++) {
        s.top[m] = NOTHING;
        s.total[m] = (v16f){0};
    }
    memset(s.sums, 0, (size_t)(num_queries * j->dim_pad) * sizeof(float));
}

/* ---- keys and values into the cache ---- */

#ifdef __AVX512F__
/* Dims that a line of 64 bytes holds; codes are widened to 16 bits for it. */
static inline __attribute__((always_inline)) int dims_of_line(int kind) {
    return kind == IS_F32 ? LANES : 2 * LANES;
}

static inline __attribute__((always_inline)) __m512i line_of(int kind, const char *key) {
    if (!are_codes(kind))
        return _mm512_loadu_si512(key);
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)key));
    return kind == IS_INT8 ? wide : many_half_codes(kind, wide);
}

/* Lines of 16 keys, from dim `dim` on, turned: each has a dim of every key, or two. */
static inline __attribute__((always_inline)) void
turned_lines(int kind, const void *const *keys, int64_t dim, __m512i *lines) {
    for (int i = 0; i < 16; i++)
        lines[i] = line_of(kind, (const char *)keys[i] + (size_t)dim * stored_bytes(kind));
    transpose(lines);
}

/* The numbers of a turned line's first dim, or of its second. */
static inline __attribute__((always_inline)) v16f dim_of(int kind, __m512i line, int second) {
    if (kind == IS_F32)
        return (v16f)line;
    if (kind == IS_BF16)
        return second ? (v16f)((v16u)line & 0xffff0000u) : (v16f)((v16u)line << 16);
    if (kind == IS_INT8)
        return (v16f)_mm512_cvtepi32_ps(
            _mm512_srai_epi32(second ? line : _mm512_slli_epi32(line, 16), 16));
    return (v16f)_mm512_cvtph_ps(
        _mm512_cvtepi32_epi16(second ? _mm512_srli_epi32(line, 16) : line));
}
#endif

/* keys[0..16] of head_dim elements each, into turned[dim][KEY_TILE] at 16 of its lanes. */
static void turn_keys(const job *j, const void *const *keys, float *turned) {
    int64_t dim = 0, head_dim = j->a.head_dim;
#ifdef __AVX512F__
    int kind = j->a.kv_kind, unit = dims_of_line(kind);
    for (; dim + unit <= head_dim; dim += unit) {
        __m512i lines[16];
        turned_lines(kind, keys, dim, lines);
        for (int i = 0; i < unit; i++)
            store_f32(turned + (dim + i) * KEY_TILE,
                      dim_of(kind, lines[i / (unit / LANES)], i % (unit / LANES)));
    }
#endif
    for (; dim < head_dim; dim++)
        for (int i = 0; i < LANES; i++)
            turned[dim * KEY_TILE + i] = stored_one(j->a.kv_kind, keys[i], dim);
}

/* `from` of head_dim elements, times scale, into to[dim_pad], 0 behind. */
static inline void widen(const job *j, int kind, const void *from, float scale, float *to) {
    int64_t dim = 0, head_dim = j->a.head_dim;
    for (; dim + LANES <= head_dim; dim += LANES)
        store_f32(to + dim, scale * stored_lanes(kind, from, dim));
    for (; dim < j->dim_pad; dim++) {
        float value = 0;
        if (dim < head_dim)
            value = stored_one(kind, from, dim);
        to[dim] = scale * value;
    }
}

/* ---- products ---- */

/* scores[m][keys of `width` vectors] = query[m] . turned */
static inline __attribute__((always_inline)) void
score_block(int count, int width, const float *query, int64_t dim_pad, int64_t head_dim,
            const float *turned, float *scores) {
    v16f sums[QUERY_BLOCK][WIDTH];
    for (int m = 0; m < count; m++)
        for (int w = 0; w < width; w++)
            sums[m][w] = (v16f){0};
    for (int64_t dim = 0; dim < head_dim; dim++) {
        v16f line[WIDTH];
        for (int w = 0; w < width; w++)
            line[w] = load_f32(turned + dim * KEY_TILE + w * LANES);
        for (int m = 0; m < count; m++)
            for (int w = 0; w < width; w++)
                sums[m][w] += line[w] * query[m * dim_pad + dim];
    }
    for (int m = 0; m < count; m++)
        for (int w = 0; w < width; w++)
            store_f32(scores + m * KEY_TILE + w * LANES, sums[m][w]);
}

/* sums[m][dims of `width` vectors] += weights[m][first..last] . values */
static inline __attribute__((always_inline)) void
value_block(int count, int width, const float *weights, int64_t first, int64_t last,
            const float *values, int64_t dim_pad, float *to) {
    v16f sums[QUERY_BLOCK][WIDTH];
    for (int m = 0; m < count; m++)
        for (int w = 0; w < width; w++)
            sums[m][w] = load_f32(to + m * dim_pad + w * LANES);
    for (int64_t key = first; key < last; key++) {
        v16f line[WIDTH];
        for (int w = 0; w < width; w++)
            line[w] = load_f32(values + key * dim_pad + w * LANES);
        for (int m = 0; m < count; m++)
            for (int w = 0; w < width; w++)
                sums[m][w] += line[w] * weights[m * KEY_TILE + key];
    }
    for (int m = 0; m < count; m++)
        for (int w = 0; w < width; w++)
            store_f32(to + m * dim_pad + w * LANES, sums[m][w]);
}

#define EACH_COUNT(call) \
    switch (count) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6); \
    }

static void score_queries(const job *j, const float *query, int64_t num_queries,
                          const float *turned, float *scores) {
    for (int64_t m = 0; m < num_queries; m += QUERY_BLOCK) {
        int count = (int)least(QUERY_BLOCK, num_queries - m);
        for (int v = 0; v < KEY_VECTORS; v += WIDTH) {
#define CALL(n) \
    score_block(n, WIDTH, query + m * j->dim_pad, j->dim_pad, j->a.head_dim, turned + v * LANES, \
                scores + m * KEY_TILE + v * LANES)
            EACH_COUNT(CALL)
#undef CALL
        }
    }
}

static void add_values(const job *j, const float *weights, int64_t num_queries, int64_t first,
                       int64_t last, const float *values, float *sums) {
    for (int64_t m = 0; m < num_queries; m += QUERY_BLOCK) {
        int count = (int)least(QUERY_BLOCK, num_queries - m);
        int64_t dim = 0;
#define CALL_WIDTH(n, width) \
    value_block(n, width, weights + m * KEY_TILE, first, last, values + dim, j->dim_pad, \
                sums + m * j->dim_pad + dim)
#define CALL(n) CALL_WIDTH(n, WIDTH)
        for (; dim + WIDTH * LANES <= j->dim_pad; dim += WIDTH * LANES)
            EACH_COUNT(CALL)
#undef CALL
#define CALL(n) CALL_WIDTH(n, 1)
        for (; dim < j->dim_pad; dim += LANES)
            EACH_COUNT(CALL)
#undef CALL
    }
}

/* One query's scores of a tile become weights; what it had is scaled to the new top. first..last:
   the keys of the tile that it sees. s: of keys and values as codes, else NULL. */
static __attribute__((noinline)) void weigh(const job *j, float *scores, int64_t first,
                                            int64_t last, const scales *s, float *top, v16f *total,
                                            float *sums) {
    static const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16f score[KEY_VECTORS], best = splat(*top), softcap = splat(j->a.softcap);
    v16i seen[KEY_VECTORS];
    for (int v = 0; v < KEY_VECTORS; v++) {
        v16i key = lanes + v * LANES;
        seen[v] = (key >= (int32_t)first) & (key < (int32_t)last);
        score[v] = load_f32(scores + v * LANES);
        if (s)
            score[v] *= s->keys[v];
        if (j->a.softcap > 0) {
            v16f twice = score[v] * (2.0f / j->a.softcap);
            score[v] = softcap * (1.0f - 2.0f / (exp_v16(twice) + 1.0f));
        }
        v16f visible = blend(seen[v], score[v], splat(NOTHING));
        best = blend(visible > best, visible, best);
    }
    float new_top = max_of_lanes(best);
    v16f added = {0};
    for (int v = 0; v < KEY_VECTORS; v++) {
        v16f weight = blend(seen[v], exp_v16(score[v] - new_top), (v16f){0});
        added += weight;
        if (s)
            weight *= s->values[v];
        store_f32(scores + v * LANES, weight);
    }
    float kept = exp_of(*top - new_top);
    *total = *total * kept + added;
    if (new_top != *top)
        for (int64_t dim = 0; dim < j->dim_pad; dim += LANES)
            store_f32(sums + dim, load_f32(sums + dim) * kept);
    *top = new_top;
}

/* ---- few queries ---- */

#ifdef __AVX512F__
/* Queries so few that what they do with a key or value costs less than its way through memory as
   float32: keys are turned in registers, values widened there. The sums are those of above, in the
   same order. */
static inline int are_few(int64_t num_queries, int64_t head_dim) {
    return num_queries <= QUERY_BLOCK && head_dim % (2 * LANES) == 0;
}

/* scores[m][0..16] of 16 keys. */
static inline __attribute__((always_inline)) void
score_keys(int count, int kind, const void *const *keys, const float *query, int64_t dim_pad,
           int64_t head_dim, float *scores) {
    v16f sums[QUERY_BLOCK];
    int per_line = dims_of_line(kind) / LANES;
    for (int m = 0; m < count; m++)
        sums[m] = (v16f){0};
    for (int64_t dim = 0; dim < head_dim; dim += dims_of_line(kind)) {
        __m512i lines[16];
        turned_lines(kind, keys, dim, lines);
        /* Unrolled it is no faster, and takes the compiler three times as long. */
#pragma GCC unroll 1
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < per_line; k++) {
                v16f line = dim_of(kind, lines[i], k);
                for (int m = 0; m < count; m++)
                    sums[m] += line * query[m * dim_pad + dim + i * per_line + k];
            }
    }
    for (int m = 0; m < count; m++)
        store_f32(scores + m * KEY_TILE, sums[m]);
}

/* sums[m][0..32] += weights[m][first..last] . values, which lie to_value bytes behind the keys. */
static inline __attribute__((always_inline)) void
sum_values(int count, int kind, const float *weights, int64_t first, int64_t last,
           const void *const *keys, size_t to_value, int64_t dim_pad, float *to) {
    v16f sums[QUERY_BLOCK][2];
    for (int m = 0; m < count; m++)
        for (int w = 0; w < 2; w++)
            sums[m][w] = load_f32(to + m * dim_pad + w * LANES);
    for (int64_t key = first; key < last; key++) {
        const char *value = (const char *)keys[key] + to_value;
        v16f line[2] = {stored_lanes(kind, value, 0), stored_lanes(kind, value, LANES)};
        for (int m = 0; m < count; m++)
            for (int w = 0; w < 2; w++)
                sums[m][w] += line[w] * weights[m * KEY_TILE + key];
    }
    for (int m = 0; m < count; m++)
        for (int w = 0; w < 2; w++)
            store_f32(to + m * dim_pad + w * LANES, sums[m][w]);
}

#define BY_KIND(kind, function, count, ...) \
    (kind == IS_BF16   ? function(count, IS_BF16, __VA_ARGS__) \
     : kind == IS_F16  ? function(count, IS_F16, __VA_ARGS__) \
     : kind == IS_F32  ? function(count, IS_F32, __VA_ARGS__) \
     : kind == IS_INT8 ? function(count, IS_INT8, __VA_ARGS__) \
     : kind == IS_E4M3 ? function(count, IS_E4M3, __VA_ARGS__) \
                       : function(count, IS_E5M2, __VA_ARGS__))

static void score_few(const job *j, const float *query, int64_t count, int64_t first, int64_t last,
                      const void *const *keys, float *scores) {
    for (int64_t key = first / LANES * LANES; key < last; key += LANES) {
#define CALL(n) \
    BY_KIND(j->a.kv_kind, score_keys, n, keys + key, query, j->dim_pad, j->a.head_dim, scores + key)
        EACH_COUNT(CALL)
#undef CALL
    }
}

static void sum_few(const job *j, const float *weights, int64_t count, int64_t first, int64_t last,
                    const void *const *keys, float *sums) {
    size_t element = stored_bytes(j->a.kv_kind);
    size_t to_value = (size_t)(j->a.num_kv_heads * j->a.head_dim) * element;
    for (int64_t dim = 0; dim < j->a.head_dim; dim += 2 * LANES) {
#define CALL(n) \
    BY_KIND(j->a.kv_kind, sum_values, n, weights, first, last, keys, \
            to_value + (size_t)dim * element, j->dim_pad, sums + dim)
        EACH_COUNT(CALL)
#undef CALL
    }
}
#endif

/* ---- tiles ---- */

/* The keys of a chunk that the tokens of a tile see together: *start..*end. */
static inline void chunk_keys(const job *j, const tile *t, int64_t chunk, int64_t *start,
                              int64_t *end) {
    keys_seen(&j->a, t->row, t->first, t->first + t->count, start, end);
    *start = most(*start, chunk * KEY_CHUNK);
    *end = least(*end, (chunk + 1) * KEY_CHUNK);
}

typedef struct {
    float *query, *turned, *values, *scores;
    state chunk, whole;
#ifdef __AMX_BF16__
    four_memory *four;
#endif
} memory;

static memory memory_of(const job *j, int part) {
    float *at = j->parts + part * j->part_floats;
    memory m;
#ifdef __AMX_BF16__
    m.four = (four_memory *)at;
    at += sizeof *m.four / sizeof *at;
#endif
    m.query = at;
    m.turned = m.query + j->num_queries * j->dim_pad;
    m.values = m.turned + KEY_TILE * j->dim_pad;
    m.scores = m.values + KEY_TILE * j->dim_pad;
    m.chunk = state_at(j, m.scores + j->num_queries * KEY_TILE);
    m.whole = state_at(j, m.scores + j->num_queries * KEY_TILE + j->state_floats);
    return m;
}

/* Of head i of those that a part takes at once. */
static inline state whole_state(const job *j, memory m, int64_t i) {
    return state_at(j, m.whole.top + i * j->state_floats);
}

/* Of keys first..last of a tile, by way of memory; their values come along. */
static void score_tile(const job *j, int64_t num_queries, int64_t first, int64_t last,
                       const void *const *keys, memory m) {
    int kind = j->a.kv_kind;
    size_t to_value = (size_t)(j->a.num_kv_heads * j->a.head_dim) * stored_bytes(kind);
    for (int64_t key = first / LANES * LANES; key < last; key += LANES)
        turn_keys(j, keys + key, m.turned + key);
    for (int64_t key = first; key < last; key++)
        widen(j, kind, (const char *)keys[key] + to_value, 1, m.values + key * j->dim_pad);
    score_queries(j, m.query, num_queries, m.turned, m.scores);
}

/* Of the tile's `keys`, codes of key head `head`. */
static void read_scales(const job *j, int64_t head, const void *const *keys, scales *s) {
    size_t num_heads = (size_t)j->a.num_kv_heads;
    size_t to_key = (2 * num_heads - (size_t)head) * (size_t)j->a.head_dim + (size_t)head * sizeof(bf16);
    for (int i = 0; i < KEY_TILE; i++) {
        bf16 of_key, of_value;
        const char *at = (const char *)keys[i] + to_key;
        memcpy(&of_key, at, sizeof of_key);
        memcpy(&of_value, at + num_heads * sizeof(bf16), sizeof of_value);
        s->keys[i / LANES][i % LANES] = bf16_to_float(of_key);
        s->values[i / LANES][i % LANES] = bf16_to_float(of_value);
    }
    for (int v = 0; v < KEY_VECTORS; v++) {
        s->keys[v] = scale_lanes(j->a.kv_kind, s->keys[v]);
        s->values[v] = scale_lanes(j->a.kv_kind, s->values[v]);
    }
}

static void attend_chunk(const job *j, const tile *t, int64_t head, int64_t chunk, memory m,
                         state s) {
    int64_t num_queries = t->count * j->group, start, end;
    int kind = j->a.kv_kind;
    size_t head_bytes = (size_t)j->a.head_dim * stored_bytes(kind);
    size_t to_value = (size_t)j->a.num_kv_heads * head_bytes;
    scales of_codes, *tile_scales = are_codes(kind) ? &of_codes : NULL;
    clear(j, s, num_queries);
    chunk_keys(j, t, chunk, &start, &end);
    for (int64_t base = start / KEY_TILE * KEY_TILE; base < end; base += KEY_TILE) {
        int64_t first = most(start - base, 0), last = least(end - base, KEY_TILE);
        const void *keys[KEY_TILE];
        for (int64_t key = first; key < last;) {
            int64_t together, token_bytes;
            const char *from = key_at(&j->a, t->row, base + key, &together, &token_bytes);
            from += (size_t)head * head_bytes;
            int64_t stop = key + least(last - key, together);
            for (; key < stop; key++, from += token_bytes) {
                keys[key] = from;
                for (size_t byte = 0; byte < head_bytes; byte += 64) {
                    __builtin_prefetch(from + byte);
                    __builtin_prefetch(from + to_value + byte);
                }
            }
        }
        /* Where nobody looks, any key of the tile stands in. */
        for (int64_t key = 0; key < first; key++)
            keys[key] = keys[first];
        for (int64_t key = last; key < KEY_TILE; key++)
            keys[key] = keys[first];
        if (tile_scales)
            read_scales(j, head, keys, tile_scales);
#ifdef __AVX512F__
        int is_few = are_few(num_queries, j->a.head_dim);
        if (is_few)
            score_few(j, m.query, num_queries, first, last, keys, m.scores);
        else
#endif
            score_tile(j, num_queries, first, last, keys, m);
        for (int64_t token = 0; token < t->count; token++) {
            int64_t from, to;
            keys_seen(&j->a, t->row, t->first + token, t->first + token + 1, &from, &to);
            for (int64_t i = token * j->group; i < (token + 1) * j->group; i++)
                weigh(j, m.scores + i * KEY_TILE, from - base, to - base, tile_scales, s.top + i,
                      s.total + i, s.sums + i * j->dim_pad);
        }
#ifdef __AVX512F__
        if (is_few)
            sum_few(j, m.scores, num_queries, first, last, keys, s.sums);
        else
#endif
            add_values(j, m.scores, num_queries, first, last, m.values, s.sums);
    }
}

#ifdef __AMX_BF16__
/* Keys key..end of a row that come next, with their values: `share` of them are asked for at a time. */
typedef struct {
    int64_t row, key, end, share, head, num_heads;
} ahead;

static inline void fetch(const job *j, ahead *next) {
    int64_t head_bytes = j->a.head_dim * (int64_t)sizeof(bf16);
    int64_t to_value = j->a.num_kv_heads * head_bytes, width = next->num_heads * head_bytes;
    int64_t end = least(next->end, next->key + next->share), together, stride;
    while (next->key < end) {
        const char *from = key_at(&j->a, next->row, next->key, &together, &stride);
        int64_t stop = next->key + least(end - next->key, together);
        from += next->head * head_bytes;
        /* In the order of addresses, which the hardware follows, further ahead. */
        for (; next->key < stop; next->key++, from += stride) {
            for (int64_t byte = 0; byte < width; byte += 64)
                __builtin_prefetch(from + byte, 0, 2);
            for (int64_t byte = 0; byte < width; byte += 64)
                __builtin_prefetch(from + to_value + byte, 0, 2);
        }
    }
}

static inline int are_four(const job *j, int64_t num_queries) {
    return j->a.use_amx && j->a.dtype == IS_BF16 && j->a.kv_kind == IS_BF16 &&
           num_queries <= FOUR_QUERIES && j->a.head_dim % 32 == 0 && j->a.head_dim <= FOUR_DIMS &&
           (!j->a.block_table || j->a.block_size % 16 == 0);
}

/* Keys first..last of a group of 16 and their values, copied to where nothing lies beside them. */
static four_keys copied(const job *j, four_keys group, int64_t first, int64_t last,
                        bf16 (*to)[16 * FOUR_DIMS]) {
    size_t bytes = (size_t)j->a.head_dim * sizeof(bf16);
    memset(to[0], 0, 16 * bytes), memset(to[1], 0, 16 * bytes);
    for (int64_t key = first; key < last; key++) {
        memcpy(to[0] + key * j->a.head_dim, group.keys + (size_t)key * group.stride, bytes);
        memcpy(to[1] + key * j->a.head_dim, group.values + (size_t)key * group.stride, bytes);
    }
    return (four_keys){(char *)to[0], (char *)to[1], bytes};
}

/* Step i of a chunk's keys start..end, of which the first step begins at `begin`. */
static inline four_step step_of(const four_keys *groups, int64_t begin, int64_t start, int64_t end,
                                int64_t i) {
    int64_t base = begin + i * FOUR_KEYS;
    return (four_step){groups + i * FOUR_GROUPS, (int)(most(start - base, 0) / 16),
                       (int)((least(end - base, FOUR_KEYS) + 15) / 16)};
}

static void attend_four(const job *j, const tile *t, int64_t head, int64_t chunk, four_memory *f,
                        ahead *next, state s) {
    int64_t count = t->count * j->group, start, end, from[FOUR_QUERIES], to[FOUR_QUERIES];
    size_t to_value = (size_t)(j->a.num_kv_heads * j->a.head_dim) * sizeof(bf16);
    four_keys groups[KEY_CHUNK / 16];
    clear(j, s, count);
    chunk_keys(j, t, chunk, &start, &end);
    if (start >= end)
        return;
    int64_t begin = start / FOUR_KEYS * FOUR_KEYS, num_steps = (end - begin + FOUR_KEYS - 1) / FOUR_KEYS;
    for (int64_t key = start / 16 * 16; key < end; key += 16) {
        four_keys *group = groups + (key - begin) / 16;
        int64_t together, stride;
        group->keys = key_at(&j->a, t->row, key, &together, &stride);
        group->keys += (size_t)(head * j->a.head_dim) * sizeof(bf16);
        group->values = group->keys + to_value;
        group->stride = (size_t)stride;
        if (key < start || key + 16 > end)
            *group = copied(j, *group, most(start - key, 0), least(end - key, 16), f->edges[key < start]);
    }
    for (int64_t q = 0; q < count; q++)
        keys_seen(&j->a, t->row, t->first + q / j->group, t->first + q / j->group + 1, from + q, to + q);
    /* In turn i: scores of step i, weights of i - 1, sums of i - 2, which i + 1 adds up. */
    for (int64_t i = 0; i < num_steps + 3; i++) {
        if (i < num_steps)
            score_four(step_of(groups, begin, start, end, i), j->a.head_dim, f, f->scores[i % 2]);
        fetch(j, next);
        if (i >= 3)
            add_four(count, j->a.head_dim, f, f->kept[(i - 3) % 2], s.sums, j->dim_pad);
        if (i >= 1 && i <= num_steps) {
            four_step step = step_of(groups, begin, start, end, i - 1);
            int64_t base = begin + (i - 1) * FOUR_KEYS, first[FOUR_QUERIES], last[FOUR_QUERIES];
            for (int64_t q = 0; q < count; q++)
                first[q] = from[q] - base, last[q] = to[q] - base;
#define CALL(n) \
    case n: \
        weigh_four(n, step, f->scores[(i - 1) % 2], j->a.scale, j->a.softcap, first, last, s.top, \
                   s.total, f->weights[(i - 1) % 2], f->kept[(i - 1) % 2]); \
        break;
            switch (count) { CALL(1) CALL(2) CALL(3) CALL(4) }
#undef CALL
        }
        fetch(j, next);
        if (i >= 2 && i < num_steps + 2)
            value_four(step_of(groups, begin, start, end, i - 2), j->a.head_dim, f->weights[(i - 2) % 2],
                       f);
        fetch(j, next);
    }
    for (int64_t q = 0; q < count; q++)
        if (s.top[q] != NOTHING)
            s.top[q] *= LN_2; /* as the others have it */
}
#endif

static __attribute__((noinline)) void merge(const job *j, state into, state from,
                                            int64_t num_queries) {
    for (int64_t m = 0; m < num_queries; m++) {
        float top = from.top[m] > into.top[m] ? from.top[m] : into.top[m];
        float kept = exp_of(into.top[m] - top), added = exp_of(from.top[m] - top);
        into.top[m] = top;
        into.total[m] = into.total[m] * kept + from.total[m] * added;
        for (int64_t dim = m * j->dim_pad; dim < (m + 1) * j->dim_pad; dim += LANES)
            store_f32(into.sums + dim,
                      load_f32(into.sums + dim) * kept + load_f32(from.sums + dim) * added);
    }
}

static void begin(const job *j, const tile *t, int64_t head, state s) {
    clear(j, s, t->count * j->group);
    for (int64_t m = 0; j->a.sinks && m < t->count * j->group; m++) {
        s.top[m] = j->a.sinks[head * j->group + m % j->group];
        s.total[m][0] = 1;
    }
}

static void finish(const job *j, const tile *t, int64_t head, state s) {
    int64_t token = j->a.query_start_loc[t->row] + t->first;
    for (int64_t m = 0; m < t->count * j->group; m++) {
        int64_t row = token + m / j->group, query_head = head * j->group + m % j->group;
        int64_t start = row * j->a.out_stride + query_head * j->a.head_dim, dim = 0;
        float total = sum_of_lanes(s.total[m]), share = total == 0 ? 0 : 1 / total;
        const float *sums = s.sums + m * j->dim_pad;
        for (; dim + LANES <= j->a.head_dim; dim += LANES)
            set_lanes(j->a.dtype, j->a.out, start + dim, load_f32(sums + dim) * share);
        for (; dim < j->a.head_dim; dim++)
            set_one(j->a.dtype, j->a.out, start + dim, sums[dim] * share);
        if (j->a.lse)
            j->a.lse[row * j->a.num_heads + query_head] = s.top[m] + logf(total);
    }
}

static state split_state(const job *j, int64_t index, int64_t head) {
    int64_t place = (index * j->a.num_kv_heads + head) * j->state_floats;
    return state_at(j, (float *)j->states + place);
}

/* The queries of a tile and one key head, times scale. */
static void widen_queries(const job *j, const tile *t, int64_t head, float *query) {
    size_t element = element_bytes(j->a.dtype);
    int64_t token = j->a.query_start_loc[t->row] + t->first;
    for (int64_t i = 0; i < t->count * j->group; i++) {
        int64_t place = (token + i / j->group) * j->a.query_stride +
                        (head * j->group + i % j->group) * j->a.head_dim;
        widen(j, j->a.dtype, (const char *)j->a.query + (size_t)place * element, j->a.scale,
              query + i * j->dim_pad);
    }
}

#ifdef __AMX_BF16__
static void pack_queries(const job *j, const tile *t, int64_t head, four_memory *f) {
    const bf16 *queries[FOUR_QUERIES];
    int64_t token = j->a.query_start_loc[t->row] + t->first;
    for (int64_t i = 0; i < t->count * j->group; i++)
        queries[i] = (const bf16 *)j->a.query + (token + i / j->group) * j->a.query_stride +
                     (head * j->group + i % j->group) * j->a.head_dim;
    pack_four(queries, t->count * j->group, j->a.head_dim, f);
}
#endif

/* What a part computes at a time: some heads of a tile. The last tile of a prompt has the most keys:
   it comes first. */
typedef struct {
    int64_t index, head;
    const tile *tile;
} item;

static inline item item_of(const job *j, int64_t number) {
    int64_t heads = j->a.num_kv_heads / j->heads_at_once;
    int64_t index = j->num_tiles - 1 - number / heads;
    return (item){index, number % heads * j->heads_at_once, j->tiles + index};
}

#ifdef __AMX_BF16__
/* What to ask for while a part attends to a chunk: where it takes one head, what comes soon; where it
   takes all, what it reads after this chunk, of `then` if that is another tile (NULL: nobody knows). */
static ahead ahead_of(const job *j, const item *now, int64_t chunk, const item *then) {
    const tile *t = now->tile;
    ahead next = {.head = now->head, .num_heads = j->heads_at_once};
    int64_t start, end;
    chunk_keys(j, t, chunk, &start, &end);
    if (!j->is_by_row) {
        next.row = t->row;
        next.key = start, next.end = end, next.share = 2 * FOUR_KEYS;
        fetch(j, &next);
        next.share = FOUR_KEYS / 3 + 1;
        return next;
    }
    int64_t turns = 3 * ((end - start) / FOUR_KEYS + 3) * j->heads_at_once;
    if (++chunk == t->last_chunk) {
        if (!then)
            return next;
        t = then->tile, chunk = t->first_chunk;
    }
    next.row = t->row;
    chunk_keys(j, t, chunk, &next.key, &next.end);
    next.share = (next.end - next.key + turns - 1) / turns;
    return next;
}
#endif

static void attend_heads(const job *j, const item *now, const item *then, memory m) {
    const tile *t = now->tile;
    int64_t num_queries = t->count * j->group;
    for (int64_t i = 0; i < j->heads_at_once; i++)
        if (!j->whole)
            begin(j, t, now->head + i, whole_state(j, m, i));
    for (int64_t chunk = t->first_chunk; chunk < t->last_chunk; chunk++) {
#ifdef __AMX_BF16__
        ahead next = {0};
        if (are_four(j, num_queries))
            next = ahead_of(j, now, chunk, then);
#else
        (void)then;
#endif
        for (int64_t i = 0; i < j->heads_at_once; i++) {
            int64_t head = now->head + i;
            state s = j->whole ? split_state(j, now->index, head) : m.chunk;
#ifdef __AMX_BF16__
            if (are_four(j, num_queries)) {
                pack_queries(j, t, head, m.four);
                attend_four(j, t, head, chunk, m.four, &next, s);
            } else
#endif
            {
                widen_queries(j, t, head, m.query);
                attend_chunk(j, t, head, chunk, m, s);
            }
            if (!j->whole)
                merge(j, whole_state(j, m, i), s, num_queries);
        }
    }
    for (int64_t i = 0; i < j->heads_at_once; i++)
        if (!j->whole)
            finish(j, t, now->head + i, whole_state(j, m, i));
}

static void attend_part(void *argument, int part, int parts) {
    job *j = argument;
    (void)parts;
    memory m = memory_of(j, part);
    int64_t num_items = j->num_tiles * (j->a.num_kv_heads / j->heads_at_once);
#ifdef __AMX_BF16__
    if (j->a.use_amx)
        configure_four();
#endif
    int64_t number = atomic_fetch_add(&j->next, 1);
    while (number < num_items) {
        item now = item_of(j, number), then;
        if (j->is_by_row)
            number = atomic_fetch_add(&j->next, 1);
        int is_known = j->is_by_row && number < num_items;
        if (is_known)
            then = item_of(j, number);
        attend_heads(j, &now, is_known ? &then : NULL, m);
        if (!j->is_by_row)
            number = atomic_fetch_add(&j->next, 1);
    }
#ifdef __AMX_BF16__
    if (j->a.use_amx)
        _tile_release();
#endif
}

static void merge_part(void *argument, int part, int parts) {
    const job *j = argument;
    memory m = memory_of(j, part);
    long first, last;
    pelton_share((long)(j->num_whole * j->a.num_kv_heads), part, parts, &first, &last);
    for (long item = first; item < last; item++) {
        int64_t head = item % j->a.num_kv_heads, index = j->whole[item / j->a.num_kv_heads];
        const tile *t = j->tiles + index;
        begin(j, t, head, m.whole);
        for (; index < j->whole[item / j->a.num_kv_heads + 1]; index++)
            if (j->tiles[index].first_chunk < j->tiles[index].last_chunk)
                merge(j, m.whole, split_state(j, index, head), t->count * j->group);
        finish(j, t, head, m.whole);
    }
}

/* The tiles of a batch, keys not split, into `tiles` unless that is NULL. Returns how many. */
static int64_t list_tiles(const job *j, tile *tiles, int64_t tokens_per_tile, int64_t *num_chunks,
                          int64_t *most_chunks) {
    int64_t count = 0;
    *num_chunks = *most_chunks = 0;
    for (int64_t row = 0; row < j->a.num_rows; row++) {
        int64_t length = j->a.query_start_loc[row + 1] - j->a.query_start_loc[row];
        if (pelton_prefill_takes(&j->a, length))
            continue;
        for (int64_t first = 0; first < length; first += tokens_per_tile, count++) {
            tile t = {row, first, least(tokens_per_tile, length - first), 0, 0};
            int64_t start, end;
            keys_seen(&j->a, row, first, first + t.count, &start, &end);
            t.first_chunk = start / KEY_CHUNK;
            t.last_chunk = (end + KEY_CHUNK - 1) / KEY_CHUNK;
            *num_chunks += most(t.last_chunk - t.first_chunk, 1);
            *most_chunks = most(*most_chunks, t.last_chunk - t.first_chunk);
            if (tiles)
                tiles[count] = t;
        }
    }
    return count;
}

static int run(const attention_args *args) {
    job j = {.a = *args};
    int64_t parts = pelton_num_threads(), num_chunks, most_chunks;
    size_t element = element_bytes(j.a.dtype);
    j.group = j.a.num_heads / j.a.num_kv_heads;
    j.dim_pad = round_up(j.a.head_dim, LANES);
    int64_t tokens_per_tile = most(TILE_QUERIES / j.group, 1);
    j.num_queries = tokens_per_tile * j.group;
    j.state_floats = round_up(j.num_queries, LANES) + j.num_queries * (LANES + j.dim_pad);
    j.part_floats = j.num_queries * (j.dim_pad + KEY_TILE) + 2 * KEY_TILE * j.dim_pad +
                    (1 + j.a.num_kv_heads) * j.state_floats;
#ifdef __AMX_BF16__
    j.part_floats += (int64_t)(sizeof(four_memory) / sizeof(float));
#endif
    j.part_floats = round_up(j.part_floats, LANES);
    j.num_tiles = j.num_whole = list_tiles(&j, NULL, tokens_per_tile, &num_chunks, &most_chunks);
    int is_split = j.num_tiles * j.a.num_kv_heads < 4 * parts && parts > 1 && num_chunks > j.num_tiles;
    j.is_by_row = j.num_tiles >= 8 * parts && num_chunks >= 8 * parts * most_chunks;
    j.heads_at_once = j.is_by_row ? j.a.num_kv_heads : 1;
    int64_t part_bytes = parts * j.part_floats * (int64_t)sizeof(float);
    int64_t state_bytes =
        is_split ? num_chunks * j.a.num_kv_heads * j.state_floats * (int64_t)sizeof(float) : 0;
    int64_t tile_bytes = (int64_t)sizeof(tile) * (j.num_tiles + (is_split ? num_chunks : 0));
    int64_t whole_bytes = (int64_t)sizeof(int64_t) * (is_split ? j.num_tiles + 1 : 0);
    char *at = pelton_scratch((long)(part_bytes + state_bytes + tile_bytes + whole_bytes));
    if (!at)
        return 1;
    j.parts = (float *)at;
    j.states = at + part_bytes;
    j.tiles = (tile *)(j.states + state_bytes);
    list_tiles(&j, j.tiles, tokens_per_tile, &num_chunks, &most_chunks);
    if (is_split) {
        tile *pieces = j.tiles + j.num_tiles;
        j.whole = (int64_t *)(pieces + num_chunks);
        int64_t count = 0;
        for (int64_t i = 0; i < j.num_tiles; i++) {
            tile t = j.tiles[i];
            int64_t end = t.last_chunk;
            j.whole[i] = count;
            do {
                t.last_chunk = least(t.first_chunk + 1, end);
                pieces[count++] = t;
            } while (++t.first_chunk < end);
        }
        j.whole[j.num_tiles] = count;
        j.tiles = pieces;
        j.num_tiles = count;
    }
    if (j.num_tiles)
        pelton_run(attend_part, &j);
    if (is_split)
        pelton_run(merge_part, &j);
    int64_t end = j.a.num_rows ? j.a.query_start_loc[j.a.num_rows] : 0;
    for (int64_t token = end; token < j.a.num_tokens; token++)
        memset((char *)j.a.out + (size_t)(token * j.a.out_stride) * element, 0,
               (size_t)(j.a.num_heads * j.a.head_dim) * element);
    return 0;
}

int pelton_attention(const attention_args *args) {
    pelton_enter();
    int failed = run(args) || pelton_prefill(args);
    pelton_leave();
    return failed;
}
