/* What the machine can do at most, by the pool that the kernels use: for benchmarks alone. */
#ifndef PELTON_PEAKS_H
#define PELTON_PEAKS_H

#include <stdint.h>

/* Reads num_bytes, a multiple of 64, `rounds` times; each thread the same part each time. */
typedef struct {
    const void *memory;
    int64_t num_bytes, rounds;
} read_args;

int pelton_read(const read_args *args);

enum { PEAK_FLOAT, PEAK_BF16_DOT, PEAK_BF16_TILE };

/* Operations (a multiply-add counts two) of one product of a kind, 0 if this library has none. */
int64_t pelton_peak_operations(int kind);

/* count products of a kind on each thread, from registers into registers. */
typedef struct {
    int64_t count;
    int32_t kind;
} peak_args;

int pelton_peak(const peak_args *args);

#endif
