/* Products with a packed weight; linear.c says how it is packed. */
#ifndef PELTON_LINEAR_H
#define PELTON_LINEAR_H

#include <stdint.h>

enum { STORE = 0, ADD = 1 }; /* mode */
/* activation: those that end in MUL halve the output */
enum { NO_ACTIVATION = 0, SILU_MUL = 1, GELU_TANH_MUL = 2, GELU_MUL = 3, GELU = 4 };

static inline int halves(int activation) {
    return activation == SILU_MUL || activation == GELU_TANH_MUL || activation == GELU_MUL;
}
enum { IS_BF16 = 0, IS_F32 = 1, IS_F16 = 2 }; /* dtype; products take the first two */

typedef struct {
    const void *x;
    void *out;
    const void *weight;      /* packed */
    const float *bias;       /* [N up to a multiple of 16], or NULL */
    const void *norm_weight; /* [K] in the dtype of x, or NULL */
    float norm_eps;
    int32_t dtype, mode, activation, use_amx;
    int64_t num_rows, num_columns, num_features; /* T, K, N */
    int64_t x_stride, out_stride;                /* elements between rows */
    /* What the next product reads: so many bytes, of which each part has a share, in order. A product
       of blocks asks for its begin while its own last panels are multiplied. NULL: nobody knows. */
    const void *ahead;
    int64_t ahead_bytes;
} linear_args;

/* Where a part's share of what comes next begins; `own` if nobody knows. */
static inline const void *share_ahead(const linear_args *a, int part, int parts, const void *own) {
    if (!a->ahead)
        return own;
    return (const char *)a->ahead + a->ahead_bytes * part / parts / 64 * 64;
}

/* 0, or 1 if memory is short. */
int pelton_linear(const linear_args *args);


/* The product's rows become tokens; ops/lm_head_sample says how. */
typedef struct {
    linear_args head; /* x: [T, K], of which `indices` names num_rows; normed; out is not used */
    const int64_t *indices, *slots, *seeds;
    const int32_t *positions;
    const float *temperature;
    int32_t *out_ids, *out_status;
} draw_args;

enum { DRAW_OK = 0, DRAW_NAN = 1, DRAW_ALL_MASKED = 2 }; /* of core/plan.py */

int pelton_draw(const draw_args *args);

/* Where the panels of a weight come from that is not packed: fill writes one of bfloat16. It is asked
   for a panel once for each block of rows. */
typedef struct {
    void (*fill)(const void *context, int64_t panel, uint16_t *to);
    const void *context;
} panel_source;

/* The same, for a kernel that has entered the pool already. drawn: its head is args; or NULL. source:
   of the weight, with use_amx only; or NULL. */
int pelton_linear_entered(const linear_args *args, const draw_args *drawn, const panel_source *source);

/* weight: [n, k], rows `stride` elements apart. packed: [n up to 16s][k up to 32s] elements. */
void pelton_pack_bf16(const uint16_t *weight, int64_t stride, int64_t n, int64_t k, uint16_t *packed);
void pelton_pack_f32(const float *weight, int64_t stride, int64_t n, int64_t k, float *packed);

/* Whether this process may use AMX tiles: Linux gives their state on request only. */
int pelton_request_amx(void);

#endif
