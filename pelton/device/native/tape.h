/* A step's kernels, called one after the other without Python between them. */
#ifndef PELTON_TAPE_H
#define PELTON_TAPE_H

#include <stdint.h>

typedef struct {
    int (*run)(const void *args); /* any kernel of this library */
    const void *args;
} kernel_call;

/* -1, or the index of the first call that failed; those behind it are not made. */
int64_t pelton_replay(const kernel_call *calls, int64_t count);

/* Does nothing: what calling costs. */
int pelton_no_kernel(const void *args);

#endif
