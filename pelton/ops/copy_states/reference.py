from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

COLUMNS = 2


@dataclass(frozen=True, slots=True)
class StateCopy:
    """One layer. states: [R, ring, state_bytes] uint8, contiguous. pages: [num_blocks, page_bytes]
    uint8, its pool. The state lies in pages first..first + count of a checkpoint's blocks."""

    states: torch.Tensor
    pages: torch.Tensor
    first: int
    count: int


def save_states(commands: torch.Tensor, copies: Sequence[StateCopy]) -> None:
    for copy in copies:
        rows, blocks = _where(commands, copy)
        flat = copy.states.view(-1, copy.states.shape[2]).index_select(0, rows)
        page_bytes = copy.pages.shape[1]
        num_full = flat.shape[1] // page_bytes
        full = flat[:, : num_full * page_bytes].reshape(-1, page_bytes)
        copy.pages.index_copy_(0, blocks[:, :num_full].reshape(-1), full)
        if num_full < copy.count:
            rest = flat[:, num_full * page_bytes :]
            copy.pages[:, : rest.shape[1]].index_copy_(0, blocks[:, num_full], rest)


def load_states(commands: torch.Tensor, copies: Sequence[StateCopy]) -> None:
    for copy in copies:
        rows, blocks = _where(commands, copy)
        pages = copy.pages.index_select(0, blocks.reshape(-1))
        pages = pages.view(len(commands), copy.count * copy.pages.shape[1])
        flat = copy.states.view(-1, copy.states.shape[2])
        flat.index_copy_(0, rows, pages[:, : flat.shape[1]])


def _where(commands: torch.Tensor, copy: StateCopy) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of `states` with rows and ring as one axis [n], block ids [n, count])."""
    rows = commands[:, 0].long() * copy.states.shape[1] + commands[:, 1]
    first = COLUMNS + copy.first
    return rows, commands[:, first : first + copy.count].long()
