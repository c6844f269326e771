/* LayerNorm; ops/layer_norm says what it computes. */
#ifndef PELTON_NORM_H
#define PELTON_NORM_H

#include <stdint.h>

typedef struct {
    const void *x;            /* [T, K] */
    const void *weight, *bias; /* [K]; no bias: NULL */
    void *out;                /* [T, K]; may be x */
    int64_t num_rows, num_columns, x_stride, out_stride;
    float eps;
    int32_t dtype; /* linear.h */
} layer_norm_args;

int pelton_layer_norm(const layer_norm_args *args);

#endif
