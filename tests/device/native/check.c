/* Products and attention over memory of exactly the right size, for the sanitizers. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "attention.h"
#include "codes.h"
#include "linear.h"
#include "norm.h"
#include "pool.h"
#include "steps.h"
#include "store.h"
#include "values.h"

/* Returns 1 on a wrong value. */
static int check(int is_half, int64_t t, int64_t k, int64_t n, int activation, int mode, int normed,
                 int use_amx) {
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    int64_t k_pad = (k + 31) / 32 * 32, n_pad = (n + 15) / 16 * 16;
    int64_t x_stride = k + 3, width = halves(activation) ? n / 2 : n, out_stride = width + 5;
    void *x = malloc(element * (size_t)((t - 1) * x_stride + k));
    void *out = malloc(element * (size_t)((t - 1) * out_stride + width));
    void *weight = malloc(element * (size_t)(n * k)), *norm = malloc(element * (size_t)k);
    void *packed = aligned_alloc(64, element * (size_t)(n_pad * k_pad));
    float *bias = calloc((size_t)n_pad, sizeof *bias);
    fill(x, is_half, (t - 1) * x_stride + k);
    fill(out, is_half, (t - 1) * out_stride + width);
    fill(weight, is_half, n * k);
    fill(norm, is_half, k);
    fill(bias, 0, n);
    float *before = malloc(sizeof(float) * (size_t)(t * width));
    for (int64_t i = 0; i < t * width; i++)
        before[i] = get(out, is_half, i / width * out_stride + i % width);
    if (is_half)
        pelton_pack_bf16(weight, k, n, k, packed);
    else
        pelton_pack_f32(weight, k, n, k, packed);
    linear_args args = {
        .x = x, .out = out, .weight = packed, .bias = bias, .norm_weight = normed ? norm : NULL,
        .norm_eps = 1e-3f, .dtype = is_half ? IS_BF16 : IS_F32, .mode = mode,
        .activation = activation, .use_amx = use_amx, .num_rows = t, .num_columns = k,
        .num_features = n, .x_stride = x_stride, .out_stride = out_stride};
    int failed = pelton_linear(&args);
    /* What is read often is doubles here: under the sanitizers a get() costs more than a product. */
    double *weights = malloc(sizeof *weights * (size_t)(n * k)), *inputs = malloc(sizeof *inputs * (size_t)k);
    for (int64_t i = 0; i < n * k; i++)
        weights[i] = get(weight, is_half, i);
    for (int64_t row = 0; row < t && !failed; row++) {
        double squares = 0;
        for (int64_t i = 0; i < k; i++) {
            inputs[i] = get(x, is_half, row * x_stride + i);
            squares += inputs[i] * inputs[i];
        }
        double scale = normed ? 1 / sqrt(squares / (double)k + 1e-3) : 1;
        for (int64_t i = 0; i < k; i++)
            inputs[i] *= scale * (normed ? get(norm, is_half, i) : 1);
        for (int64_t column = 0; column < width; column++) {
            double sums[2] = {0, 0};
            for (int side = 0; side < (halves(activation) ? 2 : 1); side++) {
                int64_t feature = column + side * n / 2;
                sums[side] = bias[feature];
                for (int64_t i = 0; i < k; i++)
                    sums[side] += inputs[i] * weights[feature * k + i];
            }
            double right = sums[0];
            if (activation == SILU_MUL)
                right = sums[0] / (1 + exp(-sums[0])) * sums[1];
            if (activation == GELU || activation == GELU_MUL)
                right *= 0.5 * erfc(-sums[0] / sqrt(2)) * (activation == GELU ? 1 : sums[1]);
            if (mode == ADD)
                right += before[row * width + column];
            double is = get(out, is_half, row * out_stride + column);
            /* What one factor is off by the other multiplies. */
            double size = 1 + fabs(right) + (activation ? fabs(sums[0]) + fabs(sums[1]) : 0);
            if (!(fabs(is - right) <= (is_half ? 0.1 : 1e-3) * size)) {
                printf("half %d t %ld k %ld n %ld: %g is not %g\n", is_half, (long)t, (long)k,
                       (long)n, is, right);
                failed = 1;
            }
        }
    }
    free(weights), free(inputs);
    free(x), free(out), free(weight), free(norm), free(packed), free(bias), free(before);
    return failed;
}

/* Number i of key or value head `head` in a slot. */
static double stored(int kind, const char *slot, int64_t kv_heads, int64_t dim, int64_t head, int64_t i) {
    if (!are_codes(kind))
        return get_one(kind, slot, head * dim + i);
    bf16 scale;
    memcpy(&scale, slot + 2 * kv_heads * dim + head * 2, sizeof scale);
    return (double)code_one(kind, slot, head * dim + i) * factor_of(kind) * bf16_to_float(scale);
}

/* One row of q tokens and n keys in blocks, the last one cut where the memory ends. Returns 1 on a
   wrong value. */
static int check_attention(int is_half, int kind, int64_t q, int64_t n, int64_t heads,
                           int64_t kv_heads, int64_t dim, int64_t window, int use_amx) {
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    int64_t block = dim % 32 ? 5 : 16, num_blocks = (n + block - 1) / block;
    int64_t slot = slot_bytes(kind, kv_heads, dim), width = heads * dim;
    int64_t length = n * slot; /* blocks lie in order: nothing lies behind the last key */
    char *kv = malloc((size_t)length);
    void *query = malloc(element * (size_t)(q * width));
    void *out = malloc(element * (size_t)(q * width));
    int32_t *table = malloc(sizeof *table * (size_t)num_blocks);
    int32_t starts[2] = {0, (int32_t)q}, lens[1] = {(int32_t)n};
    float *sinks = malloc(sizeof *sinks * (size_t)heads), *lse = malloc(sizeof *lse * (size_t)(q * heads));
    fill(query, is_half, q * width), fill(sinks, 0, heads);
    if (are_codes(kind))
        for (int64_t at = 0; at < n; at++) {
            for (int64_t i = 0; i < 2 * kv_heads * dim; i++) /* below the float8 types' NaN */
                kv[at * slot + i] = (char)((i * 37 + at * 11) & (i % 2 ? 0xb8 : 0x3f));
            for (int64_t i = 0; i < 2 * kv_heads; i++) {
                bf16 scale = float_to_bf16((float)(1 + i % 3) / (kind == IS_INT8 ? 64 : 4));
                memcpy(kv + at * slot + 2 * kv_heads * dim + i * 2, &scale, sizeof scale);
            }
        }
    else
        fill(kv, is_half, n * 2 * kv_heads * dim);
    for (int64_t i = 0; i < num_blocks; i++)
        table[i] = (int32_t)i;
    attention_args args = {
        .query = query, .out = out, .lse = lse, .kv = kv, .sinks = sinks, .query_start_loc = starts,
        .seq_lens = lens, .block_table = table, .num_rows = 1, .num_tokens = q,
        .query_stride = width, .out_stride = width,
        .block_stride = block * slot / (int64_t)stored_bytes(kind),
        .table_stride = num_blocks, .num_heads = heads, .num_kv_heads = kv_heads, .head_dim = dim,
        .block_size = block, .window = window, .scale = 0.5f, .softcap = 3, .dtype = is_half ? IS_BF16 : IS_F32,
        .kv_kind = kind, .use_amx = use_amx};
    int failed = pelton_attention(&args);
    double *right = malloc(sizeof *right * (size_t)dim);
    for (int64_t i = 0; i < q * heads && !failed; i++) { /* a head of a token */
        int64_t last = n - q + i / heads, head = i % heads, key_head = head * kv_heads / heads;
        double total = exp(sinks[head]);
        for (int64_t d = 0; d < dim; d++)
            right[d] = 0;
        for (int64_t key = window && last >= window ? last - window + 1 : 0; key <= last; key++) {
            const char *at = kv + key * slot;
            double score = 0;
            for (int64_t d = 0; d < dim; d++)
                score += get(query, is_half, i * dim + d) * stored(kind, at, kv_heads, dim, key_head, d);
            double weight = exp(3 * tanh(0.5 * score / 3));
            total += weight;
            for (int64_t d = 0; d < dim; d++)
                right[d] += weight * stored(kind, at, kv_heads, dim, kv_heads + key_head, d);
        }
        for (int64_t d = 0; d < dim && !failed; d++) {
            double is = get(out, is_half, i * dim + d), should = right[d] / total;
            if (!(fabs(is - should) <= (is_half ? 2e-2 : 1e-4) * fmax(1, fabs(should))) ||
                !(fabs(lse[i] - log(total)) <= 1e-4)) {
                printf("attention half %d kind %d q %ld n %ld dim %ld: %g is not %g\n", is_half, kind,
                       (long)q, (long)n, (long)dim, is, should);
                failed = 1;
            }
        }
    }
    free(right);
    free(kv), free(query), free(out), free(table), free(sinks), free(lse);
    return failed;
}

/* Two rows of q and one tokens, each of which sees its row, in [T, 3, heads, dim]. Returns 1 on a
   wrong value. */
static int check_own_tokens(int is_half, int64_t q, int64_t heads, int64_t dim, int64_t window,
                            int use_amx) {
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    int64_t width = heads * dim, stride = 3 * width;
    char *qkv = malloc(element * (size_t)((q + 1) * stride));
    void *out = malloc(element * (size_t)((q + 2) * width));
    int32_t starts[3] = {0, (int32_t)q, (int32_t)q + 1};
    fill(qkv, is_half, (q + 1) * stride);
    attention_args args = {
        .query = qkv, .out = out, .kv = qkv + element * (size_t)width, .query_start_loc = starts,
        .num_rows = 2, .num_tokens = q + 2, .query_stride = stride, .out_stride = width,
        .num_heads = heads, .num_kv_heads = heads, .head_dim = dim, .window = window, .scale = 0.5f,
        .dtype = is_half ? IS_BF16 : IS_F32,
        .kv_kind = is_half ? IS_BF16 : IS_F32, .use_amx = use_amx};
    int failed = pelton_attention(&args);
    for (int64_t i = 0; i < (q + 2) * heads && !failed; i++) {
        int64_t token = i / heads, head = i % heads, first = token < q ? 0 : q;
        int64_t end = token < q ? q : q + 1;
        for (int64_t d = 0; d < dim && !failed; d++) {
            double total = 0, right = 0;
            for (int64_t key = first; token <= q && key < end; key++) {
                double score = 0;
                if (window && llabs(key - token) > window)
                    continue;
                for (int64_t e = 0; e < dim; e++)
                    score += get(qkv, is_half, token * stride + head * dim + e) *
                             get(qkv, is_half, key * stride + width + head * dim + e);
                total += exp(0.5 * score);
                right += exp(0.5 * score) *
                         get(qkv, is_half, key * stride + 2 * width + head * dim + d);
            }
            right = total ? right / total : 0;
            double is = get(out, is_half, token * width + head * dim + d);
            if (!(fabs(is - right) <= (is_half ? 2e-2 : 1e-4))) {
                printf("own tokens half %d q %ld dim %ld: %g is not %g\n", is_half, (long)q, (long)dim,
                       is, right);
                failed = 1;
            }
        }
    }
    free(qkv), free(out);
    return failed;
}

/* t rows of k columns. Returns 1 on a wrong value. */
static int check_layer_norm(int is_half, int64_t t, int64_t k) {
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    void *x = malloc(element * (size_t)(t * k)), *out = malloc(element * (size_t)(t * k));
    void *weight = malloc(element * (size_t)k), *bias = malloc(element * (size_t)k);
    fill(x, is_half, t * k), fill(weight, is_half, k), fill(bias, is_half, k);
    layer_norm_args args = {.x = x, .weight = weight, .bias = bias, .out = out, .num_rows = t,
                            .num_columns = k, .x_stride = k, .out_stride = k, .eps = 1e-3f,
                            .dtype = is_half ? IS_BF16 : IS_F32};
    int failed = pelton_layer_norm(&args);
    for (int64_t row = 0; row < t; row++) {
        double mean = 0, variance = 0;
        for (int64_t i = 0; i < k; i++)
            mean += get(x, is_half, row * k + i) / (double)k;
        for (int64_t i = 0; i < k; i++)
            variance += pow(get(x, is_half, row * k + i) - mean, 2) / (double)k;
        for (int64_t i = 0; i < k && !failed; i++) {
            double right = (get(x, is_half, row * k + i) - mean) / sqrt(variance + 1e-3);
            right = right * get(weight, is_half, i) + get(bias, is_half, i);
            double is = get(out, is_half, row * k + i);
            if (!(fabs(is - right) <= (is_half ? 5e-2 : 1e-4))) {
                printf("layer norm half %d k %ld: %g is not %g\n", is_half, (long)k, is, right);
                failed = 1;
            }
        }
    }
    free(x), free(out), free(weight), free(bias);
    return failed;
}

/* Tokens of t rows of a product [n, k]; greedy, then with noise. Returns 1 on a wrong one. */
static int check_draw(int is_half, int64_t t, int64_t k, int64_t n, int use_amx) {
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    int64_t k_pad = (k + 31) / 32 * 32, n_pad = (n + 15) / 16 * 16;
    void *x = malloc(element * (size_t)(t * k)), *norm = malloc(element * (size_t)k);
    void *weight = malloc(element * (size_t)(n * k));
    void *packed = aligned_alloc(64, element * (size_t)(n_pad * k_pad));
    float *logits = malloc(sizeof *logits * (size_t)(t * n)), temperature[2] = {0, 0.7f};
    int64_t *indices = malloc(sizeof *indices * (size_t)t), *slots = calloc((size_t)t, sizeof *slots);
    int32_t *positions = calloc((size_t)t, sizeof *positions), *ids = malloc(sizeof *ids * (size_t)t);
    int32_t *status = malloc(sizeof *status * (size_t)t);
    int64_t seeds[2] = {0, -5};
    fill(x, is_half, t * k);
    fill(norm, is_half, k);
    fill(weight, is_half, n * k);
    if (is_half)
        pelton_pack_bf16(weight, k, n, k, packed);
    else
        pelton_pack_f32(weight, k, n, k, packed);
    for (int64_t i = 0; i < t; i++)
        indices[i] = t - 1 - i;
    linear_args head = {.x = x, .weight = packed, .norm_weight = norm, .norm_eps = 1e-3f,
                        .dtype = is_half ? IS_BF16 : IS_F32, .use_amx = use_amx, .num_rows = t,
                        .num_columns = k, .num_features = n, .x_stride = k};
    draw_args args = {.head = head, .indices = indices, .slots = slots, .seeds = seeds,
                      .positions = positions, .temperature = temperature, .out_ids = ids,
                      .out_status = status};
    int failed = pelton_draw(&args);
    for (int64_t row = 0; row < t && !failed; row++) {
        double best = -INFINITY, is = 0;
        for (int64_t feature = 0; feature < n; feature++) {
            double sum = 0;
            for (int64_t i = 0; i < k; i++)
                sum += get(x, is_half, indices[row] * k + i) * get(norm, is_half, i) *
                       get(weight, is_half, feature * k + i);
            best = sum > best ? sum : best;
            is = feature == ids[row] ? sum : is;
        }
        if (status[row] != DRAW_OK || ids[row] < 0 || ids[row] >= n || is < best - 0.1 * (1 + fabs(best))) {
            printf("draw half %d t %ld k %ld n %ld: %g is not %g\n", is_half, (long)t, (long)k, (long)n,
                   is, best);
            failed = 1;
        }
    }
    for (int64_t i = 0; i < t; i++)
        slots[i] = 1;
    failed |= pelton_draw(&args);
    for (int64_t row = 0; row < t; row++)
        failed |= status[row] != DRAW_OK || ids[row] < 0 || ids[row] >= n;
    free(x), free(norm), free(weight), free(packed), free(logits), free(indices), free(slots);
    free(positions), free(ids), free(status);
    return failed;
}

/* Two rows, of which one has a draft; three tokens and one of padding. Values are Python's tests. */
static int check_steps(void) {
    int32_t fields[3 * 6] = {3, 3, 4, 3, 7, 8, 2, 2, 2, 1, 9, -1, 0}, tokens[3 * 5] = {1, 2, 3, 7};
    int32_t live[3] = {2, 3, 3}, idx_mapping[3] = {0, 1, 2}, starts[4] = {0, 2, 3, 3};
    int32_t cu_num_logits[4] = {0, 2, 3, 3}, table[3 * 2] = {1, 2, 3, 0, 0, 0}, batch_table[3 * 2];
    int32_t input_ids[4], seq_lens[3], logits_positions[3], out[3 * 4], drawn[3] = {8, 5, 6};
    int32_t status[3] = {0};
    int64_t positions[4], slot_mapping[4], logits_indices[3], logits_slots[3];
    uint8_t is_padding[4];
    kv_group group = {table, batch_table, slot_mapping, 2, 2, 2, 4, 3};
    build_inputs_args build = {fields, tokens, live, idx_mapping, starts, cu_num_logits, input_ids,
                               positions, seq_lens, is_padding, logits_indices, logits_slots,
                               logits_positions, &group, 6, 5, 4, 6, 3, 4, 3, 1, 1};
    verify_args verify = {cu_num_logits, idx_mapping, fields, drawn, status, out, 6, 4, 3, 2, 3};
    advance_args advance = {fields, tokens, live, idx_mapping, starts, cu_num_logits, out, out + 2,
                            6, 5, 4, 4, 3, 5, 2};
    int failed = pelton_build_inputs(&build) | pelton_verify(&verify) | pelton_advance(&advance);
    return failed || input_ids[0] != 7 || input_ids[1] != 8 || input_ids[2] != 9 ||
           is_padding[3] != 1 || out[0] != 8 || out[1] != 5 || out[2] != 2 || out[4] != 6 ||
           fields[TOTAL_LEN] != 6 || tokens[4] != 8 || tokens[5 + 2] != 6;
}

static int check_store(int is_half, int kind, int64_t t, int64_t dim, int64_t rotary_dim, int normed) {
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    enum { HEADS = 3, KV_HEADS = 2 };
    int64_t width = (HEADS + 2 * KV_HEADS) * dim;
    void *qkv = malloc(element * (size_t)(t * width)), *cos = malloc(element * (size_t)(t * rotary_dim));
    void *sin = malloc(element * (size_t)(t * rotary_dim / 2)), *norm = malloc(element * (size_t)dim);
    int64_t slot = slot_bytes(kind, KV_HEADS, dim);
    char *kv = malloc((size_t)(t * slot));
    int64_t *slots = malloc(sizeof *slots * (size_t)t);
    fill(qkv, is_half, t * width);
    fill(cos, is_half, t * rotary_dim);
    fill(sin, is_half, t * rotary_dim / 2);
    fill(norm, is_half, dim);
    for (int64_t i = 0; i < t; i++)
        slots[i] = i ? i : -1;
    store_qkv_args args = {.qkv = qkv, .cos = cos, .sin = sin, .q_norm = normed ? norm : NULL,
                           .k_norm = normed ? norm : NULL, .kv = kv, .kv_slots = slots,
                           .num_tokens = t, .qkv_stride = width, .cos_stride = rotary_dim,
                           .sin_stride = rotary_dim / 2, .num_heads = HEADS, .num_kv_heads = KV_HEADS,
                           .head_dim = dim, .rotary_dim = rotary_dim, .norm_eps = 1e-3f,
                           .dtype = is_half ? IS_BF16 : IS_F32, .kv_kind = kind};
    int failed = pelton_store_qkv(&args);
    for (int64_t i = 0; i < 2 * KV_HEADS * dim && t > 1; i++) {
        double right = get(qkv, is_half, width + HEADS * dim + i);
        double is = stored(kind, kv + slot, KV_HEADS, dim, i / dim, i % dim);
        failed |= !(fabs(is - right) <= (are_codes(kind) ? 0.13 : 0) * (0.1 + fabs(right)));
    }
    free(qkv), free(cos), free(sin), free(norm), free(kv), free(slots);
    return failed;
}

static void note_caller(void *argument, int part, int parts) {
    pthread_t *ran = argument;
    (void)parts;
    ran[part] = pthread_self();
}

/* A sleeping worker takes time to wake: in some of many regions the caller must have run its part,
   rather than waited for it. Returns 1 if it never did. */
static int check_late_worker(void) {
    pelton_set_num_threads(2);
    for (int i = 0; i < 500; i++) {
        pthread_t ran[2];
        usleep(500);
        pelton_run(note_caller, ran);
        if (pthread_equal(ran[0], ran[1]))
            return 0;
    }
    printf("the caller waited for its worker each time\n");
    return 1;
}

int main(void) {
    static const int64_t sizes[][3] = {{1, 1, 1},    {1, 33, 17},  {3, 64, 48}, {7, 31, 15},
                                       {8, 32, 16},  {9, 100, 40}, {17, 5, 3},  {33, 65, 50},
                                       {270, 40, 33}};
    int failed = check_steps() | check_late_worker(), amx = pelton_request_amx();
    for (int threads = 1; threads <= 3; threads++) {
        pelton_set_num_threads(threads);
        for (int flags = 0; flags < 4; flags++) {
            int64_t window = flags >> 1 ? 9 : 0;
            for (int i = 0; i < 4; i++) {
                static const int codes[] = {0, IS_INT8, IS_E4M3, IS_E5M2};
                int half = flags & 1, kind = i ? codes[i] : half ? IS_BF16 : IS_F32;
                failed |= check_attention(half, kind, 1, 1, 1, 1, 1, window, amx);
                failed |= check_attention(half, kind, 3, 66, 6, 2, 24, window, amx);
                failed |= check_attention(half, kind, 1, 1100, 2, 1, 32, window, amx);
                failed |= check_attention(half, kind, 3, 79, 6, 3, 64, window, amx);
                failed |= check_attention(half, kind, 35, 131, 4, 2, 33, window, amx);
                failed |= i < 2 && check_attention(half, kind, 35, 131, 4, 2, 33, window, 0);
                failed |= check_attention(half, kind, 290, 421, 2, 2, 8, window, amx);
                failed |= check_store(half, kind, 1, 5, 2, flags >> 1);
                failed |= check_store(half, kind, 300, 40, 40, flags >> 1);
            }
            failed |= check_own_tokens(flags & 1, 1, 1, 1, window, amx);
            failed |= check_own_tokens(flags & 1, 13, 3, 24, window, amx);
            failed |= check_own_tokens(flags & 1, 35, 2, 33, window, 0);
            failed |= check_own_tokens(flags & 1, 140, 2, 8, window, amx);
            failed |= check_layer_norm(flags & 1, 3, flags >> 1 ? 1 : 49);
            failed |= check_layer_norm(flags & 1, 700, 48);
            failed |= check_draw(flags & 1, 1, 33, 17, 0) | check_draw(flags & 1, 9, 40, 50, 0);
            failed |= check_draw(flags & 1, 5, 64, 33, amx) | check_draw(flags & 1, 400, 5, 3, amx);
        }
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int flags = 0; flags < 16; flags++) {
                const int64_t *s = sizes[i];
                int is_half = flags & 1, mode = flags >> 1 & 1, normed = flags >> 2 & 1;
                failed |= check(is_half, s[0], s[1], s[2], 0, mode, normed, amx && flags >> 3);
                failed |= check(is_half, s[0], s[1], (s[2] + 31) / 32 * 32,
                                mode ? GELU_MUL : SILU_MUL, STORE, normed, amx && flags >> 3);
                if (!mode)
                    failed |= check(is_half, s[0], s[1], s[2], GELU, STORE, normed, amx && flags >> 3);
            }
    }
    return failed;
}
