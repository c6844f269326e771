"""The shape of a step, as data: what a forward executor is chosen and captured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """Sizes as executed, padding included.

    uniform_query_len: query length shared by every row, 0 when rows differ.
    max_seq_len: upper bound over rows, in tokens.
    splits: half-open token ranges of microbatches; empty = one piece.
    has_embeds: whether embeddings of prompts are laid over those of some tokens; they are in memory
        of the step's own, so it cannot be recorded.
    subset_size: rows of a row subset (shared-KV layers); 0 = all.
    """

    mode: Literal["eager", "full", "piecewise"] = "eager"
    num_tokens: int
    num_rows: int
    uniform_query_len: int
    max_query_len: int
    max_seq_len: int
    splits: tuple[tuple[int, int], ...] = ()
    adapter_case: int = 0
    subset_size: int = 0
    has_embeds: bool = False


def dispatch(live: Descriptor, agreed: Descriptor | None = None) -> Descriptor:
    """The descriptor to run: what the ranks agreed on, or, with one rank, the live one."""
    return live if agreed is None else agreed
