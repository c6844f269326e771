"""Tiles and splits of the Triton kernels of attention, as measured on an H200 in bfloat16 with
heads of 128: the fastest of about 60 for each number of rows."""

from __future__ import annotations

from dataclasses import dataclass

# Keys up to which rows count as short when nothing else fills the GPU.
_SHORT = 2048
# Keys of a split where rows alone fill the GPU: it evens out rows of unequal length, and rows of
# common lengths are not split.
_LONG_SPLIT = 2048
# Rows times key heads up to which rows of common lengths are split.
_FEW = 160
# Query tokens times heads that leave part of the GPU idle in tiles of 128.
FEW_ROW_HEADS = 2**14
# Query tokens of a row up to which a tile's beginning and end count.
LONG_QUERY = 3072


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """num_keys: of a tile. splits: the most of a row, of at least min_split keys each; may_split:
    whether the kernel knows how to merge more than one. chunk: how many are merged at once.
    is_early: the first tile is loaded before the query is known, which hides its latency and costs
    registers."""

    splits: int
    min_split: int
    num_keys: int
    num_stages: int
    num_warps: int
    chunk: int
    is_early: bool
    may_split: bool = True


def fused_tile(
    *, row_heads: int, max_seq_len: int, row_bytes: int, most_programs: int
) -> DecodeTile:
    """Where every row has one query token. row_heads: rows times key heads. row_bytes: of a key.
    most_programs: whose partial results there is memory for."""
    splits, min_split = 4, _LONG_SPLIT
    num_keys, num_warps, is_early = 128, 4, True
    if row_heads <= 8 and max_seq_len <= _SHORT:
        splits, min_split, num_keys, num_warps = 16, 32, 32, 2
    elif row_heads <= _FEW:
        splits, min_split = min(max(256 // row_heads, 4), 32), 128
    elif row_heads > 768:
        splits = 8 if row_heads <= 1024 else 4
        num_keys, num_warps, is_early = 32, 2, False
    elif row_heads > 384:
        splits, num_keys, is_early = 8, 64, False
    if row_bytes > 256:
        num_keys = max(num_keys * 256 // row_bytes, 16)
    return DecodeTile(
        splits=max(min(splits, most_programs // row_heads), 1),
        min_split=max(min_split, num_keys),
        num_keys=num_keys,
        num_stages=3,
        num_warps=num_warps,
        chunk=4 if min_split == _LONG_SPLIT else 8,
        is_early=is_early,
        may_split=most_programs >= 2 * row_heads,
    )


def plain_tile(*, row_heads: int, row_bytes: int, most_programs: int) -> DecodeTile:
    """Beside chunks, for rows of several tokens, and for quantised keys: one kernel for any number
    of rows, so that few are compiled."""
    splits, min_split = 8, _LONG_SPLIT
    if row_heads <= _FEW:
        splits, min_split = min(max(256 // row_heads, 4), 32), 128
    return DecodeTile(
        splits=max(min(splits, most_programs // row_heads), 1),
        min_split=min_split,
        num_keys=max(64 * 256 // max(row_bytes, 256), 16),
        num_stages=3,
        num_warps=4,
        chunk=4,
        is_early=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """num_rows: query tokens times heads of a key head. num_keys: of a tile."""

    num_rows: int
    num_keys: int
    num_stages: int
    num_warps: int


def prefill_tile(
    *,
    num_row_heads: int,
    max_query_len: int,
    group: int,
    row_bytes: int,
    is_float: bool,
    is_fresh: bool,
    has_codes: bool,
) -> PrefillTile:
    """num_row_heads: query tokens times heads. group: query heads of a key head. is_fresh: the
    step's own keys come by the copy engine, whole tiles at a time."""
    if is_float:
        return PrefillTile(num_rows=64, num_keys=32, num_stages=2, num_warps=8)
    if row_bytes > 256 or has_codes:
        return PrefillTile(num_rows=128, num_keys=64, num_stages=2, num_warps=8)
    if num_row_heads <= FEW_ROW_HEADS:
        return PrefillTile(num_rows=64, num_keys=64, num_stages=3, num_warps=4)
    if not is_fresh:
        return PrefillTile(num_rows=128, num_keys=64, num_stages=3, num_warps=4)
    if max_query_len > LONG_QUERY:
        return PrefillTile(num_rows=128, num_keys=128, num_stages=3, num_warps=8)
    # Short rows: several programs an SM, and tiles of keys as long as a tile's query tokens.
    if group > 2:
        return PrefillTile(num_rows=128, num_keys=32, num_stages=3, num_warps=4)
    return PrefillTile(num_rows=128, num_keys=64, num_stages=3, num_warps=8)


# Keys of a split where sums have a fixed order.
FIXED_SPLIT = 512


def fixed_tile(*, row_bytes: int) -> PrefillTile:
    """For rows of every kind: the same instructions, so that a row gets the same bits."""
    num_keys = 64 if row_bytes <= 256 else 32
    return PrefillTile(num_rows=64, num_keys=num_keys, num_stages=2, num_warps=4)
