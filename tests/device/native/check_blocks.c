/* Products with weights in blocks over memory of exactly the right size, for the sanitizers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "blocks.h"
#include "pool.h"
#include "values.h"

/* A weight of n rows in one form, and of 16 in Q8_0 behind them. Returns 1 on a wrong value. */
static int check_blocks(int form, int is_half, int64_t t, int64_t k, int64_t n, int activation,
                        int mode, int normed, int use_amx) {
    static const int64_t block_bytes[] = {18, 20, 22, 24, 34, 144, 176, 210};
    static const int64_t block_columns[] = {32, 32, 32, 32, 32, 256, 256, 256};
    size_t element = is_half ? sizeof(bf16) : sizeof(float);
    int forms[2] = {form, Q8_0};
    int64_t rows[2] = {n, 16}, width = activation ? (n + 16) / 2 : n + 16, num_features = n + 16;
    int64_t x_stride = k + 3, out_stride = width + 5;
    block_args args = {.num_runs = 2};
    for (int run = 0; run < 2; run++) {
        int64_t num_blocks = k / block_columns[forms[run]], bytes = block_bytes[forms[run]];
        int64_t num_panels = (rows[run] + 15) / 16;
        uint8_t *file = malloc((size_t)(rows[run] * num_blocks * bytes));
        for (int64_t i = 0; i < rows[run] * num_blocks * bytes; i++)
            file[i] = (uint8_t)(noise() * 127);
        for (int64_t block = 0; block < rows[run] * num_blocks; block++) {
            uint8_t *at = file + block * bytes + (forms[run] == Q6_K ? 208 : 0);
            at[1] = 0x14; /* about 1e-3 */
            if (forms[run] != Q6_K)
                at[3] = 0x94;
        }
        size_t size = (size_t)(num_panels * pelton_panel_bytes(forms[run], k));
        uint8_t *panels = aligned_alloc(64, size);
        memset(panels, 0, size);
        pelton_pack_blocks(forms[run], file, rows[run] / 2, k, 0, panels);
        pelton_pack_blocks(forms[run], file + rows[run] / 2 * num_blocks * bytes,
                           rows[run] - rows[run] / 2, k, rows[run] / 2, panels);
        args.runs[run] = (block_run){panels, num_panels, forms[run]};
        free(file);
    }
    int32_t *ids = malloc(sizeof *ids * (size_t)num_features);
    for (int64_t i = 0; i < num_features; i++)
        ids[i] = (int32_t)i;
    float *weight = malloc(sizeof *weight * (size_t)(num_features * k));
    args.linear = (linear_args){.x = ids, .out = weight, .dtype = IS_F32, .num_rows = num_features,
                                .num_columns = k, .num_features = num_features, .out_stride = k};
    int failed = pelton_block_rows(&args);
    void *x = malloc(element * (size_t)((t - 1) * x_stride + k));
    void *out = malloc(element * (size_t)((t - 1) * out_stride + width));
    void *norm = malloc(element * (size_t)k);
    float *bias = calloc((size_t)(num_features + 15) / 16 * 16, sizeof *bias);
    fill(x, is_half, (t - 1) * x_stride + k);
    fill(out, is_half, (t - 1) * out_stride + width);
    fill(norm, is_half, k);
    fill(bias, 0, num_features);
    float *before = malloc(sizeof(float) * (size_t)(t * width));
    for (int64_t i = 0; i < t * width; i++)
        before[i] = get(out, is_half, i / width * out_stride + i % width);
    args.linear = (linear_args){
        .x = x, .out = out, .bias = bias, .norm_weight = normed ? norm : NULL, .norm_eps = 1e-3f,
        .dtype = is_half ? IS_BF16 : IS_F32, .mode = mode, .activation = activation,
        .use_amx = use_amx, .num_rows = t, .num_columns = k, .num_features = num_features,
        .x_stride = x_stride, .out_stride = out_stride};
    failed |= pelton_blocks(&args);
    for (int64_t row = 0; row < t && !failed; row++) {
        double squares = 0;
        for (int64_t i = 0; i < k; i++)
            squares += pow(get(x, is_half, row * x_stride + i), 2);
        double scale = normed ? 1 / sqrt(squares / (double)k + 1e-3) : 1;
        for (int64_t column = 0; column < width; column++) {
            double sums[2], size = 1;
            for (int side = 0; side < 2; side++) {
                int64_t feature = column + side * num_features / 2 * (activation != 0);
                sums[side] = bias[feature];
                for (int64_t i = 0; i < k; i++) {
                    double one = get(x, is_half, row * x_stride + i) * scale *
                                 (normed ? get(norm, is_half, i) : 1) * weight[feature * k + i];
                    sums[side] += one;
                    size += fabs(one);
                }
            }
            double right = activation ? sums[0] / (1 + exp(-sums[0])) * sums[1] : sums[0];
            if (mode == ADD)
                right += before[row * width + column];
            double is = get(out, is_half, row * out_stride + column);
            if (!(fabs(is - right) <= 0.03 * size)) {
                printf("form %d half %d t %ld k %ld n %ld: %g is not %g\n", form, is_half, (long)t,
                       (long)k, (long)n, is, right);
                failed = 1;
            }
        }
    }
    for (int run = 0; run < 2; run++)
        free((void *)args.runs[run].panels);
    free(ids), free(weight), free(x), free(out), free(norm), free(bias), free(before);
    return failed;
}

int main(void) {
    int failed = 0, amx = pelton_request_amx();
    for (int threads = 1; threads <= 2; threads++) {
        pelton_set_num_threads(threads);
        for (int form = 0; form < NUM_FORMS; form++) {
            int is_half = (form + threads) % 2;
            failed |= check_blocks(form, is_half, 1, 256, 16, SILU_MUL, STORE, 1, 0);
            failed |= check_blocks(form, is_half, 15, 256, 33, 0, ADD, 0, 0);
            if (amx)
                failed |= check_blocks(form, 1, 33, 256, 16, 0, STORE, threads % 2, 1);
        }
    }
    return failed;
}
