from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 1024


@triton.jit(do_not_specialize=["num_writes"])
def _staged_write(arena, writes, num_writes, WORDS: tl.constexpr):
    write = tl.program_id(0)
    target = tl.load(writes + write)
    first = tl.load(writes + num_writes + write)
    length = tl.load(writes + num_writes + write + 1) - first
    contents = writes + 2 * num_writes + 1 + first
    for start in range(0, length, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < length
        tl.store(arena + target + word, tl.load(contents + word, mask=inside), mask=inside)


def staged_write(arena: torch.Tensor, writes: torch.Tensor, num_writes: int) -> None:
    _staged_write[(num_writes,)](arena, writes, num_writes, WORDS=_WORDS, num_warps=4)
