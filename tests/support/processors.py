"""Logits processors, as users write them."""

from __future__ import annotations

from typing import Any

import torch

from pelton.sampling.processors import ProcessedRow


def halve_and_shift(scores: torch.Tensor, row: ProcessedRow, shift: float = 0.0) -> None:
    scores.mul_(0.5).add_(shift * torch.arange(len(scores)))


def ban_best(scores: torch.Tensor, row: ProcessedRow) -> None:
    scores[scores.argmax()] = -torch.inf


def ban_seen(scores: torch.Tensor, row: ProcessedRow, outputs_only: bool = True) -> None:
    """Without a read on the host."""
    place = torch.arange(len(row.token_ids))
    first = row.prompt_len if outputs_only else 0
    is_seen = (row.token_ids >= 0) & (place >= first)
    known = is_seen & (place < row.num_tokens)
    assert torch.equal(is_seen, known)
    scores.scatter_reduce_(
        0,
        torch.where(is_seen, row.token_ids, 0).long(),
        torch.where(is_seen, -torch.inf, torch.inf),
        "amin",
    )


def fail(scores: torch.Tensor, row: ProcessedRow) -> None:
    scores.zero_()
    raise KeyError("no")


def answer(scores: torch.Tensor, row: ProcessedRow) -> Any:
    return scores + 1
