/* out = activation(x @ weight.T + bias), or out += ..., as in linear.c; the weight stays in blocks of
   small integers and is multiplied as such.

   A weight is numbers  scale * code + minimum,  with a scale (and, in some forms, a minimum) for each
   32 columns of a feature, or for each 16 (Q6_K). x is quantised likewise: 32 columns share a scale,
   the largest magnitude over 32512, and have codes of -32512 to 32512, each of two bytes that are
   multiplied apart: 256 * high + low. So a feature's sum is

       sum over blocks of  x scale * (scale * (codes . x codes) + minimum * sum of x codes)

   where what stands in the inner brackets is exact, in integers. No code of x is further than
   one and a half scales from x (half of one, and one where the low byte would be -128), so the sum is
   no further than  sum over blocks of  max|x| / 21674 * sum|weight|  from the one with x as it is: x
   is more exact so than in bfloat16. Codes of one byte would cost a percent of perplexity; the second
   one costs no time where a few rows wait for the weight.

   The weight is packed into panels of 16 features. A panel is its scales, block by block, and then
   its codes. A line of codes is [16 features][4 columns] bytes, which meet four codes of x, broadcast:
   a sum stays in its lane. Codes of fewer than 8 bits share a line of nibbles: those of columns
   4i..4i+3 of the block of 32 are the low ones of line i, 4i+16..4i+19 the high ones. What is above
   four bits lies behind, in lines of its own.

   Blocks are added up in order, row by row, in the same way whatever rows are beside: a row's bits do
   not depend on its batch. Only with AMX, which use_amx asks for, many rows take another way: panels
   are turned into bfloat16 and multiplied by linear.c, x unquantised. */

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "blocks.h"
#include "finish.h"
#include "pool.h"
#include "vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 32
#define LARGEST_CODE 32512.0f /* of x: 127 * 256 */
/* Rows that share one pass over a panel: so many sums stay in registers. */
#if defined(__AVX512F__)
#define MOST_ROWS 8
#define FOR_ROWS(form, CASE) CASE(form, 8) CASE(form, 4) CASE(form, 2) CASE(form, 1)
#elif defined(__AVX2__)
#define MOST_ROWS 4
#define FOR_ROWS(form, CASE) CASE(form, 4) CASE(form, 2) CASE(form, 1)
#else
#define MOST_ROWS 2
#define FOR_ROWS(form, CASE) CASE(form, 2) CASE(form, 1)
#endif
/* Panels that share one pass over a row. */
#define MOST_PANELS 4
/* Blocks of a panel between what is asked for and what is multiplied. */
#define AHEAD 8
#define AMX_MIN_ROWS 9
/* From so many on, panels become bfloat16 in memory that all parts share. */
#define ROWS_TO_SHARE 129
#define DENSE_BYTES (4 * 1024 * 1024)
/* Rows of x that each thread had better quantise for itself than wait for the others. */
#define ROWS_PER_PART 8

typedef int8_t v16c __attribute__((vector_size(16), may_alias));
typedef uint8_t v16b __attribute__((vector_size(16), may_alias));

/* 32 columns of a row of x. sums: of the codes of its halves. low: -127 to 127, so that it has a
   negative. */
typedef struct {
    int8_t high[BLOCK], low[BLOCK];
    float scale, scaled_sum;
    int32_t sums[2];
} x_block;

typedef struct {
    const block_args *args;
    int64_t num_blocks, num_panels, num_pairs;
    x_block *x; /* [rows][num_blocks], for each part of the pool if is_copy_per_part */
    int is_copy_per_part;
    const int64_t *indices; /* rows of x, or NULL: all in order */
    draw *draws;            /* of the rows, for each part, where they become tokens; else NULL */
    bf16 *dense; /* panels as numbers, the left ones of pairs and then the right ones */
    int64_t first_pair, last_pair;
} job;

/* ---- forms ---- */

INLINE int bits_of(int form) {
    return form == Q8_0 ? 8 : form == Q6_K ? 6 : form == Q5_0 || form == Q5_1 || form == Q5_K ? 5 : 4;
}

INLINE int has_minimum(int form) {
    return form == Q4_1 || form == Q5_1 || form == Q4_K || form == Q5_K;
}

/* What a code stands for is this much less. */
INLINE int offset_of(int form) {
    return has_minimum(form) ? 0 : 1 << (bits_of(form) - 1);
}

/* Columns with one scale of their own, below those with a float16. */
INLINE int is_super(int form) { return form == Q4_K || form == Q5_K || form == Q6_K; }

/* Of a block of 32 columns in a panel. */
INLINE int64_t code_bytes(int form) { return bits_of(form) * BLOCK * LANES / 8; }

#define HALVES (2 * LANES) /* bytes of a float16 for each feature */

/* Of a block of 32 columns in a panel; of 256 if the form is_super. */
INLINE int64_t scale_bytes(int form) {
    int64_t halves = form == Q6_K || !has_minimum(form) ? HALVES : 2 * HALVES;
    return is_super(form) ? halves + 8 * 2 * LANES : halves;
}

INLINE int64_t codes_start(int form, int64_t num_blocks) {
    int64_t bytes = (is_super(form) ? num_blocks / 8 : num_blocks) * scale_bytes(form);
    return (bytes + 63) / 64 * 64;
}

/* Of a block of 32 columns in a panel, with its share of the scales. */
INLINE int64_t block_bytes(int form) {
    return code_bytes(form) + scale_bytes(form) / (is_super(form) ? 8 : 1);
}

/* Of a block in a file. */
INLINE int64_t file_bytes(int form) {
    switch (form) {
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;
    }
}

INLINE int file_columns(int form) { return is_super(form) ? 256 : BLOCK; }

INLINE int64_t panel_bytes(int form, int64_t num_blocks) {
    return codes_start(form, num_blocks) + num_blocks * code_bytes(form);
}

int64_t pelton_panel_bytes(int form, int64_t k) { return panel_bytes(form, k / BLOCK); }

/* The panel by its number, and its form. */
INLINE const uint8_t *panel_of(const block_args *args, int64_t panel, int *form) {
    const block_run *run = args->runs;
    for (; panel >= run->num_panels; run++)
        panel -= run->num_panels;
    *form = (int)run->form;
    return run->panels + panel * panel_bytes(*form, args->linear.num_columns / BLOCK);
}

/* ---- numbers ---- */

static inline float half_to_float(const uint8_t *from) {
    uint32_t half = from[0] | (uint32_t)from[1] << 8, exponent = half >> 10 & 31;
    uint32_t sign = half >> 15 << 31, mantissa = half & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE v16f load_halves(const uint8_t *from) {
#if defined(__AVX512F__)
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16)));
    v16f value;
    memcpy(&value, &low, sizeof low);
    memcpy((char *)&value + sizeof low, &high, sizeof high);
    return value;
#else
    v16f value;
    for (int lane = 0; lane < LANES; lane++)
        value[lane] = half_to_float(from + 2 * lane);
    return value;
#endif
}

INLINE v16f load_unsigned(const uint8_t *from) {
    v16b bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, v16i), v16f);
}

INLINE v16f load_signed(const uint8_t *from) {
    v16c bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, v16i), v16f);
}

/* a * b + c, rounded once at every level, so that no compiler chooses. */
INLINE v16f fused(v16f a, v16f b, v16f c) {
#if defined(__AVX512F__)
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 parts[3][2];
    memcpy(parts[0], &a, sizeof a), memcpy(parts[1], &b, sizeof b), memcpy(parts[2], &c, sizeof c);
    for (int i = 0; i < 2; i++)
        parts[2][i] = _mm256_fmadd_ps(parts[0][i], parts[1][i], parts[2][i]);
    memcpy(&c, parts[2], sizeof c);
    return c;
#elif defined(__aarch64__)
    float32x4_t parts[3][4];
    memcpy(parts[0], &a, sizeof a), memcpy(parts[1], &b, sizeof b), memcpy(parts[2], &c, sizeof c);
    for (int i = 0; i < 4; i++)
        parts[2][i] = vfmaq_f32(parts[2][i], parts[0][i], parts[1][i]);
    memcpy(&c, parts[2], sizeof c);
    return c;
#else
    for (int lane = 0; lane < LANES; lane++)
        c[lane] = fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

/* The scales and the minimum of a block of 32: `high` of its last 16 columns. */
INLINE void load_scales(int form, const uint8_t *panel, int64_t block, v16f *low, v16f *high,
                        v16f *minimum) {
    const uint8_t *at = panel + (is_super(form) ? block / 8 : block) * scale_bytes(form);
    v16f scale = load_halves(at);
    *low = *high = scale;
    *minimum = (v16f){0};
    if (has_minimum(form))
        *minimum = load_halves(at + HALVES);
    if (!is_super(form))
        return;
    const uint8_t *small = at + (form == Q6_K ? 1 : 2) * HALVES + block % 8 * 2 * LANES;
    if (form == Q6_K) { /* products of so few bits are exact */
        *low = scale * load_signed(small);
        *high = scale * load_signed(small + LANES);
    } else {
        *low = *high = scale * load_unsigned(small);
        *minimum = *minimum * load_unsigned(small + LANES);
    }
}

/* Codes of columns 4i..4i+3 and 4i+16..4i+19 of a block. */
INLINE void load_codes(int form, const v16u *lines, int i, v16u *low, v16u *high) {
    if (bits_of(form) == 8) {
        *low = lines[i];
        *high = lines[i + 4];
        return;
    }
    *low = lines[i] & 0x0f0f0f0f;
    *high = lines[i] >> 4 & 0x0f0f0f0f;
    if (bits_of(form) == 5) { /* bits i and i + 4 of each byte */
        *low |= lines[4] << (4 - i) & 0x10101010;
        *high |= lines[4] >> i & 0x10101010;
    }
    if (bits_of(form) == 6) { /* bits 2i and 2i + 1 */
        int up = i < 2 ? 4 - 2 * i : 0, down = i < 2 ? 0 : 2 * i - 4;
        *low |= (lines[4] << up >> down) & 0x30303030;
        *high |= (lines[5] << up >> down) & 0x30303030;
    }
}

/* sum + codes . x, four columns in each lane. With 8 bits the codes are the numbers + 128; without
   an instruction for bytes of which one is signed, is_centred says that the numbers are meant. */
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
#define IS_CENTRED 0
#else
#define IS_CENTRED 1
#endif

#if IS_CENTRED
INLINE __m256i dot4_avx2(int bits, __m256i sum, __m256i codes, __m256i x) {
    if (bits == 8) { /* two products of unsigned bytes would not fit 16 bits */
        codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        x = _mm256_sign_epi8(x, codes);
        codes = _mm256_abs_epi8(codes);
    }
    __m256i pairs = _mm256_maddubs_epi16(codes, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

INLINE v16i dot4(int bits, v16i sum, v16u codes, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
#if defined(__AVX512VNNI__)
    (void)bits;
    return (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
    if (bits != 8) {
        __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(four));
        return sum + (v16i)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
#endif
#if IS_CENTRED
    __m256i sums[2], parts[2], same = _mm256_set1_epi32(four);
    memcpy(sums, &sum, sizeof sum), memcpy(parts, &codes, sizeof codes);
    for (int i = 0; i < 2; i++)
        sums[i] = dot4_avx2(bits, sums[i], parts[i], same);
    memcpy(&sum, sums, sizeof sum);
    return sum;
#elif !defined(__AVX512VNNI__)
    (void)bits, (void)four;
    for (int i = 0; i < 4; i++)
        sum += (v16i)(codes >> 8 * i & 255) * (int32_t)x[i];
    return sum;
#endif
}

/* ---- packing ---- */

static void set_code(int form, uint8_t *codes, int lane, int column, int code) {
    int half = column / 16, i = column % 16 / 4, place = lane * 4 + column % 4;
    if (bits_of(form) == 8) {
        codes[column / 4 * 64 + place] = (uint8_t)code;
        return;
    }
    codes[i * 64 + place] |= (uint8_t)((code & 15) << 4 * half);
    if (bits_of(form) == 5)
        codes[4 * 64 + place] |= (uint8_t)(code >> 4 << (i + 4 * half));
    if (bits_of(form) == 6)
        codes[(4 + half) * 64 + place] |= (uint8_t)(code >> 4 << 2 * i);
}

static int get_code(int form, const uint8_t *codes, int lane, int column) {
    int half = column / 16, i = column % 16 / 4, place = lane * 4 + column % 4;
    if (bits_of(form) == 8)
        return codes[column / 4 * 64 + place];
    int code = codes[i * 64 + place] >> 4 * half & 15;
    if (bits_of(form) == 5)
        code |= (codes[4 * 64 + place] >> (i + 4 * half) & 1) << 4;
    if (bits_of(form) == 6)
        code |= (codes[(4 + half) * 64 + place] >> 2 * i & 3) << 4;
    return code;
}

/* Column `column` of a block as it lies in a file. Source of the layouts: ggml's ggml-common.h. */
INLINE int file_code(int form, const uint8_t *block, int column) {
    int low = column % 16, is_high = column / 16, run = column % 32, part = column / 32;
    switch (form) {
    case Q4_0: return block[2 + low] >> 4 * is_high & 15;
    case Q4_1: return block[4 + low] >> 4 * is_high & 15;
    case Q5_0:
        return (block[6 + low] >> 4 * is_high & 15) | (block[2 + column / 8] >> column % 8 & 1) << 4;
    case Q5_1:
        return (block[8 + low] >> 4 * is_high & 15) | (block[4 + column / 8] >> column % 8 & 1) << 4;
    case Q8_0: return block[2 + column] ^ 128;
    case Q4_K: return block[16 + part / 2 * 32 + run] >> 4 * (part % 2) & 15;
    case Q5_K:
        return (block[48 + part / 2 * 32 + run] >> 4 * (part % 2) & 15) | (block[16 + run] >> part & 1) << 4;
    default: /* Q6_K: nibbles in runs of 64, bits above in runs of 32 */
        return (block[column / 128 * 64 + column % 64] >> 4 * (column / 64 % 2) & 15) |
               (block[128 + column / 128 * 32 + run] >> 2 * (part % 4) & 3) << 4;
    }
}

/* A file's scales of block `block` to a panel's lane. */
static void pack_scales(int form, const uint8_t *from, int64_t block, int lane, uint8_t *panel) {
    uint8_t *to = panel + block * scale_bytes(form);
    if (form == Q6_K) {
        memcpy(to + 2 * lane, from + 208, 2);
        for (int run = 0; run < 16; run++)
            to[HALVES + run * LANES + lane] = from[192 + run];
        return;
    }
    memcpy(to + 2 * lane, from, 2);
    if (has_minimum(form))
        memcpy(to + HALVES + 2 * lane, from + 2, 2);
    if (!is_super(form))
        return;
    to[HALVES + 2 * lane + 1] ^= 128; /* what is stored is subtracted */
    for (int run = 0; run < 8; run++) { /* eight scales and eight minima of six bits */
        const uint8_t *six = from + 4 + run % 4;
        uint8_t scale = six[0] & 63, minimum = six[4] & 63;
        if (run >= 4) {
            scale = (six[8] & 15) | (six[0] >> 6 << 4);
            minimum = six[8] >> 4 | (six[4] >> 6 << 4);
        }
        to[2 * HALVES + run * 2 * LANES + lane] = scale;
        to[2 * HALVES + run * 2 * LANES + LANES + lane] = minimum;
    }
}

INLINE void pack_row(int form, const uint8_t *row, int64_t k, int lane, uint8_t *panel) {
    uint8_t *codes = panel + codes_start(form, k / BLOCK);
    for (int64_t block = 0; block < k / file_columns(form); block++, row += file_bytes(form)) {
        pack_scales(form, row, block, lane, panel);
        for (int column = 0; column < file_columns(form); column++)
            set_code(form, codes + column / BLOCK * code_bytes(form), lane, column % BLOCK,
                     file_code(form, row, column));
        codes += file_columns(form) / BLOCK * code_bytes(form);
    }
}

#define FOR_FORM(form, CASE)                                                                       \
    switch (form) {                                                                                \
        CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)    \
    }

typedef struct {
    int form;
    const uint8_t *rows;
    int64_t num_rows, k, first_row;
    uint8_t *panels;
} packing;

static void pack_part(void *argument, int part, int parts) {
    const packing *p = argument;
    long first, last;
    pelton_share(p->num_rows, part, parts, &first, &last);
    for (long row = first; row < last; row++) {
        const uint8_t *from = p->rows + row * (p->k / file_columns(p->form)) * file_bytes(p->form);
        int64_t to = p->first_row + row;
        uint8_t *panel = p->panels + to / LANES * pelton_panel_bytes(p->form, p->k);
#define CASE(f) case f: pack_row(f, from, p->k, (int)(to % LANES), panel); break;
        FOR_FORM(p->form, CASE)
#undef CASE
    }
}

void pelton_pack_blocks(int form, const uint8_t *rows, int64_t num_rows, int64_t k,
                        int64_t first_row, uint8_t *panels) {
    packing p = {form, rows, num_rows, k, first_row, panels};
    pelton_enter();
    pelton_run(pack_part, &p);
    pelton_leave();
}

/* ---- rows as numbers ---- */

static void unpack_row(int form, const uint8_t *panel, int64_t k, int lane, int dtype, void *out) {
    const uint8_t *codes = panel + codes_start(form, k / BLOCK);
    for (int64_t block = 0; block < k / BLOCK; block++, codes += code_bytes(form)) {
        v16f scales[2], minimum;
        load_scales(form, panel, block, &scales[0], &scales[1], &minimum);
        for (int column = 0; column < BLOCK; column++) {
            float code = (float)(get_code(form, codes, lane, column) - offset_of(form));
            float value = scales[column / 16][lane] * code + minimum[lane];
            if (dtype == IS_BF16)
                ((bf16 *)out)[block * BLOCK + column] = float_to_bf16(value);
            else
                ((float *)out)[block * BLOCK + column] = value;
        }
    }
}

static void look_up_part(void *argument, int part, int parts) {
    const block_args *args = argument;
    const linear_args *a = &args->linear;
    const int32_t *ids = a->x;
    int64_t element = a->dtype == IS_BF16 ? sizeof(bf16) : sizeof(float);
    long first, last;
    pelton_share(a->num_rows, part, parts, &first, &last);
    for (long i = first; i < last; i++) {
        int form;
        const uint8_t *panel = panel_of(args, ids[i] / LANES, &form);
        unpack_row(form, panel, a->num_columns, ids[i] % LANES, a->dtype,
                   (char *)a->out + i * a->out_stride * element);
    }
}

int pelton_block_rows(const block_args *args) {
    pelton_enter();
    if (args->linear.num_rows > ROWS_PER_PART)
        pelton_run(look_up_part, (void *)args);
    else
        look_up_part((void *)args, 0, 1);
    pelton_leave();
    return 0;
}

/* ---- x ---- */

static inline v16u wider(v16u a, v16u b) {
    v16u is_more = (v16u)(a > b);
    return (a & is_more) | (b & ~is_more);
}

static inline uint32_t largest(v16u value) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epu32((__m512i)value);
#else
    uint32_t lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

static inline int32_t sum_of(v16i value) {
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32((__m512i)value);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += value[i];
    return sum;
#endif
}

INLINE void quantise_block(v16f low, v16f high, x_block *to) {
    /* Magnitudes as integers, so that infinity and NaN are the largest. */
    uint32_t bits = largest(wider((v16u)low & 0x7fffffff, (v16u)high & 0x7fffffff));
    float most;
    memcpy(&most, &bits, sizeof most);
    if (!(most > 1e-30f) || bits >= 0x7f800000) { /* nothing, or what must come out as NaN */
        float scale = bits >= 0x7f800000 ? NAN : 0;
        *to = (x_block){.scale = scale, .scaled_sum = scale};
        return;
    }
    /* Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits. */
    v16f factor = splat(LARGEST_CODE / most), magic = splat(12582912.0f);
    v16i codes[2] = {(v16i)fused(low, factor, magic) - (v16i)magic,
                     (v16i)fused(high, factor, magic) - (v16i)magic};
    for (int half = 0; half < 2; half++) {
        v16i above = (codes[half] + 128) >> 8, below = codes[half] - (above << 8);
        below -= below < -127; /* a mask of ones is -1 */
        codes[half] = (above << 8) + below;
        v16c bytes[2] = {__builtin_convertvector(above, v16c), __builtin_convertvector(below, v16c)};
        memcpy(to->high + half * LANES, &bytes[0], sizeof bytes[0]);
        memcpy(to->low + half * LANES, &bytes[1], sizeof bytes[1]);
    }
    to->scale = most / LARGEST_CODE;
    to->sums[0] = sum_of(codes[0]), to->sums[1] = sum_of(codes[1]);
    to->scaled_sum = to->scale * (float)(to->sums[0] + to->sums[1]);
}

INLINE v16f load_x(int dtype, const void *from, int64_t at) {
    return dtype == IS_BF16 ? load_bf16((const bf16 *)from + at) : load_f32((const float *)from + at);
}

/* Not inlined: the same code for every row, wherever it stands. */
static __attribute__((noinline)) void quantise_row(const linear_args *a, int64_t row, x_block *to) {
    const char *x = a->x;
    x += row * a->x_stride * (int64_t)(a->dtype == IS_BF16 ? sizeof(bf16) : sizeof(float));
    v16f scale = splat(1);
    if (a->norm_weight) {
        v16f squares = {0};
        for (int64_t i = 0; i < a->num_columns; i += LANES) {
            v16f value = load_x(a->dtype, x, i);
            squares = fused(value, value, squares);
        }
        float mean = sum_of_lanes(squares) / (float)a->num_columns;
        scale = splat(1.0f / sqrtf(mean + a->norm_eps));
    }
    for (int64_t i = 0; i < a->num_columns; i += BLOCK) {
        v16f low = load_x(a->dtype, x, i), high = load_x(a->dtype, x, i + LANES);
        if (a->norm_weight) {
            low = low * scale * load_x(a->dtype, a->norm_weight, i);
            high = high * scale * load_x(a->dtype, a->norm_weight, i + LANES);
        }
        quantise_block(low, high, to++);
    }
}

static void quantise_rows(const job *j, x_block *to, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        quantise_row(&j->args->linear, j->indices ? j->indices[row] : row, to + row * j->num_blocks);
}

/* ---- products ---- */

/* One panel's products with a block of a few rows of x, which lie num_blocks apart. */
INLINE void panel_block(int num_rows, int form, const uint8_t *panel, const v16u *lines,
                        const x_block *x, int64_t block, int64_t num_blocks, v16f *total) {
    v16f low_scale, high_scale, minimum;
    load_scales(form, panel, block, &low_scale, &high_scale, &minimum);
    /* By the halves of the columns where these have scales of their own; by the bytes of x. */
    enum { HALVES_OF_BLOCK = 2 };
    int apart = form == Q6_K;
    v16i above[MOST_ROWS][HALVES_OF_BLOCK], below[MOST_ROWS][HALVES_OF_BLOCK];
    int offset = IS_CENTRED && bits_of(form) == 8 ? 0 : offset_of(form);
    for (int r = 0; r < num_rows; r++) {
        const x_block *at = x + r * num_blocks + block;
        above[r][0] = above[r][1] = (v16i){0};
        below[r][0] = (v16i){0} - offset * (apart ? at->sums[0] : at->sums[0] + at->sums[1]);
        below[r][1] = (v16i){0} - (apart ? offset * at->sums[1] : 0);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v16u half_codes[HALVES_OF_BLOCK];
        load_codes(form, lines, i, &half_codes[0], &half_codes[1]);
        for (int r = 0; r < num_rows; r++) {
            const x_block *at = x + r * num_blocks + block;
#pragma GCC unroll 2
            for (int half = 0; half < HALVES_OF_BLOCK; half++) {
                int to = apart ? half : 0, column = half * 16 + 4 * i, bits = bits_of(form);
                above[r][to] = dot4(bits, above[r][to], half_codes[half], at->high + column);
                below[r][to] = dot4(bits, below[r][to], half_codes[half], at->low + column);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) {
        const x_block *at = x + r * num_blocks + block;
        v16f scale = splat(at->scale), scales[HALVES_OF_BLOCK] = {low_scale, high_scale};
        for (int half = 0; half < (apart ? HALVES_OF_BLOCK : 1); half++) {
            v16i sum = (above[r][half] << 8) + below[r][half];
            total[r] = fused(scales[half] * scale, __builtin_convertvector(sum, v16f), total[r]);
        }
        if (has_minimum(form))
            total[r] = fused(minimum, splat(at->scaled_sum), total[r]);
    }
}

/* A few panels of one form side by side: hardware that sees several streams of memory reads further
   ahead than it does for one (19 against 13 GB/s). What is multiplied after them, `next`, is asked
   for meanwhile, AHEAD blocks before its turn. sums: [panel][row], at first 0.

   The panels' number is not the compiler's business: their sums go by way of memory from block to
   block, which costs next to nothing, and there is one function for any number. */
INLINE void panels_form(int num_rows, int form, int num_panels, const uint8_t *const *panels,
                        const uint8_t *const *next, const x_block *x, int64_t num_blocks,
                        v16f (*sums)[MOST_ROWS]) {
    int64_t start = codes_start(form, num_blocks);
    int64_t near = num_blocks > AHEAD ? num_blocks - AHEAD : 0;
    for (int64_t block = 0; block < num_blocks; block++)
        for (int p = 0; p < num_panels; p++) {
            const uint8_t *ahead = block < near ? panels[p] + (block + AHEAD) * block_bytes(form)
                                                : next[p] + (block - near) * block_bytes(form);
            for (int64_t at = 0; at < block_bytes(form); at += 64)
                __builtin_prefetch(ahead + at);
            panel_block(num_rows, form, panels[p],
                        (const v16u *)(panels[p] + start + block * code_bytes(form)), x, block,
                        num_blocks, sums[p]);
        }
}

/* Functions of their own, or the compiler would see one of thousands of lines. */
#define PANELS(form, num_rows)                                                                     \
    static __attribute__((noinline)) void panels_##form##_##num_rows(                              \
        int num_panels, const uint8_t *const *panels, const uint8_t *const *next,                  \
        const x_block *x, int64_t num_blocks, v16f(*sums)[MOST_ROWS]) {                            \
        panels_form(num_rows, form, num_panels, panels, next, x, num_blocks, sums);                \
    }
FOR_ROWS(Q4_0, PANELS) FOR_ROWS(Q4_1, PANELS) FOR_ROWS(Q5_0, PANELS) FOR_ROWS(Q5_1, PANELS)
FOR_ROWS(Q8_0, PANELS) FOR_ROWS(Q4_K, PANELS) FOR_ROWS(Q5_K, PANELS) FOR_ROWS(Q6_K, PANELS)

typedef void (*panels_function)(int, const uint8_t *const *, const uint8_t *const *,
                                const x_block *, int64_t, v16f (*)[MOST_ROWS]);

/* By form, then from MOST_ROWS down to one row. */
static const panels_function panels_functions[NUM_FORMS][4] = {
#define NAME(form, num_rows) panels_##form##_##num_rows,
#define CASE(form) [form] = {FOR_ROWS(form, NAME)},
    CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
#undef CASE
#undef NAME
};

/* Panels that are multiplied together. */
typedef struct {
    int count, form[MOST_PANELS];
    const uint8_t *panels[MOST_PANELS];
} group;

/* Panels first.. of a part's own order, in which gate and up take turns. */
static group group_of(const job *j, int64_t first, int64_t last) {
    int is_gated = halves(j->args->linear.activation);
    group g = {.count = last - first < MOST_PANELS ? (int)(last - first) : MOST_PANELS};
    for (int p = 0; p < g.count; p++) {
        int64_t at = first + p;
        int64_t panel = is_gated ? at / 2 + at % 2 * (j->num_panels / 2) : at;
        g.panels[p] = panel_of(j->args, panel, &g.form[p]);
    }
    return g;
}

/* next: of as many panels. sums: [panel][row]. */
static void multiply_group(const group *g, const uint8_t *const *next, const x_block *x,
                           int64_t num_blocks, int num_rows, v16f (*sums)[MOST_ROWS]) {
    memset(sums, 0, (size_t)g->count * sizeof *sums);
    for (int size = MOST_ROWS, step = 0, row = 0; row < num_rows; size /= 2, step++)
        for (; num_rows - row >= size; row += size)
            for (int p = 0, alike; p < g->count; p += alike) {
                for (alike = 1; p + alike < g->count && g->form[p + alike] == g->form[p];)
                    alike++;
                panels_functions[g->form[p]][step](alike, g->panels + p, next + p,
                                                   x + row * num_blocks, num_blocks,
                                                   (v16f(*)[MOST_ROWS])(sums[p] + row));
            }
}

/* Has what is multiplied first come from memory while something else is done. */
INLINE void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(from + line);
}

static __attribute__((noinline)) void finish(const job *j, draw *draws, int64_t row, int64_t pair,
                                             v16f *first, v16f *second) {
    finish_pair(&j->args->linear, j->num_panels, draws, row, pair, *first, *second);
}

/* ahead: what is read after the last of these pairs. */
static void multiply(const job *j, draw *draws, const x_block *x, int64_t first_pair,
                     int64_t last_pair, const uint8_t *ahead) {
    const linear_args *a = &j->args->linear;
    int64_t last = 2 * last_pair < j->num_panels ? 2 * last_pair : j->num_panels;
    v16f sums[MOST_PANELS + 1][MOST_ROWS];
    memset(sums, 0, sizeof sums);
    group now = group_of(j, 2 * first_pair, last), after;
    for (int64_t panel = 2 * first_pair; panel < last; panel += MOST_PANELS, now = after) {
        const uint8_t *next[MOST_PANELS];
        after = group_of(j, panel + now.count, last);
        for (int p = 0; p < now.count; p++)
            next[p] = p < after.count ? after.panels[p] : ahead;
        for (int64_t row = 0; row < a->num_rows; row += MOST_ROWS) {
            int count = a->num_rows - row < MOST_ROWS ? (int)(a->num_rows - row) : MOST_ROWS;
            multiply_group(&now, next, x + row * j->num_blocks, j->num_blocks, count, sums);
            for (int p = 0; p < now.count; p += 2)
                for (int r = 0; r < count; r++)
                    finish(j, draws, row + r, (panel + p) / 2, &sums[p][r], &sums[p + 1][r]);
        }
    }
}

static void quantise_part(void *argument, int part, int parts) {
    const job *j = argument;
    long first, last;
    pelton_share(j->args->linear.num_rows, part, parts, &first, &last);
    quantise_rows(j, j->x, first, last);
}

static void multiply_part(void *argument, int part, int parts) {
    const job *j = argument;
    x_block *x = j->x;
    long first, last;
    pelton_share(j->num_pairs, part, parts, &first, &last);
    if (first == last)
        return;
    int form;
    int64_t first_panel = halves(j->args->linear.activation) ? first : 2 * first;
    const uint8_t *panel = panel_of(j->args, first_panel, &form);
    fetch(panel, panel_bytes(form, j->num_blocks));
    if (j->is_copy_per_part) {
        x += part * j->args->linear.num_rows * j->num_blocks;
        quantise_rows(j, x, 0, j->args->linear.num_rows);
    }
    multiply(j, j->draws ? j->draws + part * j->args->linear.num_rows : NULL, x, first, last,
             share_ahead(&j->args->linear, part, parts, panel));
}

/* ---- many rows, by way of bfloat16 ---- */

#ifdef __AMX_BF16__

/* Two bfloat16 in each lane: of `first` the low one. */
INLINE v16u pairs_of(v16f first, v16f second) {
    __m512i turns = (__m512i)((v16u){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 +
                              0x100000);
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (v16u)_mm512_permutexvar_epi16(turns, (__m512i)both);
}

/* 256 + a code of `bits` bits that begins at bit `at` of each lane: as the fraction of a float. */
INLINE v16f code_above_256(int bits, v16u lanes, int at) {
    v16u code = at < 15 ? lanes << (15 - at) : lanes >> (at - 15);
    return (v16f)((code & ((1u << bits) - 1) << 15) | 0x43800000);
}

/* A panel as linear.c wants it: [k / 2][16 features][2 columns]. */
INLINE void dense_panel(int form, const uint8_t *panel, int64_t num_blocks, v16u *to) {
    const uint8_t *codes = panel + codes_start(form, num_blocks);
    for (int64_t block = 0; block < num_blocks; block++, codes += code_bytes(form), to += LANES) {
        const v16u *lines = (const v16u *)codes;
        for (int64_t at = 0; at < code_bytes(form); at += 64) /* of the panel behind */
            __builtin_prefetch(codes + codes_start(form, num_blocks) + num_blocks * code_bytes(form) + at);
        v16f scales[2], starts[2], minimum;
        load_scales(form, panel, block, &scales[0], &scales[1], &minimum);
        for (int half = 0; half < 2; half++)
            starts[half] = minimum - scales[half] * (float)(256 + offset_of(form));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            v16u bytes[2] = {lines[i], lines[i]};
            if (bits_of(form) != 4)
                load_codes(form, lines, i, &bytes[0], &bytes[1]);
            for (int half = 0; half < 2; half++) {
                v16f numbers[4];
                for (int column = 0; column < 4; column++) {
                    int bits = bits_of(form), at = 8 * column + (bits == 4 ? 4 * half : 0);
                    v16f code = code_above_256(bits, bytes[half], at);
                    numbers[column] = fused(code, scales[half], starts[half]);
                }
                to[half * 8 + 2 * i] = pairs_of(numbers[0], numbers[1]);
                to[half * 8 + 2 * i + 1] = pairs_of(numbers[2], numbers[3]);
            }
        }
    }
}

static void fill_panel(const void *context, int64_t panel, uint16_t *to) {
    const job *j = context;
    int form;
    const uint8_t *from = panel_of(j->args, panel, &form);
#define CASE(f) case f: dense_panel(f, from, j->num_blocks, (v16u *)to); break;
    FOR_FORM(form, CASE)
#undef CASE
}

static void dense_one(const job *j, int64_t panel, int64_t place) {
    fill_panel(j, panel, j->dense + place * LANES * j->args->linear.num_columns);
}

/* By pairs, so that mostly the part that multiplies a panel has just made it. */
static void dense_part(void *argument, int part, int parts) {
    const job *j = argument;
    int is_gated = halves(j->args->linear.activation);
    int64_t width = j->last_pair - j->first_pair;
    long first, last;
    pelton_share(width, part, parts, &first, &last);
    for (long i = first; i < last; i++) {
        int64_t pair = j->first_pair + i;
        int64_t left = is_gated ? pair : 2 * pair;
        int64_t right = is_gated ? pair + j->num_panels / 2 : 2 * pair + 1;
        dense_one(j, left, is_gated ? i : 2 * i);
        if (right < j->num_panels)
            dense_one(j, right, is_gated ? width + i : 2 * i + 1);
    }
}

/* For very many rows, which pass over the numbers several times: panels of 4 MB at a time, by all
   parts; behind them, their bias. */
static int run_shared(job *j) {
    static char *memory;
    static int64_t memory_bytes;
    const linear_args *a = &j->args->linear;
    int is_gated = halves(a->activation);
    int64_t dense_bytes = 2 * LANES * a->num_columns * (int64_t)sizeof(bf16);
    int64_t bias_bytes = 2 * LANES * (int64_t)sizeof(float);
    int64_t at_once = DENSE_BYTES / dense_bytes;
    at_once = at_once < 1 ? 1 : at_once > j->num_pairs ? j->num_pairs : at_once;
    if (memory_bytes < at_once * (dense_bytes + bias_bytes)) {
        free(memory);
        memory_bytes = at_once * (dense_bytes + bias_bytes);
        memory = aligned_alloc(64, (size_t)memory_bytes);
        if (!memory) {
            memory_bytes = 0;
            return 1;
        }
    }
    j->dense = (bf16 *)memory;
    float *bias = (float *)(memory + at_once * dense_bytes);
    for (j->first_pair = 0; j->first_pair < j->num_pairs; j->first_pair = j->last_pair) {
        j->last_pair = j->first_pair + at_once < j->num_pairs ? j->first_pair + at_once : j->num_pairs;
        pelton_run(dense_part, j);
        linear_args some = *a;
        int64_t width = (j->last_pair - j->first_pair) * LANES;
        int64_t start = j->first_pair * (is_gated ? LANES : 2 * LANES);
        some.weight = j->dense;
        some.num_features = is_gated || start + 2 * width < a->num_features ? 2 * width
                                                                            : a->num_features - start;
        some.out = (bf16 *)a->out + start;
        if (a->bias && is_gated) {
            memcpy(bias, a->bias + start, (size_t)width * sizeof(float));
            memcpy(bias + width, a->bias + a->num_features / 2 + start, (size_t)width * sizeof(float));
            some.bias = bias;
        } else if (a->bias) {
            some.bias = a->bias + start;
        }
        if (pelton_linear_entered(&some, NULL, NULL))
            return 1;
    }
    return 0;
}
#endif

/* drawn: NULL, or what becomes of the rows instead of `out`. */
static int run(const block_args *args, const draw_args *drawn) {
    const linear_args *a = &args->linear;
    int parts = pelton_num_threads();
    job j = {.args = args, .num_blocks = a->num_columns / BLOCK};
    for (int64_t run = 0; run < args->num_runs; run++)
        j.num_panels += args->runs[run].num_panels;
    j.num_pairs = (j.num_panels + 1) / 2;
#ifdef __AMX_BF16__
    if (a->use_amx && a->dtype == IS_BF16 && a->num_rows >= AMX_MIN_ROWS) {
        if (!drawn && a->num_rows >= ROWS_TO_SHARE)
            return run_shared(&j);
        panel_source source = {fill_panel, &j};
        return pelton_linear_entered(a, drawn, &source);
    }
#endif
    j.is_copy_per_part = a->num_rows <= ROWS_PER_PART;
    int64_t x_bytes = (j.is_copy_per_part ? parts : 1) * a->num_rows * j.num_blocks *
                      (int64_t)sizeof(x_block);
    x_bytes = (x_bytes + 63) / 64 * 64;
    int64_t draw_bytes = drawn ? (int64_t)sizeof(draw) * parts * a->num_rows : 0;
    j.x = pelton_scratch((long)(x_bytes + draw_bytes));
    if (!j.x)
        return 1;
    if (drawn) {
        j.indices = drawn->indices;
        j.draws = (draw *)((char *)j.x + x_bytes);
        begin_draws(j.draws, parts, drawn);
    }
    if (!j.is_copy_per_part)
        pelton_run(quantise_part, &j);
    pelton_run(multiply_part, &j);
    if (drawn)
        end_draws(j.draws, parts, drawn);
    return 0;
}

int pelton_blocks(const block_args *args) {
    pelton_enter();
    int failed = run(args, NULL);
    pelton_leave();
    return failed;
}

int pelton_block_draw(const block_draw_args *args) {
    block_args blocks = {.linear = args->draw.head, .num_runs = args->num_runs};
    memcpy(blocks.runs, args->runs, sizeof blocks.runs);
    pelton_enter();
    int failed = run(&blocks, &args->draw);
    pelton_leave();
    return failed;
}
