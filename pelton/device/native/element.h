/* Numbers of either 16-bit type or float32, computed with as float32. dtype: of linear.h. */
#ifndef PELTON_ELEMENT_H
#define PELTON_ELEMENT_H

#include "linear.h"
#include "vec.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

static inline float f16_to_float(uint16_t half) {
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    _Float16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
#endif
}

/* To the nearest, ties to even. */
static inline uint16_t float_to_f16(float value) {
#ifdef __F16C__
    return _cvtss_sh(value, 0);
#else
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
#endif
}

static inline v16f load_f16(const uint16_t *from) {
#ifdef __AVX512F__
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    float values[LANES];
    for (int i = 0; i < LANES; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    return load_f32(values);
#else
    float values[LANES];
    for (int i = 0; i < LANES; i++)
        values[i] = f16_to_float(from[i]);
    return load_f32(values);
#endif
}

static inline void store_f16(uint16_t *to, v16f value) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, 0));
#else
    for (int i = 0; i < LANES; i++)
        to[i] = float_to_f16(value[i]);
#endif
}

static inline size_t element_bytes(int dtype) {
    return dtype == IS_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* Element i of `from`, and the 16 from there on. */
static inline float get_one(int dtype, const void *from, int64_t i) {
    if (dtype == IS_F32)
        return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return dtype == IS_BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

static inline v16f get_lanes(int dtype, const void *from, int64_t i) {
    if (dtype == IS_F32)
        return load_f32((const float *)from + i);
    const uint16_t *at = (const uint16_t *)from + i;
    return dtype == IS_BF16 ? load_bf16(at) : load_f16(at);
}

static inline void set_one(int dtype, void *to, int64_t i, float value) {
    if (dtype == IS_F32)
        ((float *)to)[i] = value;
    else
        ((uint16_t *)to)[i] = dtype == IS_BF16 ? float_to_bf16(value) : float_to_f16(value);
}

static inline void set_lanes(int dtype, void *to, int64_t i, v16f value) {
    uint16_t *at = (uint16_t *)to + i;
    if (dtype == IS_F32)
        store_f32((float *)to + i, value);
    else if (dtype == IS_BF16)
        store_bf16(at, value);
    else
        store_f16(at, value);
}

#endif
