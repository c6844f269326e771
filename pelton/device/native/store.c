/* One head at a time, in float32; rounded when it is written back. */
#include "store.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "codes.h"
#include "element.h"
#include "pool.h"
#include "vec.h"

/* Elements from which on threads are worth waking. */
#define ELEMENTS_TO_SPLIT 32768

static void load(const store_qkv_args *a, const void *from, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_f32(to + i, get_lanes(a->dtype, from, i));
    for (; i < count; i++)
        to[i] = get_one(a->dtype, from, i);
}

static void save(const store_qkv_args *a, const float *from, int64_t count, void *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        set_lanes(a->dtype, to, i, load_f32(from + i));
    for (; i < count; i++)
        set_one(a->dtype, to, i, from[i]);
}

static float rounded(const store_qkv_args *a, float value) {
    if (a->dtype == IS_F32)
        return value;
    return a->dtype == IS_BF16 ? bf16_to_float(float_to_bf16(value))
                               : f16_to_float(float_to_f16(value));
}

static void norm(const store_qkv_args *a, float *head, const float *weight) {
    v16f squares = {0};
    float tail = 0;
    int64_t i = 0, n = a->head_dim;
    for (; i + LANES <= n; i += LANES)
        squares += load_f32(head + i) * load_f32(head + i);
    for (; i < n; i++)
        tail += head[i] * head[i];
    float scale = 1.0f / sqrtf((sum_of_lanes(squares) + tail) / (float)n + a->norm_eps);
    for (i = 0; i < n; i++) {
        float value = head[i] * scale;
        /* Rounded before the weight comes, as the checkpoints' authors have it. */
        head[i] = rounded(a, value) * weight[i];
    }
    for (i = 0; i < n; i++)
        head[i] = rounded(a, head[i]);
}

static void rotate(float *restrict head, const float *restrict cos, const float *restrict sin,
                   int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[i + half];
        head[i] = first * cos[i] - second * sin[i];
        head[i + half] = second * cos[half + i] + first * sin[i];
    }
}

/* ---- codes ---- */

typedef int8_t v16c __attribute__((vector_size(16), may_alias));

/* What a float8 type is made of. */
typedef struct {
    int mantissa_bits, bias;
} float8;

/* |x|, which rounds to no more than the type's largest, to its nearest code, ties to even. */
static inline v16i float8_codes(v16f x, float8 type) {
    int dropped = 23 - type.mantissa_bits;
    v16i bits = (v16i)x & 0x7fffffff, sign = ((v16i)x >> 24) & 0x80;
    v16i normal = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped;
    normal -= (127 - type.bias) << type.mantissa_bits;
    /* Below the least normal number codes count steps: a sum's low bits, where its own step is that. */
    v16f step_of = (v16f)((v16i){0} + ((127 + 1 - type.bias - type.mantissa_bits + 23) << 23));
    v16i small = (v16i)((v16f)bits + step_of) - (v16i)step_of;
    v16i is_small = bits < (128 - type.bias) << 23;
    return ((small & is_small) | (normal & ~is_small)) | sign;
}

static inline v16i codes_of(int kind, v16f x) {
    if (kind == IS_E4M3)
        return float8_codes(x, (float8){3, 7});
    if (kind == IS_E5M2)
        return float8_codes(x, (float8){2, 15});
    v16f magic = splat(12582912.0f); /* vec.h's exp_v16 says how */
    return (v16i)(x + magic) - (v16i)magic;
}

static float largest_code(int kind) {
    return kind == IS_INT8 ? 127.0f : kind == IS_E4M3 ? 448.0f : 57344.0f;
}

/* As ops/quantise_kv has it, bit for bit; but where a number is NaN or infinite the scale is NaN. */
static void quantise(int kind, float *head, int64_t count, char *codes, char *scale) {
    v16f top = {0}, odd = {0};
    for (int64_t i = count; i < (count + LANES - 1) / LANES * LANES; i++)
        head[i] = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        v16f x = load_f32(head + i), size = (v16f)((v16i)x & 0x7fffffff);
        top = blend(size > top, size, top);
        odd += x * 0.0f;
    }
    float most = sum_of_lanes(odd);
    for (int i = 0; i < LANES; i++)
        most = top[i] > most ? top[i] : most;
    most /= largest_code(kind);
    most = most < FLT_MIN ? FLT_MIN : most;
    bf16 stored = float_to_bf16(most);
    memcpy(scale, &stored, sizeof stored);
    v16f unit = splat(bf16_to_float(stored));
    for (int64_t i = 0; i < count; i += LANES) {
        v16c some = __builtin_convertvector(codes_of(kind, load_f32(head + i) / unit), v16c);
        memcpy(codes + i, &some, (size_t)(count - i < LANES ? count - i : LANES));
    }
}

/* A token's keys and values, behind each other at `from`, into its slot. */
static void quantise_token(const store_qkv_args *a, const char *from, char *slot) {
    size_t element = element_bytes(a->dtype);
    int64_t count = 2 * a->num_kv_heads;
    for (int64_t i = 0; i < count; i++) {
        float head[MAX_HEAD_DIM];
        load(a, from + (size_t)(i * a->head_dim) * element, a->head_dim, head);
        quantise(a->kv_kind, head, a->head_dim, slot + i * a->head_dim,
                 slot + count * a->head_dim + i * (int64_t)sizeof(bf16));
    }
}

static void store_tokens(void *argument, int part, int parts) {
    const store_qkv_args *a = argument;
    size_t element = element_bytes(a->dtype);
    float head[MAX_HEAD_DIM], cos[MAX_HEAD_DIM], sin[MAX_HEAD_DIM], norms[2][MAX_HEAD_DIM];
    long first_token, last_token;
    pelton_share(a->num_tokens, part, parts, &first_token, &last_token);
    if (a->q_norm) {
        load(a, a->q_norm, a->head_dim, norms[0]);
        load(a, a->k_norm, a->head_dim, norms[1]);
    }
    int64_t slot = slot_bytes(a->kv_kind, a->num_kv_heads, a->head_dim);
    for (long token = first_token; token < last_token; token++) {
        char *row = (char *)a->qkv + (size_t)(token * a->qkv_stride) * element;
        load(a, (const char *)a->cos + (size_t)(token * a->cos_stride) * element, a->rotary_dim, cos);
        load(a, (const char *)a->sin + (size_t)(token * a->sin_stride) * element, a->rotary_dim / 2,
             sin);
        for (int64_t i = 0; i < a->num_heads + a->num_kv_heads; i++) {
            char *at = row + (size_t)(i * a->head_dim) * element;
            load(a, at, a->head_dim, head);
            if (a->q_norm)
                norm(a, head, norms[i >= a->num_heads]);
            rotate(head, cos, sin, a->rotary_dim / 2);
            save(a, head, a->head_dim, at);
        }
        if (!a->kv_slots || a->kv_slots[token] < 0)
            continue;
        const char *from = row + (size_t)(a->num_heads * a->head_dim) * element;
        char *to = (char *)a->kv + a->kv_slots[token] * slot;
        if (are_codes(a->kv_kind))
            quantise_token(a, from, to);
        else
            memcpy(to, from, (size_t)slot);
    }
}

int pelton_store_qkv(const store_qkv_args *args) {
    int64_t width = (args->num_heads + 2 * args->num_kv_heads) * args->head_dim;
    store_qkv_args own = *args;
    if (args->num_tokens * width < ELEMENTS_TO_SPLIT) {
        store_tokens(&own, 0, 1);
        return 0;
    }
    pelton_enter();
    pelton_run(store_tokens, &own);
    pelton_leave();
    return 0;
}
