"""Of a draw without noise."""

from __future__ import annotations

import functools

import torch

from pelton.ops.argmax import reference
from pelton.ops.lm_head_sample import DrawRows
from pelton.ops.lm_head_sample.triton import shared_drawer


@functools.cache
def _greedy(num_rows: int, device: torch.device) -> DrawRows:
    """Rows of one slot, whose temperature is 0."""
    slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return DrawRows(slots, zeros, torch.zeros(1, device=device), slots[:1])


def argmax(logits: torch.Tensor, out_ids: torch.Tensor, out_max: torch.Tensor) -> None:
    """A row with NaN may give +inf."""
    num_rows = len(logits)
    if logits.dtype == torch.float64:
        reference.argmax(logits, out_ids, out_max)
    elif num_rows:
        rows = _greedy(num_rows, logits.device)
        shared_drawer(logits.shape[1])(logits, rows, out_ids, None, out_max=out_max)
