/* The small ops around a model's layers; pelton/ops says what each computes. Arrays are contiguous
   where no stride is given; strides count elements. All functions return 0. */
#ifndef PELTON_STEPS_H
#define PELTON_STEPS_H

#include <stdint.h>

/* Columns of row state, as ops/step_tensors.py has them. */
enum { PROMPT_LEN, PREFILL_LEN, TOTAL_LEN, NUM_COMPUTED, NEXT_TOKENS };

typedef struct {
    const int32_t *table;  /* [R, W] */
    int32_t *batch_table;  /* [num_rows, width] */
    int64_t *slot_mapping; /* [num_tokens] */
    int64_t table_stride, batch_stride, width, block_size;
    int64_t window; /* 0: none */
} kv_group;

typedef struct {
    const int32_t *fields, *tokens; /* [R, num_fields], [R, L] */
    const int32_t *live, *idx_mapping, *query_start_loc, *cu_num_logits;
    int32_t *input_ids;
    int64_t *positions; /* [num_axes, num_tokens] */
    int32_t *seq_lens;
    uint8_t *is_padding;
    int64_t *logits_indices, *logits_slots;
    int32_t *logits_positions;
    const kv_group *groups;
    int64_t fields_stride, tokens_stride, positions_stride, num_fields;
    int64_t num_rows, num_tokens, num_logits, num_axes, num_groups;
} build_inputs_args;

typedef struct {
    int32_t *fields, *tokens; /* [R, *], [R, token_columns] */
    const int32_t *live, *idx_mapping, *query_start_loc, *cu_num_logits;
    const int32_t *sampled, *num_sampled; /* [num_rows, 1 + K], [num_rows] */
    int64_t fields_stride, tokens_stride, sampled_stride, num_sampled_stride;
    int64_t num_rows, token_columns, num_columns; /* 1 + K */
} advance_args;

typedef struct {
    const int32_t *cu_num_logits, *idx_mapping, *fields, *token_ids, *status;
    int32_t *out; /* [num_rows, num_columns + 2] */
    int64_t fields_stride, out_stride, num_rows, num_columns, num_logits;
} verify_args;

typedef struct {
    const void *table; /* rows of row_bytes, table_stride bytes apart */
    const void *index; /* [num_rows] int32 or int64 */
    void *out;         /* rows out_stride bytes apart */
    int64_t row_bytes, table_stride, out_stride, num_rows, index_is_int64;
} take_rows_args;

/* Rows of a weight as linear.c packs it: panels of 16 rows. */
typedef struct {
    const void *packed;
    const int32_t *index; /* [num_rows] */
    void *out;            /* [num_rows, num_columns] */
    int64_t num_rows, num_columns, columns_pad, out_stride, is_bf16;
} take_packed_rows_args;

typedef struct {
    int32_t *arena;
    const int32_t *writes;
    int64_t num_writes;
} staged_write_args;

typedef struct {
    void *const *pools;          /* [num_pools] */
    const int64_t *block_bytes;  /* [num_pools]; blocks lie side by side */
    const int32_t *block_ids;    /* [num_blocks] */
    int64_t num_pools, num_blocks;
} zero_blocks_args;

int pelton_build_inputs(const build_inputs_args *args);
int pelton_advance(const advance_args *args);
int pelton_verify(const verify_args *args);
int pelton_take_rows(const take_rows_args *args);
int pelton_take_packed_rows(const take_packed_rows_args *args);
int pelton_staged_write(const staged_write_args *args);
int pelton_zero_blocks(const zero_blocks_args *args);

#endif
