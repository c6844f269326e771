/* Attention over paged keys and values, or over a step's own tokens; ops/paged_attention and
   ops/bidirectional_attention say what it computes. */
#ifndef PELTON_ATTENTION_H
#define PELTON_ATTENTION_H

#include <stdint.h>

#include "codes.h"

typedef struct {
    const void *query; /* [T, Hq, D], tokens query_stride elements apart */
    void *out;         /* [T, Hq, D] */
    float *lse;        /* [T, Hq], or NULL */
    const void *kv;    /* [num_blocks, block_size, 2, Hk, D], or codes and scales (codes.h); blocks
                          block_stride elements apart, of codes bytes. Or without block_table
                          [T, 2, Hk, D], tokens query_stride elements apart */
    const float *sinks; /* [Hq], or NULL */
    const int32_t *query_start_loc, *seq_lens; /* [num_rows + 1], [num_rows] */
    /* [num_rows, W], rows table_stride apart. NULL: a row has the step's own tokens, and each sees
       them all; seq_lens, block_size and strides of blocks are not read then. */
    const int32_t *block_table;
    int64_t num_rows, num_tokens;              /* tokens behind the last row get 0 */
    int64_t query_stride, out_stride, block_stride, table_stride;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t window;        /* 0: none; without block_table: so many tokens on each side */
    float scale, softcap;  /* softcap 0: none */
    int32_t dtype;   /* linear.h: of queries and out */
    int32_t kv_kind; /* codes.h: of keys and values, dtype or codes */
    int32_t use_amx;
} attention_args;

/* A row's token `key` in kv; so many tokens from there on lie one after the other, `*stride` bytes
   apart. */
static inline const char *key_at(const attention_args *a, int64_t row, int64_t key,
                                 int64_t *together, int64_t *stride) {
    const char *kv = a->kv;
    int64_t element = (int64_t)stored_bytes(a->kv_kind);
    if (!a->block_table) {
        *together = INT64_MAX;
        *stride = a->query_stride * element;
        return kv + (a->query_start_loc[row] + key) * *stride;
    }
    int64_t block = a->block_table[row * a->table_stride + key / a->block_size];
    int64_t at = key % a->block_size;
    *together = a->block_size - at;
    *stride = slot_bytes(a->kv_kind, a->num_kv_heads, a->head_dim);
    return kv + block * a->block_stride * element + at * *stride;
}

/* The keys that tokens first..last of a row see together: *start..*end. */
static inline void keys_seen(const attention_args *a, int64_t row, int64_t first, int64_t last,
                             int64_t *start, int64_t *end) {
    int64_t length = a->query_start_loc[row + 1] - a->query_start_loc[row];
    if (!a->block_table) {
        *start = a->window && first > a->window ? first - a->window : 0;
        *end = a->window && last + a->window < length ? last + a->window : length;
        return;
    }
    int64_t earlier = a->seq_lens[row] - length;
    *end = earlier + last > 0 ? earlier + last : 0;
    *start = a->window && earlier + first + 1 > a->window ? earlier + first + 1 - a->window : 0;
}

/* 0, or 1 if memory is short. */
int pelton_attention(const attention_args *args);

#endif
