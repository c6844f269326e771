from __future__ import annotations

import functools

import torch

from pelton.ops.gumbel_argmax import reference
from pelton.ops.lm_head_sample import DrawRows
from pelton.ops.lm_head_sample.triton import drawer

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
    """Candidates, of which there are few, by the reference."""
    if token_ids is not None:
        reference.gumbel_argmax(logits, token_ids, temperature, seeds, positions, out_ids, out_max)
        return
    every = torch.arange(len(logits), device=logits.device)
    rows = DrawRows(every, positions - 1, temperature, seeds)
    _drawer(logits.shape[1])(logits, rows, out_ids, None, out_max=out_max)
