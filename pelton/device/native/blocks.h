/* Products with a weight in quantised blocks; blocks.c says how it is packed. */
#ifndef PELTON_BLOCKS_H
#define PELTON_BLOCKS_H

#include <stdint.h>

#include "linear.h"

/* form: a type of GGUF's. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, NUM_FORMS };

/* The panels of one form, which follow those of the run before. */
typedef struct {
    const uint8_t *panels;
    int64_t num_panels;
    int64_t form;
} block_run;

enum { MAX_RUNS = 4 };

typedef struct {
    linear_args linear; /* its weight is not used */
    int64_t num_runs;
    block_run runs[MAX_RUNS];
} block_args;

/* 0, or 1 if memory is short. */
int pelton_blocks(const block_args *args);

/* Rows become tokens, as by pelton_draw. */
typedef struct {
    draw_args draw; /* the weight of its head is not used */
    int64_t num_runs;
    block_run runs[MAX_RUNS];
} block_draw_args;

int pelton_block_draw(const block_draw_args *args);

/* Bytes of a panel of k columns, k a multiple of the form's block; 64-byte units. */
int64_t pelton_panel_bytes(int form, int64_t k);

/* rows: [num_rows, k], blocks as they lie in a file. panels: of one run, whose rows first_row.. they
   become; zeroed before the first. */
void pelton_pack_blocks(int form, const uint8_t *rows, int64_t num_rows, int64_t k,
                        int64_t first_row, uint8_t *panels);

/* out[i] = row x[i] of the weight, as numbers: x holds num_rows ids (int32), rows of the weight. 0. */
int pelton_block_rows(const block_args *args);

#endif
