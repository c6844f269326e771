/* LayerNorm: a row at a time, in float32; rounded when it is written. */
#include "norm.h"

#include <math.h>
#include <stddef.h>

#include "element.h"
#include "pool.h"
#include "vec.h"

/* Elements from which on threads are worth waking. */
#define ELEMENTS_TO_SPLIT 32768

/* 16 elements from `i` on; of the last ones, `fill` stands where there are no more. */
static inline v16f lanes_of(const layer_norm_args *a, const char *row, int64_t i, float fill) {
    if (i + LANES <= a->num_columns)
        return get_lanes(a->dtype, row, i);
    float values[LANES];
    for (int64_t lane = 0; lane < LANES; lane++)
        values[lane] = i + lane < a->num_columns ? get_one(a->dtype, row, i + lane) : fill;
    return load_f32(values);
}

static void norm_row(const layer_norm_args *a, const char *x, char *out) {
    int64_t n = a->num_columns;
    v16f sum = {0}, squares = {0};
    for (int64_t i = 0; i < n; i += LANES)
        sum += lanes_of(a, x, i, 0);
    float mean = sum_of_lanes(sum) / (float)n;
    for (int64_t i = 0; i < n; i += LANES) {
        v16f off = lanes_of(a, x, i, mean) - mean;
        squares += off * off;
    }
    float scale = 1.0f / sqrtf(sum_of_lanes(squares) / (float)n + a->eps);
    for (int64_t i = 0; i < n; i += LANES) {
        v16f value = (lanes_of(a, x, i, 0) - mean) * scale * lanes_of(a, a->weight, i, 0);
        if (a->bias)
            value += lanes_of(a, a->bias, i, 0);
        if (i + LANES <= n)
            set_lanes(a->dtype, out, i, value);
        else
            for (int64_t lane = 0; i + lane < n; lane++)
                set_one(a->dtype, out, i + lane, value[lane]);
    }
}

static void norm_rows(void *argument, int part, int parts) {
    const layer_norm_args *a = argument;
    size_t element = element_bytes(a->dtype);
    long first, last;
    pelton_share(a->num_rows, part, parts, &first, &last);
    for (long row = first; row < last; row++)
        norm_row(a, (const char *)a->x + (size_t)(row * a->x_stride) * element,
                 (char *)a->out + (size_t)(row * a->out_stride) * element);
}

int pelton_layer_norm(const layer_norm_args *args) {
    layer_norm_args own = *args;
    if (args->num_rows * args->num_columns < ELEMENTS_TO_SPLIT) {
        norm_rows(&own, 0, 1);
        return 0;
    }
    pelton_enter();
    pelton_run(norm_rows, &own);
    pelton_leave();
    return 0;
}
