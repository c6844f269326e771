/* Runs every kernel once, on a little of everything. A CPU that lacks an instruction ends here. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "blocks.h"
#include "linear.h"
#include "pool.h"
#include "vec.h"

/* The weight is 1 wherever row and column are alike modulo 16. */
static int try_blocks(int use_amx) {
    enum { T = 33, K = 64, N = 32 };
    static uint8_t rows[N * 2 * 34], panels[16 * K * 4] __attribute__((aligned(64)));
    static bf16 x[T * K], out[T * N];
    for (int n = 0; n < N; n++)
        for (int block = 0; block < 2; block++) {
            uint8_t *at = rows + (n * 2 + block) * 34;
            at[1] = 0x3c; /* 1.0 */
            for (int k = 0; k < 32; k++)
                at[2 + k] = k % 16 == n % 16;
        }
    for (int i = 0; i < T * K; i++)
        x[i] = float_to_bf16((float)(i * 7 % 13 - 6));
    pelton_pack_blocks(Q8_0, rows, N, K, 0, panels);
    for (int num_rows = 1; num_rows <= T; num_rows += 8) {
        block_args args = {
            .linear = {.x = x, .out = out, .dtype = IS_BF16, .use_amx = use_amx,
                       .num_rows = num_rows, .num_columns = K, .num_features = N, .x_stride = K,
                       .out_stride = N},
            .num_runs = 1,
            .runs = {{panels, 2, Q8_0}},
        };
        if (pelton_blocks(&args))
            return 1;
        for (int t = 0; t < num_rows; t++)
            for (int n = 0; n < N; n++) {
                float right = 0;
                for (int k = n % 16; k < K; k += 16)
                    right += bf16_to_float(x[t * K + k]);
                if (fabsf(bf16_to_float(out[t * N + n]) - right) > 0.2f)
                    return 1;
            }
    }
    return 0;
}

/* 0 if all results are right. */
int pelton_try(void) {
    enum { T = 20, K = 40, N = 32 };
    static float x[T * K], weight[N * K], packed[N * 64], out[T * N];
    static bf16 x_half[T * K], weight_half[N * K], packed_half[N * 64], out_half[T * N];
    for (int i = 0; i < T * K; i++)
        x_half[i] = float_to_bf16(x[i] = (float)(i * 7 % 13 - 6));
    for (int i = 0; i < N * K; i++)
        weight_half[i] = float_to_bf16(weight[i] = (float)(i * 5 % 11 - 5));
    pelton_pack_f32(weight, K, N, K, packed);
    pelton_pack_bf16(weight_half, K, N, K, packed_half);
    pelton_set_num_threads(2);
    int use_amx = pelton_request_amx();
    if (try_blocks(use_amx))
        return 1;
    for (int num_rows = 1; num_rows <= T; num_rows += 19)
        for (int is_half = 0; is_half < 2; is_half++) {
            linear_args args = {
                .x = is_half ? (void *)x_half : (void *)x,
                .out = is_half ? (void *)out_half : (void *)out,
                .weight = is_half ? (void *)packed_half : (void *)packed,
                .dtype = is_half ? IS_BF16 : IS_F32,
                .use_amx = use_amx,
                .num_rows = num_rows,
                .num_columns = K,
                .num_features = N,
                .x_stride = K,
                .out_stride = N,
            };
            if (pelton_linear(&args))
                return 1;
            for (int t = 0; t < num_rows; t++)
                for (int n = 0; n < N; n++) {
                    float right = 0;
                    for (int k = 0; k < K; k++)
                        right += x[t * K + k] * weight[n * K + k];
                    float is = is_half ? bf16_to_float(out_half[t * N + n]) : out[t * N + n];
                    if (fabsf(is - right) > 0.01f * fabsf(right))
                        return 1;
                }
        }
    return 0;
}
