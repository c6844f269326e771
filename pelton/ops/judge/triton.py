from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.core import plan

OK = tl.constexpr(plan.OK)
NAN_LOGITS = tl.constexpr(plan.NAN_LOGITS)
ALL_MASKED = tl.constexpr(plan.ALL_MASKED)
_BLOCK = 128


@triton.jit(do_not_specialize=["num_rows"])
def _judge(raw_max, out_max, out_ids, out_status, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = rows < num_rows
    raw = tl.load(raw_max + rows, mask=exists, other=0.0)
    best = tl.load(out_max + rows, mask=exists, other=0.0)
    status = tl.where(best == float("-inf"), ALL_MASKED, OK)
    # NaN compares false.
    is_sound = (raw < float("inf")) & (best < float("inf"))
    status = tl.where(is_sound, status, NAN_LOGITS)
    ids = tl.load(out_ids + rows, mask=exists, other=0)
    tl.store(out_status + rows, status, mask=exists)
    tl.store(out_ids + rows, tl.where(status == OK, ids, 0), mask=exists)


def judge(
    raw_max: torch.Tensor, out_max: torch.Tensor, out_ids: torch.Tensor, out_status: torch.Tensor
) -> None:
    num_rows = len(out_ids)
    if num_rows:
        _judge[(triton.cdiv(num_rows, _BLOCK),)](
            raw_max, out_max, out_ids, out_status, num_rows, BLOCK=_BLOCK
        )
