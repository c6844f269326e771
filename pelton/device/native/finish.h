/* What becomes of the sums of a product: numbers in `out`, or tokens. */
#ifndef PELTON_FINISH_H
#define PELTON_FINISH_H

#include <math.h>

#include "linear.h"
#include "vec.h"

/* A row's draw under way, of the features that one part has seen. */
typedef struct {
    v16f best;   /* the largest score of each lane, */
    v16i best_id; /* and its id, -1: none yet */
    v16i unsound; /* lanes that met NaN or +inf */
    float temperature;
    uint32_t keys[2];
} draw;

static inline v16u mix(v16u x, v16u added) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu + added;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

static inline uint32_t mix_one(uint32_t x) { return mix((v16u){x}, (v16u){0})[0]; }

static inline void set_keys(draw *d, int64_t seed, int32_t position) {
    uint32_t low = (uint32_t)seed, high = (uint32_t)((uint64_t)seed >> 32);
    uint32_t turned = (uint32_t)position * 0x9e3779b1u;
    d->keys[0] = mix_one(mix_one(low + turned) + high);
    d->keys[1] = mix_one(mix_one((high ^ 0x85ebca6bu) + turned) + low);
}

/* The noise of ops/gumbel_argmax, below this for every id. */
#define NOISE_BOUND 22.3f

static inline v16f noise_of(const draw *d, v16i ids) {
    v16u bits = mix((v16u)ids * 0x9e3779b1u + d->keys[0], splat_u(d->keys[1]));
    v16f w = __builtin_convertvector((v16i)(bits & 0x7fffffffu), v16f) + 0.5f;
    w *= 4.656612873077393e-10f; /* 2^-31 */
    v16f most = splat(0.999999940395355224609375f);
    w = blend(w > most, most, w);
    /* log1p(-w): what the rounding of 1 - w lost comes back as a factor. */
    v16f u = 1.0f - w;
    v16f lost = u - 1.0f;
    v16f factor = blend(lost == 0.0f, splat(1.0f), -w / blend(lost == 0.0f, splat(1.0f), lost));
    v16f log1p = blend(lost == 0.0f, -w, log_v16(u) * factor);
    return -log_v16(-log1p);
}

/* The logits of features first..first + count of a row. */
static inline void consider(int dtype, draw *d, int64_t first, int64_t count, v16f logit) {
    static const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16i ids = lanes + (int32_t)first;
    if (dtype == IS_BF16)
        logit = (v16f)(__builtin_convertvector(to_bf16(logit), v16u) << 16);
    v16i is_there = lanes < (int32_t)(count < LANES ? count : LANES);
    v16f score = logit, infinite = splat(INFINITY);
    if (d->temperature > 0) {
        score = logit / d->temperature;
        d->unsound |= is_there & ~((logit < infinite) & (score < infinite));
        if (!any_lane(is_there & (score + NOISE_BOUND > d->best)))
            return;
        score += noise_of(d, ids);
    }
    d->unsound |= is_there & ~(score < infinite);
    v16i is_better = is_there & (score > d->best);
    d->best = blend(is_better, score, d->best);
    d->best_id = (is_better & ids) | (~is_better & d->best_id);
}

static inline void begin_draws(draw *draws, int parts, const draw_args *args) {
    int64_t num_rows = args->head.num_rows;
    for (int64_t i = 0; i < parts * num_rows; i++) {
        int64_t row = i % num_rows, slot = args->slots[row];
        draws[i] = (draw){.best = splat(-INFINITY), .temperature = args->temperature[slot]};
        draws[i].best_id = (v16i){0} - 1;
        if (draws[i].temperature > 0)
            set_keys(draws + i, args->seeds[slot], args->positions[row] + 1);
    }
}

static inline void end_draws(const draw *draws, int parts, const draw_args *args) {
    int64_t num_rows = args->head.num_rows;
    for (int64_t row = 0; row < num_rows; row++) {
        float best = -INFINITY;
        int32_t id = -1, is_sound = 1;
        for (int part = 0; part < parts; part++) {
            const draw *d = draws + part * num_rows + row;
            for (int lane = 0; lane < LANES; lane++) {
                int is_tie = d->best[lane] == best && d->best_id[lane] >= 0 && d->best_id[lane] < id;
                if (d->best[lane] > best || is_tie) {
                    best = d->best[lane];
                    id = d->best_id[lane];
                }
                is_sound &= !d->unsound[lane];
            }
        }
        args->out_status[row] = !is_sound ? DRAW_NAN : id < 0 ? DRAW_ALL_MASKED : DRAW_OK;
        args->out_ids[row] = is_sound && id >= 0 ? id : 0;
    }
}

/* x times the share of a normal distribution that lies below x, off by 1e-7 |x| at most. The share is
   erfc(|x| / sqrt(2)) / 2 or what is left of 1, erfc by formula 7.1.26 of Abramowitz and Stegun. */
static inline v16f gelu(v16f x) {
    v16f size = (v16f)((v16u)x & 0x7fffffffu);
    v16f t = reciprocal(1.0f + 0.23164189f * size);
    v16f p = splat(0.5f * 1.061405429f);
    p = p * t - 0.5f * 1.453152027f;
    p = p * t + 0.5f * 1.421413741f;
    p = p * t - 0.5f * 0.284496736f;
    p = p * t + 0.5f * 0.254829592f;
    v16f tail = p * t * exp_v16(-0.5f * size * size);
    return x * blend(x < 0.0f, tail, 1.0f - tail);
}

static inline v16f activated(int activation, v16f gate, v16f up) {
    if (activation == SILU_MUL)
        return gate * reciprocal(1.0f + exp_v16(-gate)) * up;
    if (activation == GELU_MUL)
        return gelu(gate) * up;
    /* tanh(z) = 1 - 2 / (exp(2 z) + 1), so gelu(g) = g (1 - 1 / (exp(2 z) + 1)). */
    v16f z = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
    return gate * (1.0f - reciprocal(exp_v16(2.0f * z) + 1.0f)) * up;
}

static inline void
finish_panel(const linear_args *a, draw *draws, int64_t row, int64_t panel, v16f sum) {
    int64_t first = panel * LANES, count = a->num_features - first;
    if (draws) {
        consider(a->dtype, draws + row, first, count, sum);
        return;
    }
    int64_t start = row * a->out_stride + first;
    if (count >= LANES) { /* memcpy of a size that is not a constant costs more than the sums do */
        if (a->dtype == IS_BF16) {
            bf16 *out = (bf16 *)a->out + start;
            if (a->mode == ADD)
                sum += load_bf16(out);
            store_bf16(out, sum);
        } else {
            float *out = (float *)a->out + start;
            if (a->mode == ADD)
                sum += load_f32(out);
            store_f32(out, sum);
        }
        return;
    }
    for (int64_t lane = 0; lane < count; lane++) {
        if (a->dtype == IS_BF16) {
            bf16 *out = (bf16 *)a->out + start + lane;
            *out = float_to_bf16(a->mode == ADD ? sum[lane] + bf16_to_float(*out) : sum[lane]);
        } else {
            float *out = (float *)a->out + start + lane;
            *out = a->mode == ADD ? sum[lane] + *out : sum[lane];
        }
    }
}

/* The sums of a pair of panels in one row: gate and up where an activation halves, else neighbours.
   draws: of the rows, that take them instead of a->out; or NULL. */
static inline void
finish_pair(const linear_args *a, int64_t num_panels, draw *draws, int64_t row, int64_t pair,
            v16f first, v16f second) {
    int is_gated = halves(a->activation);
    int64_t left = is_gated ? pair : 2 * pair;
    int64_t right = is_gated ? pair + num_panels / 2 : 2 * pair + 1;
    if (a->bias) {
        first += load_f32(a->bias + left * LANES);
        if (right < num_panels)
            second += load_f32(a->bias + right * LANES);
    }
    if (is_gated) {
        v16f value = activated(a->activation, first, second);
        if (a->dtype == IS_BF16)
            store_bf16((bf16 *)a->out + row * a->out_stride + left * LANES, value);
        else
            store_f32((float *)a->out + row * a->out_stride + left * LANES, value);
        return;
    }
    if (a->activation == GELU) {
        first = gelu(first);
        second = gelu(second);
    }
    finish_panel(a, draws, row, left, first);
    if (right < num_panels)
        finish_panel(a, draws, row, right, second);
}

#endif
