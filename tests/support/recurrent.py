"""Batches for ops of recurrent layers, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pelton.ops.recurrent import RecurrentMetadata, prepare, row_groups


def metadata(
    rows: Sequence[tuple[int, int, int]], *, ring: int = 1, num_padding: int = 0, pad_slot: int = 0
) -> RecurrentMetadata:
    """rows: (slot, first position, query length); then padding rows."""
    slots, starts, query_lens = ([row[i] for row in rows] for i in range(3))
    total = sum(query_lens)
    meta = RecurrentMetadata(
        idx_mapping=torch.tensor([*slots, *[pad_slot] * num_padding], dtype=torch.int32),
        query_start_loc=torch.tensor(
            [0, *np.cumsum(query_lens), *[total] * num_padding], dtype=torch.int32
        ),
        seq_lens=torch.tensor(
            [*(s + q for s, q in zip(starts, query_lens)), *[0] * num_padding], dtype=torch.int32
        ),
        groups=row_groups(np.array(query_lens, np.int32), np.array(starts, np.int32)),
        num_tokens=total,
        ring=ring,
        max_query_len=max(query_lens, default=0),
        is_single=set(query_lens) <= {1},
    )
    prepare(meta)
    return meta
