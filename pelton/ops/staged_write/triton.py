from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 1024
# Programs for each write, and words per program from which on there are more: a long prompt is not
# one program's loop over memory that may lie across a bus.
_MAX_PARTS = 64
_PART_WORDS = 4096


@triton.jit(do_not_specialize=["num_writes"], do_not_specialize_on_alignment=["writes"])
def _staged_write(arena, writes, num_writes, WORDS: tl.constexpr):
    write = tl.program_id(0)
    target = tl.load(writes + write)
    first = tl.load(writes + num_writes + write)
    length = tl.load(writes + num_writes + write + 1) - first
    contents = writes + 2 * num_writes + 1 + first
    for start in range(tl.program_id(1) * WORDS, length, tl.num_programs(1) * WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < length
        tl.store(arena + target + word, tl.load(contents + word, mask=inside), mask=inside)


def staged_write(arena: torch.Tensor, writes: torch.Tensor, num_writes: int) -> None:
    num_words = writes.numel() - 2 * num_writes - 1
    parts = min(max(num_words // _PART_WORDS, 1), _MAX_PARTS)
    _staged_write[(num_writes, parts)](arena, writes, num_writes, WORDS=_WORDS, num_warps=4)
