#include "tape.h"

int64_t pelton_replay(const kernel_call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (calls[i].run(calls[i].args))
            return i;
    return -1;
}

int pelton_no_kernel(const void *args) {
    (void)args;
    return 0;
}
