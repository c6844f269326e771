from __future__ import annotations

import torch

from pelton.ops.gumbel_argmax.triton_candidates import draw_candidate
from pelton.ops.lm_head_sample import DrawRows
from pelton.ops.lm_head_sample.triton import shared_drawer
from pelton.ops.top_k_top_p import MAX_CANDIDATES


def gumbel_argmax(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out_ids: torch.Tensor,
    out_max: torch.Tensor,
) -> None:
    """At most MAX_CANDIDATES of token_ids."""
    if token_ids is not None:
        num_rows, num_candidates = token_ids.shape
        assert num_candidates <= MAX_CANDIDATES
        draw_candidate[(num_rows,)](
            logits, token_ids, temperature, seeds, positions, out_ids, out_max,
            logits.stride(0), token_ids.stride(0), num_candidates,
            BLOCK=64 if num_candidates <= 64 else MAX_CANDIDATES,
        )  # fmt: skip
        return
    every = torch.arange(len(logits), device=logits.device)
    rows = DrawRows(every, positions - 1, temperature, seeds)
    shared_drawer(logits.shape[1])(logits, rows, out_ids, None, out_max=out_max)
