/* One pool of threads for every kernel. A region is `task(argument, part, parts)`, once per part. */
#ifndef PELTON_POOL_H
#define PELTON_POOL_H

typedef void (*pelton_task)(void *argument, int part, int parts);

/* Around every call of a kernel: one at a time has the threads and the memory. */
void pelton_enter(void);
void pelton_leave(void);

/* Runs the parts of a region, on the caller and on whatever threads come in time, and returns when
   all have ended. */
void pelton_run(pelton_task task, void *argument);

/* Threads for all kernels from now on. Returns how many there are: fewer if the system gives no
   more. Those started earlier stay, asleep. */
int pelton_set_num_threads(int count);

/* Parts of a region. */
int pelton_num_threads(void);

/* Items first..last of the num_items that part has. */
static inline void pelton_share(long num_items, int part, int parts, long *first, long *last) {
    *first = num_items * part / parts;
    *last = num_items * (part + 1) / parts;
}

/* Memory of at least num_bytes for one call of a kernel, 64-byte aligned, or NULL if there is none.
   Ask outside a region; the next call of any kernel gets the same memory. */
void *pelton_scratch(long num_bytes);

#endif
