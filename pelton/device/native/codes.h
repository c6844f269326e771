/* Keys and values in a byte each (ops/quantise_kv). A token's slot is its codes [2][Hk][D], and behind
   them a scale in bfloat16 for each head, [2][Hk]. kind: of stored keys and values; linear.h's dtype
   where they are numbers as they are, or one of these. */
#ifndef PELTON_CODES_H
#define PELTON_CODES_H

#include "element.h"

enum { IS_INT8 = 3, IS_E4M3 = 4, IS_E5M2 = 5 };

static inline int are_codes(int kind) { return kind >= IS_INT8; }

static inline size_t stored_bytes(int kind) { return are_codes(kind) ? 1 : element_bytes(kind); }

static inline int64_t slot_bytes(int kind, int64_t num_kv_heads, int64_t head_dim) {
    int64_t numbers = 2 * num_kv_heads * head_dim * (int64_t)stored_bytes(kind);
    return numbers + (are_codes(kind) ? 2 * num_kv_heads * (int64_t)sizeof(bf16) : 0);
}

/* float8 codes are read through float16's bits, seeeeemmmmmmmmmm. E5M2's are their upper half. E4M3's
   lie 7 places higher than in a byte, and then stand for the code / 256, since its exponent counts
   from 7 and float16's from 15. The factor is part of the scale. */
static inline int places_of(int kind) { return kind == IS_E4M3 ? 7 : 8; }
static inline float factor_of(int kind) { return kind == IS_E4M3 ? 256.0f : 1.0f; }

/* Code i of `from`, and the 16 from there on, divided by the factor. */
static inline float code_one(int kind, const void *from, int64_t i) {
    int8_t code = ((const int8_t *)from)[i];
    if (kind == IS_INT8)
        return code;
    uint16_t bits = (uint16_t)((uint32_t)(int32_t)code << places_of(kind));
    /* Of a byte that was widened with its sign, that stands in the exponent, too. */
    return f16_to_float(kind == IS_E4M3 ? bits & 0xbfff : bits);
}

#ifdef __AVX2__
/* The float16 of 16 or 32 float8 codes, each widened with its sign. */
static inline __m256i half_codes(int kind, __m256i wide) {
    if (kind == IS_E5M2)
        return _mm256_slli_epi16(wide, 8);
    return _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
}
#endif

#ifdef __AVX512F__
static inline __m512i many_half_codes(int kind, __m512i wide) {
    if (kind == IS_E5M2)
        return _mm512_slli_epi16(wide, 8);
    return _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbfff));
}
#endif

static inline v16f code_lanes(int kind, const void *from, int64_t i) {
#ifdef __AVX512F__
    __m128i codes = _mm_loadu_si128((const __m128i *)((const char *)from + i));
    if (kind == IS_INT8)
        return (v16f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    return (v16f)_mm512_cvtph_ps(half_codes(kind, _mm256_cvtepi8_epi16(codes)));
#else
#ifdef __AVX2__
    if (kind != IS_INT8) {
        uint16_t halves[LANES];
        __m128i codes = _mm_loadu_si128((const __m128i *)((const char *)from + i));
        _mm256_storeu_si256((__m256i *)halves, half_codes(kind, _mm256_cvtepi8_epi16(codes)));
        return load_f16(halves);
    }
#endif
    float values[LANES];
    for (int lane = 0; lane < LANES; lane++)
        values[lane] = code_one(kind, from, i + lane);
    return load_f32(values);
#endif
}

/* What is stored, codes without their scale. */
static inline float stored_one(int kind, const void *from, int64_t i) {
    return are_codes(kind) ? code_one(kind, from, i) : get_one(kind, from, i);
}

static inline v16f stored_lanes(int kind, const void *from, int64_t i) {
    return are_codes(kind) ? code_lanes(kind, from, i) : get_lanes(kind, from, i);
}

/* Scales as they are stored, in a float's upper half, become what numbers are multiplied with. Of a
   head with an infinity, whose codes are nothing, NaN. */
static inline v16f scale_lanes(int kind, v16f stored) {
    return stored * factor_of(kind) + stored * 0.0f;
}

#endif
