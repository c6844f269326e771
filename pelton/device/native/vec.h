/* Vectors of 16 lanes. The compiler cuts them to what the level has: one AVX-512 register, two of
   AVX2, four of NEON. */
#ifndef PELTON_VEC_H
#define PELTON_VEC_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16

typedef float v16f __attribute__((vector_size(64), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), may_alias));
typedef uint16_t v16h __attribute__((vector_size(32), may_alias));

typedef uint16_t bf16;

static inline v16f splat(float value) { return value - (v16f){0}; }

static inline v16u splat_u(uint32_t value) { return value - (v16u){0}; }

static inline v16f load_f32(const float *from) {
    v16f value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store_f32(float *to, v16f value) { memcpy(to, &value, sizeof value); }

static inline v16f load_bf16(const bf16 *from) {
#ifdef __AVX512F__
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return (v16f)_mm512_slli_epi32(wide, 16);
#else
    v16h half;
    memcpy(&half, from, sizeof half);
    return (v16f)(__builtin_convertvector(half, v16u) << 16);
#endif
}

/* Rounds to the nearest, ties to even, as torch does; NaN stays NaN. Where the CPU has an
   instruction for it, denormal numbers (below 1.2e-38) become 0. */
static inline v16h to_bf16(v16f value) {
#ifdef __AVX512BF16__
    return (v16h)_mm512_cvtneps_pbh((__m512)value);
#else
    v16u bits = (v16u)value;
    v16u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    v16u is_nan = (v16u)((bits & 0x7fffffff) > 0x7f800000);
    rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
    return __builtin_convertvector(rounded, v16h);
#endif
}

static inline void store_bf16(bf16 *to, v16f value) {
    v16h half = to_bf16(value);
    memcpy(to, &half, sizeof half);
}

static inline float bf16_to_float(bf16 half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline bf16 float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float sum_of_lanes(v16f value) {
    float sums[LANES];
    memcpy(sums, &value, sizeof sums);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            sums[i] += sums[i + width];
    return sums[0];
}

static inline v16f blend(v16i mask, v16f yes, v16f no) {
    return (v16f)(((v16i)yes & mask) | ((v16i)no & ~mask));
}

/* 1 / value, within 2 units in the last place; value in the range of normal numbers. */
static inline v16f reciprocal(v16f value) {
#ifdef __AVX512F__
    v16f guess = (v16f)_mm512_rcp14_ps((__m512)value);
    return guess * (2.0f - value * guess);
#else
    return 1.0f / value;
#endif
}

/* Whether any bit of a mask is set. */
static inline int any_lane(v16i mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int any = 0;
    for (int i = 0; i < LANES; i++)
        any |= mask[i];
    return any != 0;
#endif
}

/* exp, within 2 units in the last place: 2^n * p(r), r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], p the
   Taylor polynomial of degree 7. Inputs are clamped to [-87, 88]. */
static inline v16f exp_v16(v16f x) {
    x = blend(x < -87.0f, splat(-87.0f), x);
    x = blend(x > 88.0f, splat(88.0f), x);
    v16f scaled = x * 1.44269504088896341f;
    /* Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits. */
    v16f magic = splat(12582912.0f);
    v16f shifted = scaled + magic;
    v16f n = shifted - magic;
    v16f r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    v16f p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    v16i exponent = ((v16i)shifted - (v16i)magic + 127) << 23;
    return p * (v16f)exponent;
}

/* Natural logarithm of a normal number above 0, within 2 units in the last place: with
   x = 2^n m, m in [sqrt(1/2), sqrt(2)), it is n ln 2 + log(m), the latter by a polynomial in m - 1
   (coefficients of Cephes' logf, S. L. Moshier, 1992). */
static inline v16f log_v16(v16f x) {
    v16i bits = (v16i)x;
    v16i n = ((bits - 0x3f3504f3) >> 23); /* sqrt(1/2) */
    v16f m = (v16f)(bits - (n << 23));
    v16f f = m - 1.0f, z = f * f, exponent = __builtin_convertvector(n, v16f);
    v16f p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * z - exponent * 2.12194440e-4f - 0.5f * z;
    return f + p + exponent * 0.693359375f;
}

#ifdef __AVX512F__
/* lines[i][k] becomes lines[k][i]. */
static inline __attribute__((always_inline)) void transpose(__m512i *lines) {
    __m512i next[16];
    for (int i = 0; i < 16; i += 2) {
        next[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
        next[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            lines[i + 2 * k] = _mm512_unpacklo_epi64(next[i + k], next[i + k + 2]);
            lines[i + 2 * k + 1] = _mm512_unpackhi_epi64(next[i + k], next[i + k + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int k = 0; k < 4; k++) {
            next[i + k] = _mm512_shuffle_i32x4(lines[i + k], lines[i + k + 4], 0x88);
            next[i + k + 4] = _mm512_shuffle_i32x4(lines[i + k], lines[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 4; k++) {
        lines[k] = _mm512_shuffle_i32x4(next[k], next[k + 8], 0x88);
        lines[k + 8] = _mm512_shuffle_i32x4(next[k], next[k + 8], 0xdd);
        lines[k + 4] = _mm512_shuffle_i32x4(next[k + 4], next[k + 12], 0x88);
        lines[k + 12] = _mm512_shuffle_i32x4(next[k + 4], next[k + 12], 0xdd);
    }
}
#endif

/* sum + the products of two columns: a line holds both for 16 features, `pair` for all of them. */
static inline v16f dot_pair(v16f sum, v16u line, uint32_t pair) {
#ifdef __AVX512BF16__
    return (v16f)_mm512_dpbf16_ps((__m512)sum, (__m512bh)line, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    union {
        uint32_t bits;
        float value;
    } low = {pair << 16}, high = {pair & 0xffff0000u};
    sum += (v16f)(line << 16) * low.value;
    return sum + (v16f)(line & 0xffff0000u) * high.value;
#endif
}

#endif
