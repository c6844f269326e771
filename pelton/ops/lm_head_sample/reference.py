from __future__ import annotations

from collections.abc import Callable

import torch

from pelton.ops.argmax import argmax
from pelton.ops.gumbel_argmax import gumbel_argmax
from pelton.ops.judge import judge
from pelton.ops.lm_head_sample import DrawRows, HeadSignature
from pelton.ops.registry import Kernel

Head = Callable[[torch.Tensor, torch.Tensor], None]

# So many float32 scores exist at a time; on a CPU they stay in its cache.
_TILE_ELEMENTS = {"cpu": 1 << 18}
_TILE_ELEMENTS_ELSEWHERE = 1 << 24


def composed(
    signature: HeadSignature, head: Head, weight: torch.Tensor, norm_weight: torch.Tensor
) -> Kernel:
    """The model's logits, then `draw`."""
    return over_logits(head, draw)


def over_logits(head: Head, draw: Kernel) -> Kernel:
    """The model's logits, then any kernel with the arguments of `draw`."""

    def kernel(
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        head(hidden.index_select(0, indices), logits)
        draw(logits, rows, out_ids, out_status)

    return kernel


def draw(
    logits: torch.Tensor, rows: DrawRows, out_ids: torch.Tensor, out_status: torch.Tensor
) -> None:
    """What the op does with logits [N, V], which stay unchanged."""
    num_rows, vocab_size = logits.shape
    temperature = rows.temperature.index_select(0, rows.slots)
    # On a CPU a look costs nothing, and noise for rows that are greedy would cost much.
    if logits.device.type == "cpu" and not bool(temperature.any()):
        out_max = logits.new_empty(num_rows, dtype=torch.float32)
        argmax(logits, out_ids, out_max)
        judge(out_max, out_max, out_ids, out_status)
        return
    elements = _TILE_ELEMENTS.get(logits.device.type, _TILE_ELEMENTS_ELSEWHERE)
    step = max(1, elements // vocab_size)
    for start in range(0, num_rows, step):
        at = slice(start, start + step)
        _draw_tile(logits[at], temperature[at], rows, at, out_ids[at], out_status[at])


def _draw_tile(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    rows: DrawRows,
    at: slice,
    out_ids: torch.Tensor,
    out_status: torch.Tensor,
) -> None:
    scores = logits.to(torch.float32, copy=True)
    scores.div_(torch.where(temperature > 0, temperature, 1.0)[:, None])
    out_max = scores.new_empty(len(scores))
    gumbel_argmax(
        scores,
        None,
        temperature,
        rows.seeds.index_select(0, rows.slots[at]),
        rows.positions[at] + 1,
        out_ids,
        out_max,
    )
    judge(logits.amax(-1).to(torch.float32), out_max, out_ids, out_status)
