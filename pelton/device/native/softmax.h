/* What every softmax over keys has in common. */
#ifndef PELTON_SOFTMAX_H
#define PELTON_SOFTMAX_H

#include "vec.h"

#define LOG2_E 1.44269504088896341f
#define LN_2 0.69314718055994531f
/* The top of a softmax that has seen nothing: finite, so that no difference is NaN. */
#define NOTHING (-1e30f)

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

/* softcap * tanh(scale * score / softcap) */
static inline v16f capped(v16f score, float scale, float softcap) {
    return softcap * (1.0f - 2.0f / (exp_v16(score * (2.0f * scale / softcap)) + 1.0f));
}

#ifdef __AVX512F__

/* 2^x, off by 3e-6 of it at most, which bfloat16 does not see: 2^round(x) times a polynomial. */
static inline __m512 power_of_2(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(9.58285e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590642e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312419e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* Which of the 16 keys from `key` on lie in from..to. */
static inline __mmask16 seen(int64_t key, int64_t from, int64_t to) {
    int64_t first = least(most(from - key, 0), 16), last = least(most(to - key, 0), 16);
    return (__mmask16)(((1u << last) - 1) & ~((1u << first) - 1));
}

#endif
#endif
