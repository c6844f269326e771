/* The small ops around a model's layers. Each is a few microseconds on one thread. */
#include "steps.h"

#include <stddef.h>
#include <string.h>

#define PAD_SLOT (-1)

static inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

/* ---- build_inputs ---- */

static int32_t token_at(const build_inputs_args *a, int64_t slot, int64_t position) {
    const int32_t *fields = a->fields + slot * a->fields_stride;
    /* A position before the last known token is read from the table; it and its drafts are not. */
    int64_t draft = position - (fields[TOTAL_LEN] - 1);
    int32_t id = draft < 0 ? a->tokens[slot * a->tokens_stride + position]
                           : fields[clamp(NEXT_TOKENS + draft, NEXT_TOKENS, a->num_fields - 1)];
    return id < 0 ? 0 : id;
}

static void fill_table(const kv_group *g, int64_t row, int64_t slot, int64_t computed,
                       int64_t seq_len) {
    int32_t *to = g->batch_table + row * g->batch_stride;
    int64_t end = clamp((seq_len + g->block_size - 1) / g->block_size, 0, g->width), first = 0;
    if (g->window) {
        /* The first block whose last token a query token of this step still sees. */
        int64_t seen = computed - (g->window - 1);
        first = clamp(seen > 0 ? seen / g->block_size : 0, 0, end);
    }
    memset(to, 0, (size_t)first * sizeof *to);
    if (end > first)
        memcpy(to + first, g->table + slot * g->table_stride + first,
               (size_t)(end - first) * sizeof *to);
    memset(to + end, 0, (size_t)(g->width - end) * sizeof *to);
}

static void build_row(const build_inputs_args *a, int64_t row) {
    int64_t slot = a->idx_mapping[row], start = a->query_start_loc[row];
    int64_t end = a->query_start_loc[row + 1];
    int64_t computed = a->fields[slot * a->fields_stride + NUM_COMPUTED];
    int64_t seq_len = row < a->live[0] ? computed + end - start : 0;
    a->seq_lens[row] = (int32_t)seq_len;
    for (int64_t i = 0; i < a->num_groups; i++)
        fill_table(a->groups + i, row, slot, computed, seq_len);
    if (end > a->live[1])
        end = a->live[1];
    for (int64_t token = start; token < end; token++) {
        int64_t position = computed + token - start;
        a->input_ids[token] = token_at(a, slot, position);
        a->is_padding[token] = 0;
        for (int64_t axis = 0; axis < a->num_axes; axis++)
            a->positions[axis * a->positions_stride + token] = position;
        for (int64_t i = 0; i < a->num_groups; i++) {
            const kv_group *g = a->groups + i;
            int64_t block = g->table[slot * g->table_stride + position / g->block_size];
            g->slot_mapping[token] = block * g->block_size + position % g->block_size;
        }
    }
}

int pelton_build_inputs(const build_inputs_args *a) {
    for (int64_t row = 0; row < a->num_rows; row++)
        build_row(a, row);
    for (int64_t token = a->live[1]; token < a->num_tokens; token++) {
        a->input_ids[token] = 0;
        a->is_padding[token] = 1;
        for (int64_t axis = 0; axis < a->num_axes; axis++)
            a->positions[axis * a->positions_stride + token] = 0;
        for (int64_t i = 0; i < a->num_groups; i++)
            a->groups[i].slot_mapping[token] = PAD_SLOT;
    }
    int64_t row = 0;
    for (int64_t index = 0; index < a->num_logits; index++) {
        while (row < a->num_rows - 1 && a->cu_num_logits[row + 1] <= index)
            row++;
        int64_t from_end = a->cu_num_logits[row + 1] - index;
        int64_t at = clamp(a->query_start_loc[row + 1] - from_end, 0, a->num_tokens - 1);
        a->logits_indices[index] = at;
        a->logits_slots[index] = a->idx_mapping[row];
        a->logits_positions[index] = (int32_t)a->positions[at];
    }
    return 0;
}

/* ---- after the draw ---- */

int pelton_verify(const verify_args *a) {
    for (int64_t row = 0; row < a->num_rows; row++) {
        int32_t *out = a->out + row * a->out_stride;
        memset(out, 0, (size_t)(a->num_columns + 2) * sizeof *out);
        int64_t first = a->cu_num_logits[row], count = a->cu_num_logits[row + 1] - first;
        if (first + count > a->num_logits)
            count = a->num_logits - first;
        const int32_t *fields = a->fields + (int64_t)a->idx_mapping[row] * a->fields_stride;
        int64_t kept = 0;
        while (kept < count) {
            int32_t drawn = a->token_ids[first + kept];
            out[kept] = drawn;
            if (!out[a->num_columns + 1])
                out[a->num_columns + 1] = a->status[first + kept];
            kept++;
            if (kept == count || drawn != fields[NEXT_TOKENS + kept])
                break;
        }
        out[a->num_columns] = (int32_t)kept;
    }
    return 0;
}

int pelton_advance(const advance_args *a) {
    int64_t num_rows = a->live[0] < a->num_rows ? a->live[0] : a->num_rows;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = a->idx_mapping[row];
        int32_t *fields = a->fields + slot * a->fields_stride;
        const int32_t *sampled = a->sampled + row * a->sampled_stride;
        int32_t kept = a->num_sampled[row * a->num_sampled_stride];
        int32_t query_len = a->query_start_loc[row + 1] - a->query_start_loc[row];
        int32_t num_logits = a->cu_num_logits[row + 1] - a->cu_num_logits[row];
        for (int64_t i = 0; i < kept && i < a->num_columns; i++)
            if (fields[TOTAL_LEN] + i < a->token_columns)
                a->tokens[slot * a->tokens_stride + fields[TOTAL_LEN] + i] = sampled[i];
        fields[TOTAL_LEN] += kept;
        fields[NUM_COMPUTED] += query_len - (num_logits > 0 ? num_logits - kept : 0);
        if (kept > 0)
            fields[NEXT_TOKENS] = sampled[kept - 1];
    }
    return 0;
}

/* ---- rows, words, blocks ---- */

int pelton_take_rows(const take_rows_args *a) {
    for (int64_t row = 0; row < a->num_rows; row++) {
        int64_t at = a->index_is_int64 ? ((const int64_t *)a->index)[row]
                                       : ((const int32_t *)a->index)[row];
        memcpy((char *)a->out + row * a->out_stride, (const char *)a->table + at * a->table_stride,
               (size_t)a->row_bytes);
    }
    return 0;
}

int pelton_take_packed_rows(const take_packed_rows_args *a) {
    enum { PANEL = 16 };
    for (int64_t row = 0; row < a->num_rows; row++) {
        int64_t panel = a->index[row] / PANEL, lane = a->index[row] % PANEL, k = a->num_columns;
        if (a->is_bf16) { /* a word holds two columns of a row */
            const uint32_t *from = (const uint32_t *)a->packed + panel * a->columns_pad / 2 * PANEL + lane;
            uint16_t *to = (uint16_t *)a->out + row * a->out_stride;
            for (int64_t pair = 0; pair < k / 2; pair++)
                memcpy(to + 2 * pair, from + pair * PANEL, sizeof *from);
            if (k % 2)
                memcpy(to + k - 1, from + k / 2 * PANEL, sizeof *to);
        } else {
            const float *from = (const float *)a->packed + panel * a->columns_pad * PANEL + lane;
            float *to = (float *)a->out + row * a->out_stride;
            for (int64_t column = 0; column < k; column++)
                to[column] = from[column * PANEL];
        }
    }
    return 0;
}

int pelton_staged_write(const staged_write_args *a) {
    const int32_t *targets = a->writes, *cu_lens = targets + a->num_writes;
    const int32_t *contents = cu_lens + a->num_writes + 1;
    for (int64_t i = 0; i < a->num_writes; i++)
        memcpy(a->arena + targets[i], contents + cu_lens[i],
               (size_t)(cu_lens[i + 1] - cu_lens[i]) * sizeof(int32_t));
    return 0;
}

int pelton_zero_blocks(const zero_blocks_args *a) {
    for (int64_t i = 0; i < a->num_pools; i++)
        for (int64_t k = 0; k < a->num_blocks; k++)
            memset((char *)a->pools[i] + a->block_ids[k] * a->block_bytes[i], 0,
                   (size_t)a->block_bytes[i]);
    return 0;
}
