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

/* A region's parts are claimed one by one. A thread takes its own part first, so that it mostly reads
   the same share of a weight in every step, and then whatever nobody has begun. So the caller never
   waits for a thread that is asleep or without a core, only for parts under way: when another
   process takes a core, a region takes as much longer as there is less to run on.

   region: its number << 16 | its parts. Task and argument are written before it, and stay while any
   claimed part has not ended. A part is claimed by writing the region's number into its claim, so
   one that comes late, with the number of a region that has ended, finds nothing left. */
static _Atomic uint64_t region;
static struct {
    _Atomic uint64_t region;
    char apart[64 - sizeof(uint64_t)]; /* one cache line each */
} claims[MAX_THREADS];
static pelton_task current_task;
static void *current_argument;
static _Atomic uint32_t epoch;      /* one more for every region; what sleeping workers look at */
static _Atomic uint32_t num_done;   /* parts of the region that have ended */
static _Atomic uint32_t num_asleep; /* workers in futex_wait on epoch */
static _Atomic uint32_t is_waiting; /* the caller is in futex_wait on num_done */

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

/* Runs parts of the region under way until all are claimed, part `own` first. */
static void work_on(uint32_t own) {
    uint64_t seen = atomic_load(&region), number = seen >> 16;
    uint32_t parts = seen & 0xffff;
    for (uint32_t i = 0; i < parts; i++) {
        uint32_t part = (own + i) % parts;
        uint64_t before = atomic_load(&claims[part].region);
        if (before >= number || !atomic_compare_exchange_strong(&claims[part].region, &before, number))
            continue;
        current_task(current_argument, (int)part, (int)parts);
        if (atomic_fetch_add(&num_done, 1) + 1 == parts && atomic_load(&is_waiting))
            futex_wake(&num_done, 1);
    }
}

static void *work(void *argument) {
    uint32_t own = (uint32_t)(uintptr_t)argument;
    for (;;) {
        uint32_t seen = atomic_load(&epoch);
        work_on(own);
        if (!spin_while(&epoch, seen)) {
            atomic_fetch_add(&num_asleep, 1);
            while (atomic_load(&epoch) == seen)
                futex_wait(&epoch, seen);
            atomic_fetch_sub(&num_asleep, 1);
        }
    }
    return NULL;
}

void pelton_run(pelton_task task, void *argument) {
    if (num_threads == 1) {
        task(argument, 0, 1);
        return;
    }
    uint32_t parts = (uint32_t)num_threads, done;
    current_task = task;
    current_argument = argument;
    atomic_store(&num_done, 0);
    atomic_store(&region, ((atomic_load(&region) >> 16) + 1) << 16 | parts);
    atomic_fetch_add(&epoch, 1);
    if (atomic_load(&num_asleep))
        futex_wake(&epoch, INT_MAX);
    work_on(0);
    while ((done = atomic_load(&num_done)) != parts) {
        if (!spin_while(&num_done, done)) {
            atomic_store(&is_waiting, 1);
            if ((done = atomic_load(&num_done)) != parts)
                futex_wait(&num_done, done);
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
        if (pthread_create(&thread, NULL, work, (void *)(uintptr_t)num_started))
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
