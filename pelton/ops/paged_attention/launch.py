"""What launches of GPU kernels are sized by, and memory that they share. Imports no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pelton.core.plan import Int32Array
from pelton.ops.paged_attention import AttentionMetadata

# Of one launch's partial results, in float32: 32 MiB.
PARTIAL_SIZE = 2**23
MAX_ROW_HEADS = 2**16


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes as executed, padding included: what a captured graph fixes.

    uniform_query_len: of every row, without tokens of padding behind them; else 0.
    min_query_len, max_query_len, max_seq_len: bounds over rows. is_fresh: whether most keys that
    are read may well be the step's own.
    """

    num_rows: int
    num_tokens: int
    uniform_query_len: int
    min_query_len: int
    max_query_len: int
    max_seq_len: int
    is_fresh: bool = True

    @classmethod
    def of(cls, meta: AttentionMetadata, num_tokens: int) -> StepShape:
        """What a backend put into meta.prepared, or else from the metadata's host side."""
        found = meta.prepared.get("shape")
        if found is not None:
            assert found.num_tokens == num_tokens
            return found  # type: ignore[no-any-return]
        lens, num_rows = meta.query_lens, len(meta.seq_lens)
        longest = int(lens.max(initial=0))
        shortest = int(lens.min(initial=longest))
        is_uniform = shortest == longest and longest * num_rows == num_tokens
        return cls(
            num_rows=num_rows,
            num_tokens=num_tokens,
            uniform_query_len=longest if is_uniform else 0,
            min_query_len=shortest,
            max_query_len=longest,
            max_seq_len=int(meta.seq_len_bounds.max(initial=0)),
            is_fresh=is_fresh(lens, meta.seq_len_bounds),
        )


def is_fresh(query_lens: Int32Array, seq_lens: Int32Array) -> bool:
    """Whether chunks read more keys of their own than earlier ones; each [num_rows]."""
    lens = query_lens.astype(np.int64)
    return bool((lens * (seq_lens - lens)).sum() <= (lens * lens).sum() // 2)


class Workspace:
    """For partial results of split rows, shared by all layers: one launch follows the other.

    partial: float32 [PARTIAL_SIZE]. arrived: int32 [MAX_ROW_HEADS], zero between launches.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.partial = torch.empty(PARTIAL_SIZE, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(MAX_ROW_HEADS, dtype=torch.int32, device=device)
