/* Attention of rows with many query tokens, in bfloat16; attention.h's arguments. */
#ifndef PELTON_PREFILL_H
#define PELTON_PREFILL_H

#include "attention.h"

/* Whether a row of so many query tokens is this file's. */
int pelton_prefill_takes(const attention_args *args, int64_t query_len);

/* All such rows. Call between pelton_enter and pelton_leave. 0, or 1 if memory is short. */
int pelton_prefill(const attention_args *args);

#endif
