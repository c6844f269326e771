#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
/* How long a thread looks for work, or for the others' end, before it sleeps. Long enough to bridge
   what Python does between two kernels of a layer; short enough that a thread whose core is taken by
   another process gives way at once. */
#define SPIN_NANOSECONDS 60000

static int num_threads = 1;
static int num_started = 1;
static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER;

static pelton_task current_task;
static void *current_argument;
static int current_parts;
static _Atomic uint32_t epoch;      /* one more for every region */
static _Atomic uint32_t num_left;   /* parts of the region that have not ended */
static _Atomic uint32_t num_asleep; /* workers in futex_wait on epoch */
static _Atomic uint32_t is_waiting; /* the caller is in futex_wait on num_left */

static uint32_t first_epoch[MAX_THREADS]; /* that a worker takes for seen when it starts */

static void *scratch_memory;
static long scratch_bytes;

static void futex_wait(_Atomic uint32_t *word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static int64_t now_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Whether *word became other than `value` within the time of spinning. */
static int spin_while(_Atomic uint32_t *word, uint32_t value) {
    int64_t end = now_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return 1;
            relax();
        }
    } while (now_nanoseconds() < end);
    return 0;
}

static void *work(void *argument) {
    int part = (int)(intptr_t)argument;
    uint32_t seen = first_epoch[part];
    for (;;) {
        if (!spin_while(&epoch, seen)) {
            atomic_fetch_add(&num_asleep, 1);
            while (atomic_load(&epoch) == seen)
                futex_wait(&epoch, seen);
            atomic_fetch_sub(&num_asleep, 1);
        }
        /* The caller waits for this part before it starts another region: one step at a time. */
        seen++;
        if (part < current_parts)
            current_task(current_argument, part, current_parts);
        if (atomic_fetch_sub(&num_left, 1) == 1 && atomic_load(&is_waiting))
            futex_wake(&num_left, 1);
    }
    return NULL;
}

void pelton_run(pelton_task task, void *argument) {
    if (num_started == 1) {
        task(argument, 0, 1);
        return;
    }
    current_task = task;
    current_argument = argument;
    current_parts = num_threads;
    atomic_store(&num_left, (uint32_t)(num_started - 1));
    atomic_fetch_add(&epoch, 1);
    if (atomic_load(&num_asleep))
        futex_wake(&epoch, INT_MAX);
    task(argument, 0, num_threads);
    uint32_t left;
    while ((left = atomic_load(&num_left)) != 0) {
        if (!spin_while(&num_left, left)) {
            atomic_store(&is_waiting, 1);
            if ((left = atomic_load(&num_left)) != 0)
                futex_wait(&num_left, left);
            atomic_store(&is_waiting, 0);
        }
    }
}

void pelton_enter(void) { pthread_mutex_lock(&call_lock); }

void pelton_leave(void) { pthread_mutex_unlock(&call_lock); }

int pelton_num_threads(void) { return num_threads; }

static void forget_threads(void) {
    /* A forked child has the caller only, and maybe a lock that nobody gives back. */
    num_threads = num_started = 1;
    atomic_store(&num_asleep, 0);
    pthread_mutex_init(&call_lock, NULL);
}

int pelton_set_num_threads(int count) {
    static int has_fork_hook;
    if (count < 1)
        count = 1;
    if (count > MAX_THREADS)
        count = MAX_THREADS;
    pthread_mutex_lock(&call_lock);
    if (!has_fork_hook) {
        pthread_atfork(NULL, NULL, forget_threads);
        has_fork_hook = 1;
    }
    while (num_started < count) {
        pthread_t thread;
        first_epoch[num_started] = atomic_load(&epoch);
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)num_started))
            break;
        pthread_detach(thread);
        num_started++;
    }
    num_threads = count < num_started ? count : num_started;
    pthread_mutex_unlock(&call_lock);
    return num_threads;
}

void *pelton_scratch(long num_bytes) {
    if (scratch_bytes < num_bytes) {
        free(scratch_memory);
        long size = (num_bytes + 4095) / 4096 * 4096;
        scratch_memory = aligned_alloc(4096, (size_t)size);
        scratch_bytes = scratch_memory ? size : 0;
    }
    return scratch_memory;
}
