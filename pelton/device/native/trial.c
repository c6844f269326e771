/* Runs every kernel once, on a little of everything. A CPU that lacks an instruction ends here. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "linear.h"
#include "pool.h"
#include "vec.h"

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
