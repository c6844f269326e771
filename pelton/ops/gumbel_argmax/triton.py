from __future__ import annotations

import functools

import torch

from pelton.ops.gumbel_argmax import reference
from pelton.ops.gumbel_argmax.triton_candidates import draw_candidate
from pelton.ops.lm_head_sample import DrawRows
from pelton.ops.lm_head_sample.triton import drawer

_MOST_CANDIDATES = 1024
_drawer = functools.cache(drawer)


def gumbel_argmax(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out_ids: torch.Tensor,
    out_max: torch.Tensor,
) -> None:
    """Many candidates, beside which a sort has cost more, by the reference."""
    if token_ids is not None and token_ids.shape[1] <= _MOST_CANDIDATES:
        num_rows, num_candidates = token_ids.shape
        draw_candidate[(num_rows,)](
            logits, token_ids, temperature, seeds, positions, out_ids, out_max,
            logits.stride(0), token_ids.stride(0), num_candidates,
            BLOCK=64 if num_candidates <= 64 else _MOST_CANDIDATES,
        )  # fmt: skip
        return
    if token_ids is not None:
        reference.gumbel_argmax(logits, token_ids, temperature, seeds, positions, out_ids, out_max)
        return
    every = torch.arange(len(logits), device=logits.device)
    rows = DrawRows(every, positions - 1, temperature, seeds)
    _drawer(logits.shape[1])(logits, rows, out_ids, None, out_max=out_max)
