"""Rows of log-probabilities as bytes."""

from __future__ import annotations

import msgspec
import numpy as np

from pelton.core.plan import Int32Array, LogprobRows


class PackedRows(msgspec.Struct, array_like=True, frozen=True):
    """N rows of LogprobRows without its offsets: little-endian int32 and float32, row-major.

    width: columns of top_ids and top_logprobs.
    """

    width: int
    token_logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


def pack_rows(rows: LogprobRows, chosen: Int32Array | slice) -> PackedRows:
    """chosen: indices of the rows to pack, in the order in which they are to stand."""
    return PackedRows(
        width=rows.top_ids.shape[1],
        token_logprobs=rows.token_logprobs[chosen].astype("<f4", copy=False).tobytes(),
        ranks=rows.ranks[chosen].astype("<i4", copy=False).tobytes(),
        top_ids=rows.top_ids[chosen].astype("<i4", copy=False).tobytes(),
        top_logprobs=rows.top_logprobs[chosen].astype("<f4", copy=False).tobytes(),
    )


def unpack_rows(packed: PackedRows) -> LogprobRows:
    """Views of the bytes; all rows count as one batch row's. Raises ValueError if the arrays do not
    belong together."""
    ranks = np.frombuffer(packed.ranks, "<i4")
    shape = len(ranks), packed.width
    return LogprobRows(
        offsets=np.array([0, len(ranks)], np.int32),
        token_logprobs=np.frombuffer(packed.token_logprobs, "<f4").reshape(len(ranks)),
        ranks=ranks,
        top_ids=np.frombuffer(packed.top_ids, "<i4").reshape(shape),
        top_logprobs=np.frombuffer(packed.top_logprobs, "<f4").reshape(shape),
    )
