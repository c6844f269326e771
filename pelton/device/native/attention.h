/* Attention over paged keys and values; ops/paged_attention says what it computes. */
#ifndef PELTON_ATTENTION_H
#define PELTON_ATTENTION_H

#include <stdint.h>

typedef struct {
    const void *query; /* [T, Hq, D], tokens query_stride elements apart */
    void *out;         /* [T, Hq, D] */
    float *lse;        /* [T, Hq], or NULL */
    const void *kv;    /* [num_blocks, block_size, 2, Hk, D], blocks block_stride elements apart */
    const float *sinks; /* [Hq], or NULL */
    const int32_t *query_start_loc, *seq_lens; /* [num_rows + 1], [num_rows] */
    const int32_t *block_table;                /* [num_rows, W], rows table_stride apart */
    int64_t num_rows, num_tokens;              /* tokens behind the last row get 0 */
    int64_t query_stride, out_stride, block_stride, table_stride;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t window;        /* 0: none */
    float scale, softcap;  /* softcap 0: none */
    int32_t dtype, use_amx; /* linear.h: of queries, keys, values and out */
} attention_args;

/* 0, or 1 if memory is short. */
int pelton_attention(const attention_args *args);

#endif
