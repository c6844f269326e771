/* out = activation(x @ weight.T + bias), or out += x @ weight.T + bias; x may be RMS-normed first.

   The weight [N, K] is packed into panels of 16 output features, zeros behind the last feature and
   the last column (K_pad: K up to a multiple of 32):

       bfloat16  [panel][K_pad / 2][16 features][2 columns]     float32  [panel][K_pad][16 features]

   One 64-byte line meets one pair of columns (or one column) of x, broadcast: the 16 sums stay in
   the lanes, nothing is added across, and the whole weight is one stream. The bfloat16 lines are
   also what an AMX tile wants of its right operand, 16 lines a tile, so one copy serves all row
   counts.

   Without AMX the sum of a feature does not depend on the number of rows: even and odd lines are
   summed apart, then added. With AMX a row's sums do not depend on the other rows. */

#define _GNU_SOURCE
#include <math.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "finish.h"
#include "linear.h"
#include "pool.h"
#include "tiles.h"
#include "vec.h"

#define K_UNIT 32
#define ROW_BLOCK 8     /* rows that share one pass over a panel: 16 sums in registers */
/* Bytes of x that stay in the second-level cache while a weight passes: the weight of a layer is
   larger than that cache and comes from further away, once for each such block of rows. */
#define X_IN_CACHE (768 * 1024)
/* With more rows than this per thread the threads share rows rather than panels. */
#define ROWS_TO_SPLIT 128
/* Panels that are read side by side, for so many rows at most: 16 sums in registers. */
#define MOST_PANELS 4
#define ROWS_SIDE_BY_SIDE 2
#define AMX_MIN_ROWS 4
#define PREFETCH_LINES 24

typedef struct {
    linear_args a;
    int64_t k_pad, num_panels, num_pairs;
    int64_t block_rows; /* rows of x that stay in the cache, a multiple of 32 */
    int64_t rows_pad;
    void *prepared; /* x, normed and padded: [rows_pad, k_pad], or NULL: x serves as it is */
    int64_t prepared_stride;
    int is_copy_per_part, rows_are_split;
    const int64_t *indices; /* rows of x, or NULL: all in order */
    draw *draws;            /* [num_rows], of this part, where rows become tokens; else NULL */
    const panel_source *source; /* of the weight, or NULL */
    bf16 *filled;               /* two panels of it, of this part */
} job;

static inline int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

/* ---- packing ---- */

void pelton_pack_bf16(const bf16 *weight, int64_t stride, int64_t n, int64_t k, bf16 *packed) {
    int64_t k_pad = round_up(k, K_UNIT);
    for (int64_t panel = 0; panel * LANES < n; panel++)
        for (int64_t pair = 0; pair < k_pad / 2; pair++)
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int64_t half = 0; half < 2; half++) {
                    int64_t row = panel * LANES + lane, column = 2 * pair + half;
                    *packed++ = row < n && column < k ? weight[row * stride + column] : 0;
                }
}

void pelton_pack_f32(const float *weight, int64_t stride, int64_t n, int64_t k, float *packed) {
    int64_t k_pad = round_up(k, K_UNIT);
    for (int64_t panel = 0; panel * LANES < n; panel++)
        for (int64_t column = 0; column < k_pad; column++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t row = panel * LANES + lane;
                *packed++ = row < n && column < k ? weight[row * stride + column] : 0;
            }
}

/* ---- one panel, a few rows ---- */

static inline __attribute__((always_inline)) void
panel_bf16(int num_rows, const v16u *lines, const bf16 *x, int64_t stride, int64_t k_pad, v16f *sums) {
    v16f even[ROW_BLOCK], odd[ROW_BLOCK];
    for (int r = 0; r < num_rows; r++)
        even[r] = odd[r] = (v16f){0};
    for (int64_t i = 0; i < k_pad / 2; i += 2) {
        __builtin_prefetch(lines + i + PREFETCH_LINES);
        __builtin_prefetch(lines + i + PREFETCH_LINES + 1);
        v16u first = lines[i], second = lines[i + 1];
        for (int r = 0; r < num_rows; r++) {
            uint32_t pairs[2];
            memcpy(pairs, x + r * stride + 2 * i, sizeof pairs);
            even[r] = dot_pair(even[r], first, pairs[0]);
            odd[r] = dot_pair(odd[r], second, pairs[1]);
        }
    }
    for (int r = 0; r < num_rows; r++)
        sums[r] = even[r] + odd[r];
}

static inline __attribute__((always_inline)) void
panel_f32(int num_rows, const v16f *lines, const float *x, int64_t stride, int64_t k_pad, v16f *sums) {
    v16f even[ROW_BLOCK], odd[ROW_BLOCK];
    for (int r = 0; r < num_rows; r++)
        even[r] = odd[r] = (v16f){0};
    for (int64_t i = 0; i < k_pad; i += 2) {
        __builtin_prefetch(lines + i + PREFETCH_LINES);
        __builtin_prefetch(lines + i + PREFETCH_LINES + 1);
        for (int r = 0; r < num_rows; r++) {
            even[r] += lines[i] * x[r * stride + i];
            odd[r] += lines[i + 1] * x[r * stride + i + 1];
        }
    }
    for (int r = 0; r < num_rows; r++)
        sums[r] = even[r] + odd[r];
}

static void panel_rows(const job *j, const char *x, int num_rows, int64_t panel, v16f *sums) {
    int64_t stride = j->prepared_stride, k_pad = j->k_pad;
    if (j->a.dtype == IS_BF16) {
        const v16u *lines = (const v16u *)j->a.weight + panel * (k_pad / 2);
        const bf16 *rows = (const bf16 *)x;
        switch (num_rows) {
#define CASE(n) case n: panel_bf16(n, lines, rows, stride, k_pad, sums); return;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
    }
    const v16f *lines = (const v16f *)j->a.weight + panel * k_pad;
    const float *rows = (const float *)x;
    switch (num_rows) {
#define CASE(n) case n: panel_f32(n, lines, rows, stride, k_pad, sums); return;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

/* Four panels of bfloat16 side by side: hardware that sees several streams of memory reads further
   ahead than it does for one (19 against 13 GB/s). The sums are those of panel_bf16. */
static inline __attribute__((always_inline)) void
panels_bf16(int num_rows, const v16u *const *panels, const bf16 *x, int64_t stride, int64_t k_pad,
            v16f (*sums)[ROW_BLOCK]) {
    v16f even[MOST_PANELS][ROW_BLOCK], odd[MOST_PANELS][ROW_BLOCK];
    for (int p = 0; p < MOST_PANELS; p++)
        for (int r = 0; r < num_rows; r++)
            even[p][r] = odd[p][r] = (v16f){0};
    for (int64_t i = 0; i < k_pad / 2; i += 2) {
#pragma GCC unroll 4
        for (int p = 0; p < MOST_PANELS; p++) {
            const v16u *lines = panels[p] + i;
            __builtin_prefetch(lines + PREFETCH_LINES);
            __builtin_prefetch(lines + PREFETCH_LINES + 1);
            v16u first = lines[0], second = lines[1];
            for (int r = 0; r < num_rows; r++) {
                uint32_t pairs[2];
                memcpy(pairs, x + r * stride + 2 * i, sizeof pairs);
                even[p][r] = dot_pair(even[p][r], first, pairs[0]);
                odd[p][r] = dot_pair(odd[p][r], second, pairs[1]);
            }
        }
    }
    for (int p = 0; p < MOST_PANELS; p++)
        for (int r = 0; r < num_rows; r++)
            sums[p][r] = even[p][r] + odd[p][r];
}

/* Two panels of float32 side by side: a number of x goes to a register once for both, so that the
   multipliers do not wait for loads. The sums are those of panel_f32. */
#ifdef __AVX512F__
#define F32_ROWS 6 /* 24 sums in registers */

static inline __attribute__((always_inline)) void
pair_f32(int num_rows, const v16f *left, const v16f *right, const float *x, int64_t stride,
         int64_t k_pad, v16f *first, v16f *second) {
    v16f even[F32_ROWS][2], odd[F32_ROWS][2];
    for (int r = 0; r < num_rows; r++)
        even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = (v16f){0};
    for (int64_t i = 0; i < k_pad; i += 2) {
        v16f a0 = left[i], b0 = right[i], a1 = left[i + 1], b1 = right[i + 1];
#pragma GCC unroll 6
        for (int r = 0; r < num_rows; r++) {
            v16f one = (v16f)_mm512_set1_ps(x[r * stride + i]);
            __asm__("" : "+v"(one)); /* not read from memory twice */
            even[r][0] += a0 * one;
            even[r][1] += b0 * one;
            v16f next = (v16f)_mm512_set1_ps(x[r * stride + i + 1]);
            __asm__("" : "+v"(next));
            odd[r][0] += a1 * next;
            odd[r][1] += b1 * next;
        }
    }
    for (int r = 0; r < num_rows; r++) {
        first[r] = even[r][0] + odd[r][0];
        second[r] = even[r][1] + odd[r][1];
    }
}

static void pair_rows_f32(const job *j, const float *x, int num_rows, const int64_t *panels,
                          v16f (*sums)[ROW_BLOCK]) {
    const v16f *left = (const v16f *)j->a.weight + panels[0] * j->k_pad;
    const v16f *right = (const v16f *)j->a.weight + panels[1] * j->k_pad;
    switch (num_rows) {
#define CASE(n) \
    case n: pair_f32(n, left, right, x, j->prepared_stride, j->k_pad, sums[0], sums[1]); return;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
}
#else
#define F32_ROWS ROW_BLOCK
#endif

static void panels_rows(const job *j, const char *x, int num_rows, int num_panels,
                        const int64_t *panels, v16f (*sums)[ROW_BLOCK]) {
#ifdef __AVX512F__
    if (j->a.dtype != IS_BF16 && num_rows > ROWS_SIDE_BY_SIDE) {
        int p = 0;
        for (; p + 1 < num_panels; p += 2)
            pair_rows_f32(j, (const float *)x, num_rows, panels + p, sums + p);
        if (p < num_panels)
            panel_rows(j, x, num_rows, panels[p], sums[p]);
        return;
    }
#endif
    if (j->a.dtype != IS_BF16 || num_panels < MOST_PANELS || num_rows > ROWS_SIDE_BY_SIDE) {
        for (int p = 0; p < num_panels; p++)
            panel_rows(j, x, num_rows, panels[p], sums[p]);
        return;
    }
    const v16u *lines[MOST_PANELS];
    for (int p = 0; p < MOST_PANELS; p++)
        lines[p] = (const v16u *)j->a.weight + panels[p] * (j->k_pad / 2);
    if (num_rows == 1)
        panels_bf16(1, lines, (const bf16 *)x, j->prepared_stride, j->k_pad, sums);
    else
        panels_bf16(2, lines, (const bf16 *)x, j->prepared_stride, j->k_pad, sums);
}

/* ---- the rows of x that a product reads ---- */

/* Where column k of a row lies in `prepared`; 16 columns from a multiple of 16 on lie together. For
   AMX each 16 rows x 32 columns are one tile of 1 KB: rows of a power of two apart would share a few
   places of the first-level cache. */
static inline int64_t place(const job *j, int64_t row, int64_t k) {
    if (!j->a.use_amx)
        return row * j->k_pad + k;
    int64_t tile = row / 16 * (j->k_pad / K_UNIT) + k / K_UNIT;
    return tile * 16 * K_UNIT + row % 16 * K_UNIT + k % K_UNIT;
}

/* Rounded before the weight comes, as the checkpoints' authors have it. */
static inline v16f normed_bf16(v16f value, float scale, v16f weight) {
    v16f rounded = (v16f)(__builtin_convertvector(to_bf16(value * scale), v16u) << 16);
    return rounded * weight;
}

static void prepare_row_bf16(const job *j, int64_t row, bf16 *to) {
    int64_t k = row < j->a.num_rows ? j->a.num_columns : 0, whole = k / LANES * LANES;
    const bf16 *x = (const bf16 *)j->a.x + (k && j->indices ? j->indices[row] : row) * j->a.x_stride;
    const bf16 *weight = j->a.norm_weight;
    float scale = 1;
    if (weight && k) {
        v16f squares = {0};
        float tail = 0;
        for (int64_t i = 0; i < whole; i += LANES) {
            v16f value = load_bf16(x + i);
            squares += value * value;
        }
        for (int64_t i = whole; i < k; i++)
            tail += bf16_to_float(x[i]) * bf16_to_float(x[i]);
        scale = 1.0f / sqrtf((sum_of_lanes(squares) + tail) / (float)k + j->a.norm_eps);
    }
    for (int64_t i = 0; i < j->k_pad; i += LANES) {
        if (i < whole) {
            v16f value = load_bf16(x + i);
            if (weight)
                value = normed_bf16(value, scale, load_bf16(weight + i));
            store_bf16(to + place(j, row, i), value);
            continue;
        }
        bf16 own[LANES] = {0}, factors[LANES] = {0};
        for (int64_t lane = 0; i + lane < k; lane++) {
            own[lane] = x[i + lane];
            if (weight)
                factors[lane] = weight[i + lane];
        }
        v16f value = load_bf16(own);
        store_bf16(to + place(j, row, i),
                   weight ? normed_bf16(value, scale, load_bf16(factors)) : value);
    }
}

static void prepare_row_f32(const job *j, int64_t row, float *to) {
    int64_t k = row < j->a.num_rows ? j->a.num_columns : 0, whole = k / LANES * LANES;
    const float *x = (const float *)j->a.x + (k && j->indices ? j->indices[row] : row) * j->a.x_stride;
    const float *weight = j->a.norm_weight;
    float scale = 1;
    if (weight && k) {
        v16f squares = {0};
        float tail = 0;
        for (int64_t i = 0; i < whole; i += LANES) {
            v16f value = load_f32(x + i);
            squares += value * value;
        }
        for (int64_t i = whole; i < k; i++)
            tail += x[i] * x[i];
        scale = 1.0f / sqrtf((sum_of_lanes(squares) + tail) / (float)k + j->a.norm_eps);
    }
    for (int64_t i = 0; i < j->k_pad; i += LANES) {
        if (i < whole) {
            v16f value = load_f32(x + i);
            if (weight)
                value = value * scale * load_f32(weight + i);
            store_f32(to + place(j, row, i), value);
            continue;
        }
        float own[LANES] = {0};
        for (int64_t lane = 0; i + lane < k; lane++)
            own[lane] = weight ? x[i + lane] * scale * weight[i + lane] : x[i + lane];
        store_f32(to + place(j, row, i), load_f32(own));
    }
}

/* Rows first..last, to their places in `prepared`; rows behind the last are zeros. */
static void prepare_rows(const job *j, void *prepared, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (j->a.dtype == IS_BF16)
            prepare_row_bf16(j, row, prepared);
        else
            prepare_row_f32(j, row, prepared);
}

/* ---- products ---- */

static inline void panels_of(const job *j, int64_t pair, int64_t *left, int64_t *right) {
    int is_gated = halves(j->a.activation);
    *left = is_gated ? pair : 2 * pair;
    *right = is_gated ? pair + j->num_panels / 2 : 2 * pair + 1;
}

#ifdef __AMX_BF16__

/* Rows row..row + count of a pair of panels, whose sums lie in tiles [2 of rows][2 panels]. */
typedef struct {
    int64_t row, count, pair;
    float (*sums)[LANES][LANES];
} rows_done;

/* finish_pair for row `i` of a whole pair: two conversions in one, since what a pair of panels costs
   here is about what its products cost. */
static inline __attribute__((always_inline)) void
finish_row(const job *j, const rows_done *d, int64_t i, int activation, int mode) {
    int is_gated = halves(activation);
    int64_t left = is_gated ? d->pair : 2 * d->pair;
    v16f first = load_f32(d->sums[i / 16 * 2][i % 16]);
    v16f second = load_f32(d->sums[i / 16 * 2 + 1][i % 16]);
    if (j->a.bias) {
        int64_t right = is_gated ? d->pair + j->num_panels / 2 : left + 1;
        first += load_f32(j->a.bias + left * LANES);
        second += load_f32(j->a.bias + right * LANES);
    }
    bf16 *out = (bf16 *)j->a.out + (d->row + i) * j->a.out_stride + left * LANES;
    if (is_gated) {
        store_bf16(out, activated(activation, first, second));
        return;
    }
    if (activation == GELU) {
        first = gelu(first);
        second = gelu(second);
    }
    if (mode == ADD) {
        first += load_bf16(out);
        second += load_bf16(out + LANES);
    }
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    memcpy(out, &both, sizeof both);
}

/* The lines of `out` that a pair of panels will fill: a row apart, so no hardware sees them come. */
static inline void prefetch_out(const job *j, int64_t row, int64_t count, int64_t pair) {
    if (j->draws)
        return;
    int64_t width = halves(j->a.activation) ? LANES : 2 * LANES;
    const bf16 *out = (const bf16 *)j->a.out + row * j->a.out_stride + pair * width;
    for (int64_t i = 0; i < count; i++)
        __builtin_prefetch(out + i * j->a.out_stride, 1);
}

/* A tile of each panel, asked for early. */
static inline void prefetch_tiles(const bf16 *left, const bf16 *right) {
    for (int line = 0; line < 16; line++) {
        __builtin_prefetch(left + line * 32, 0, 2);
        __builtin_prefetch(right + line * 32, 0, 2);
    }
}

/* Rows first..last of tiled x, pairs of panels first_pair..last_pair; `first` is a multiple of 16.
   The tiles' unit multiplies 32 rows and a pair while the vectors finish those before: a few rows
   after each tile of columns. */
static inline __attribute__((always_inline)) void
product_tiles(const job *j, const bf16 *x, int64_t first, int64_t last, int64_t first_pair,
              int64_t last_pair, int activation, int mode) {
    int64_t num_tiles = j->k_pad / K_UNIT, panel_size = j->k_pad * LANES;
    int64_t rows_a_tile = (32 + num_tiles - 1) / num_tiles;
    float sums[2][4][LANES][LANES] __attribute__((aligned(64)));
    rows_done waiting = {0};
    for (int64_t block = first; block < last; block += j->block_rows) {
        int64_t block_end = block + j->block_rows < last ? block + j->block_rows : last;
        for (int64_t pair = first_pair; pair < last_pair; pair++) {
            int64_t left, right;
            panels_of(j, pair, &left, &right);
            int has_right = right < j->num_panels;
            const bf16 *w0 = (const bf16 *)j->a.weight + left * panel_size;
            const bf16 *w1 = has_right ? (const bf16 *)j->a.weight + right * panel_size : w0;
            int64_t to_next = (halves(activation) ? 1 : 2) * panel_size;
            if (j->source) {
                w0 = w1 = j->filled;
                j->source->fill(j->source->context, left, j->filled);
                if (has_right)
                    j->source->fill(j->source->context, right, j->filled + panel_size);
                if (has_right)
                    w1 = j->filled + panel_size;
            }
            for (int64_t row = block; row < block_end; row += 32) {
                const bf16 *x0 = x + row * j->k_pad, *x1 = x0 + 16 * j->k_pad;
                int64_t count = block_end - row < 32 ? block_end - row : 32, finished = 0;
                int is_last = row + 32 >= block_end && pair + 1 < last_pair && !j->source;
                prefetch_out(j, row, count, pair);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t tile = 0; tile < num_tiles; tile++) {
                    if (is_last)
                        prefetch_tiles(w0 + to_next + tile * TILE, w1 + to_next + tile * TILE);
                    _tile_stream_loadd(4, x0 + tile * TILE, 64);
                    _tile_loadd(6, w0 + tile * TILE, 64);
                    _tile_loadd(7, w1 + tile * TILE, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    if (count > 16) {
                        _tile_stream_loadd(5, x1 + tile * TILE, 64);
                        _tile_dpbf16ps(1, 4, 7);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    } else {
                        _tile_dpbf16ps(1, 4, 7);
                    }
                    for (int64_t i = 0; i < rows_a_tile && finished < waiting.count; i++)
                        finish_row(j, &waiting, finished++, activation, mode);
                }
                waiting = (rows_done){row, count, pair, waiting.sums == sums[0] ? sums[1] : sums[0]};
                _tile_stored(0, waiting.sums[0], 64);
                _tile_stored(1, waiting.sums[1], 64);
                if (count > 16) {
                    _tile_stored(2, waiting.sums[2], 64);
                    _tile_stored(3, waiting.sums[3], 64);
                }
                if (!j->draws && (halves(activation) || (2 * pair + 2) * LANES <= j->a.num_features))
                    continue;
                for (int64_t i = 0; i < count; i++)
                    finish_pair(&j->a, j->num_panels, j->draws, row + i, pair,
                                load_f32(waiting.sums[i / 16 * 2][i % 16]),
                                load_f32(waiting.sums[i / 16 * 2 + 1][i % 16]));
                waiting.count = 0;
            }
        }
    }
    for (int64_t i = 0; i < waiting.count; i++)
        finish_row(j, &waiting, i, activation, mode);
}

static void product_amx(const job *j, const bf16 *x, int64_t first, int64_t last,
                        int64_t first_pair, int64_t last_pair) {
#define CALL(activation, mode) \
    product_tiles(j, x, first, last, first_pair, last_pair, activation, mode)
    if (j->a.activation == SILU_MUL)
        CALL(SILU_MUL, STORE);
    else if (j->a.activation == GELU_TANH_MUL)
        CALL(GELU_TANH_MUL, STORE);
    else if (j->a.activation == GELU_MUL)
        CALL(GELU_MUL, STORE);
    else if (j->a.activation == GELU)
        CALL(GELU, STORE);
    else if (j->a.mode == ADD)
        CALL(NO_ACTIVATION, ADD);
    else
        CALL(NO_ACTIVATION, STORE);
#undef CALL
}
#endif

static void product_lanes(const job *j, const char *x, int64_t first, int64_t last,
                          int64_t first_pair, int64_t last_pair) {
    size_t element = j->a.dtype == IS_BF16 ? sizeof(bf16) : sizeof(float);
    size_t x_bytes = (size_t)j->prepared_stride * element;
    int most_rows = j->a.dtype == IS_BF16 ? ROW_BLOCK : F32_ROWS;
    v16f sums[MOST_PANELS][ROW_BLOCK];
    memset(sums, 0, sizeof sums);
    for (int64_t block = first; block < last; block += j->block_rows) {
        int64_t block_end = block + j->block_rows < last ? block + j->block_rows : last;
        for (int64_t pair = first_pair; pair < last_pair; pair += MOST_PANELS / 2) {
            int64_t panels[MOST_PANELS];
            int num_panels = 0;
            for (int64_t p = pair; p < last_pair && num_panels < MOST_PANELS; p++, num_panels += 2)
                panels_of(j, p, panels + num_panels, panels + num_panels + 1);
            int is_odd = panels[num_panels - 1] >= j->num_panels;
            for (int64_t row = block; row < block_end; row += most_rows) {
                int count = block_end - row < most_rows ? (int)(block_end - row) : most_rows;
                panels_rows(j, x + (size_t)row * x_bytes, count, num_panels - is_odd, panels, sums);
                for (int p = 0; p < num_panels; p += 2)
                    for (int r = 0; r < count; r++)
                        finish_pair(&j->a, j->num_panels, j->draws, row + r, pair + p / 2, sums[p][r],
                                    sums[p + 1][r]);
            }
        }
    }
}

static void product(const job *j, const char *x, int64_t first, int64_t last, int64_t first_pair,
                    int64_t last_pair) {
#ifdef __AMX_BF16__
    if (j->a.use_amx) {
        configure_tiles();
        product_amx(j, (const bf16 *)x, first, last, first_pair, last_pair);
        _tile_release();
        return;
    }
#endif
    product_lanes(j, x, first, last, first_pair, last_pair);
}

static void prepare_part(void *argument, int part, int parts) {
    const job *j = argument;
    long first, last;
    pelton_share(j->rows_pad, part, parts, &first, &last);
    prepare_rows(j, j->prepared, first, last);
}

static void multiply_part(void *argument, int part, int parts) {
    job own_job = *(const job *)argument;
    const job *j = &own_job;
    if (j->draws)
        own_job.draws += part * j->a.num_rows;
    if (j->source)
        own_job.filled += part * 2 * LANES * j->k_pad;
    size_t element = j->a.dtype == IS_BF16 ? sizeof(bf16) : sizeof(float);
    const char *x = j->prepared ? j->prepared : j->a.x;
    long first = 0, last = j->a.num_rows, first_pair = 0, last_pair = j->num_pairs;
    if (j->rows_are_split) {
        long first_block, last_block;
        pelton_share(j->rows_pad / 16, part, parts, &first_block, &last_block);
        first = first_block * 16;
        if (last_block * 16 < last)
            last = last_block * 16;
        for (long block = first; j->prepared && block < last; block += j->block_rows) {
            long end = block + j->block_rows < last ? block + j->block_rows : last;
            prepare_rows(j, j->prepared, block, (end + 15) / 16 * 16);
            product(j, x, block, end, first_pair, last_pair);
        }
        if (j->prepared)
            return;
    } else {
        pelton_share(j->num_pairs, part, parts, &first_pair, &last_pair);
        if (j->is_copy_per_part) {
            char *own = (char *)j->prepared + (size_t)(part * j->rows_pad * j->k_pad) * element;
            prepare_rows(j, own, 0, j->rows_pad);
            x = own;
        }
    }
    if (first < last && first_pair < last_pair)
        product(j, x, first, last, first_pair, last_pair);
}

int pelton_linear_entered(const linear_args *args, const draw_args *drawn,
                          const panel_source *source) {
    job j = {.a = *args, .indices = drawn ? drawn->indices : NULL, .source = source};
    size_t element = j.a.dtype == IS_BF16 ? sizeof(bf16) : sizeof(float);
    int parts = pelton_num_threads();
    j.k_pad = round_up(j.a.num_columns, K_UNIT);
    j.num_panels = round_up(j.a.num_features, LANES) / LANES;
    j.num_pairs = halves(j.a.activation) ? j.num_panels / 2 : (j.num_panels + 1) / 2;
    j.a.use_amx = j.a.use_amx && j.a.dtype == IS_BF16 && j.a.num_rows >= AMX_MIN_ROWS;
    j.rows_pad = round_up(j.a.num_rows, 16);
    j.block_rows = X_IN_CACHE / (j.k_pad * (int64_t)element) / 32 * 32;
    if (j.block_rows < 32)
        j.block_rows = 32;
    j.rows_are_split = j.a.num_rows >= (int64_t)ROWS_TO_SPLIT * parts;
    j.prepared_stride = j.a.x_stride;
    int64_t draw_bytes = drawn ? (int64_t)sizeof(draw) * parts * j.a.num_rows : 0;
    if (drawn || j.a.use_amx || j.a.norm_weight || j.k_pad != j.a.num_columns) {
        if (j.a.num_rows < ROW_BLOCK && !j.a.use_amx)
            j.rows_pad = j.a.num_rows;
        j.is_copy_per_part = j.a.num_rows <= ROW_BLOCK && !j.rows_are_split;
        int64_t copies = j.is_copy_per_part ? parts : 1;
        int64_t prepared_bytes = round_up(copies * j.rows_pad * j.k_pad * (int64_t)element, 64);
        int64_t filled_bytes = source ? parts * 2 * LANES * j.k_pad * (int64_t)element : 0;
        j.prepared = pelton_scratch((long)(prepared_bytes + filled_bytes + draw_bytes));
        if (!j.prepared)
            return 1;
        j.filled = (bf16 *)((char *)j.prepared + prepared_bytes);
        if (drawn) {
            j.draws = (draw *)((char *)j.prepared + prepared_bytes + filled_bytes);
            begin_draws(j.draws, parts, drawn);
        }
        j.prepared_stride = j.k_pad;
        if (!j.is_copy_per_part && !j.rows_are_split)
            pelton_run(prepare_part, &j);
    }
    pelton_run(multiply_part, &j);
    if (drawn)
        end_draws(j.draws, parts, drawn);
    return 0;
}

int pelton_linear(const linear_args *args) {
    pelton_enter();
    int failed = pelton_linear_entered(args, NULL, NULL);
    pelton_leave();
    return failed;
}

int pelton_draw(const draw_args *args) {
    pelton_enter();
    int failed = pelton_linear_entered(&args->head, args, NULL);
    pelton_leave();
    return failed;
}

int pelton_request_amx(void) {
#ifdef __AMX_BF16__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}
