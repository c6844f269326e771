/* One head at a time, in float32; rounded when it is written back. */
#include "store.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

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
    size_t stored = (size_t)(a->num_kv_heads * a->head_dim) * element;
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
        if (a->kv_slots && a->kv_slots[token] >= 0)
            memcpy((char *)a->kv + (size_t)a->kv_slots[token] * 2 * stored,
                   row + (size_t)(a->num_heads * a->head_dim) * element, 2 * stored);
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
