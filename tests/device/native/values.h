/* Random numbers of either type. */
#ifndef VALUES_H
#define VALUES_H

#include "element.h"

static unsigned state = 1;

static float noise(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1;
}

static void fill(void *to, int is_half, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (is_half)
            ((bf16 *)to)[i] = float_to_bf16(noise());
        else
            ((float *)to)[i] = noise();
}

static float get(const void *from, int is_half, int64_t i) {
    return is_half ? bf16_to_float(((const bf16 *)from)[i]) : ((const float *)from)[i];
}

#endif
