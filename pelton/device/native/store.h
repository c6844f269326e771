/* From a layer's qkv product to rotated queries and stored keys and values; ops/qkv_attention says
   what it computes. */
#ifndef PELTON_STORE_H
#define PELTON_STORE_H

#include <stdint.h>

enum { MAX_HEAD_DIM = 512 };

typedef struct {
    void *qkv;                   /* [T, (Hq + 2 Hk) * D]; queries and keys are changed in place */
    const void *cos, *sin;       /* [T, rotary_dim], [T, rotary_dim / 2] */
    const void *q_norm, *k_norm; /* [D], or NULL */
    void *kv;                    /* slots side by side; codes.h */
    const int64_t *kv_slots;     /* [T]; below 0: a padding token, which is not stored; NULL: none is */
    int64_t num_tokens, qkv_stride, cos_stride, sin_stride;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    float norm_eps;
    int32_t dtype;   /* linear.h */
    int32_t kv_kind; /* codes.h: dtype, or codes */
} store_qkv_args;

int pelton_store_qkv(const store_qkv_args *args);

#endif
