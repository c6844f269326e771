"""Changing a model's logits, whatever kernels it has bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pelton.ops.lm_head_sample import reference


def hook_logits(model: Any, change: Callable[[torch.Tensor], object]) -> None:
    """change(logits [N, V]) after each head product, before anything is drawn."""
    head = model.head

    def hooked(hidden: torch.Tensor, out: torch.Tensor) -> None:
        head(hidden, out)
        change(out)

    def draw(
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: Any,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        hooked(hidden.index_select(0, indices), logits)
        reference.draw(logits, rows, out_ids, out_status)

    model.head, model.draw = hooked, draw


def forget_recordings(worker: Any) -> None:
    """What was recorded of the model before it was hooked would not know of that."""
    getattr(worker._assembled.executor, "_steps", {}).clear()
