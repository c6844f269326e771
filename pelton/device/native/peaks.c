#include "peaks.h"

#include "pool.h"
#include "tiles.h"
#include "vec.h"

#define LINE 64
#define CHAINS 8 /* independent sums, so that no product waits for another */

static volatile uint32_t sink; /* whatever goes here cannot be left out */

static void read_part(void *argument, int part, int parts) {
    const read_args *a = argument;
    long first, last;
    pelton_share(a->num_bytes / LINE, part, parts, &first, &last);
    const v16u *memory = a->memory;
    v16u sums[4] = {0};
    for (int64_t round = 0; round < a->rounds; round++) {
        long i = first;
        for (; i + 4 <= last; i += 4) {
            __builtin_prefetch(memory + i + 32);
            __builtin_prefetch(memory + i + 33);
            __builtin_prefetch(memory + i + 34);
            __builtin_prefetch(memory + i + 35);
            for (int j = 0; j < 4; j++)
                sums[j] += memory[i + j];
        }
        for (; i < last; i++)
            sums[0] += memory[i];
        __asm__ volatile("" ::: "memory"); /* each round reads anew */
    }
    v16u sum = sums[0] + sums[1] + sums[2] + sums[3];
    sink = sum[0] ^ sum[7];
}

int pelton_read(const read_args *args) {
    pelton_enter();
    pelton_run(read_part, (void *)args);
    pelton_leave();
    return 0;
}

int64_t pelton_peak_operations(int kind) {
    if (kind == PEAK_FLOAT)
        return 2 * LANES;
#ifdef __AVX512BF16__
    if (kind == PEAK_BF16_DOT)
        return 4 * LANES;
#endif
#ifdef __AMX_BF16__
    if (kind == PEAK_BF16_TILE)
        return 2 * 16 * 16 * 32;
#endif
    return 0;
}

static void peak_float(int64_t count) {
    v16f sums[CHAINS] = {0}, a = splat(0.5f), b = splat(0.999f);
    for (int64_t i = 0; i < count; i += CHAINS)
        for (int j = 0; j < CHAINS; j++)
            sums[j] = sums[j] * b + a;
    for (int j = 1; j < CHAINS; j++)
        sums[0] += sums[j];
    sink = (uint32_t)sums[0][0];
}

static void peak_bf16_dot(int64_t count) {
#ifdef __AVX512BF16__
    __m512 sums[CHAINS];
    v16u ones = splat_u(0x3f803f80);
    __m512bh a = (__m512bh)ones;
    for (int j = 0; j < CHAINS; j++)
        sums[j] = (__m512)splat(0.0f);
    for (int64_t i = 0; i < count; i += CHAINS)
        for (int j = 0; j < CHAINS; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], a, a);
    v16f sum = splat(0.0f);
    for (int j = 0; j < CHAINS; j++)
        sum += (v16f)sums[j];
    sink = (uint32_t)sum[0];
#else
    (void)count;
#endif
}

static void peak_bf16_tile(int64_t count) {
#ifdef __AMX_BF16__
    bf16 ones[TILE] __attribute__((aligned(64)));
    float sums[16 * 16] __attribute__((aligned(64)));
    for (int i = 0; i < TILE; i++)
        ones[i] = 0x3f80;
    configure_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    for (int64_t i = 0; i < count; i += 4) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    sink = (uint32_t)sums[0];
#else
    (void)count;
#endif
}

static void peak_part(void *argument, int part, int parts) {
    const peak_args *a = argument;
    (void)part;
    (void)parts;
    if (a->kind == PEAK_FLOAT)
        peak_float(a->count);
    else if (a->kind == PEAK_BF16_DOT)
        peak_bf16_dot(a->count);
    else
        peak_bf16_tile(a->count);
}

int pelton_peak(const peak_args *args) {
    pelton_enter();
    pelton_run(peak_part, (void *)args);
    pelton_leave();
    return 0;
}
