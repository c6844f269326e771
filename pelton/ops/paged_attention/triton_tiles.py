"""Tiles and splits of the Triton kernels of attention, as measured on an H200 in bfloat16 with
heads of 128: the fastest of about 60 for each number of rows."""

from __future__ import annotations

from dataclasses import dataclass

# Keys up to which rows count as short when nothing else fills the GPU.
_SHORT = 2048
# Keys of a split where rows alone fill the GPU: it evens out rows of unequal length, and rows of
# common lengths are not split.
_LONG_SPLIT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """num_keys: of a tile. splits: the most of a row, of at least min_split keys each. chunk: how
    many are merged at once. is_early: the first tile is loaded before the query is known, which
    hides its latency and costs registers."""

    splits: int
    min_split: int
    num_keys: int
    num_stages: int
    num_warps: int
    chunk: int
    is_early: bool


def decode_tile(
    *, row_heads: int, max_seq_len: int, tile_rows: int, row_bytes: int, most_programs: int
) -> DecodeTile:
    """row_heads: rows times key heads. tile_rows: query rows of a tile. row_bytes: of a key.
    most_programs: whose partial results there is memory for."""
    splits, min_split = 8, _LONG_SPLIT
    num_keys, num_stages, num_warps, is_early = 128, 3, 4, True
    if row_heads <= 16 and max_seq_len <= _SHORT:
        splits, min_split, num_keys, num_warps = 16, 32, 32, 2
    elif row_heads <= 160:
        splits, min_split = min(max(256 // row_heads, 4), 32), 128
    elif row_heads > 768:
        num_keys, num_warps, is_early = 32, 2, False
    elif row_heads > 384:
        num_keys, num_stages = 32, 5
    if tile_rows > 16:
        num_keys, num_stages, num_warps, is_early = 64, 3, 4, False
    if row_bytes > 256:
        num_keys = max(num_keys * 256 // row_bytes, 16)
    splits = min(splits, most_programs // row_heads)
    if splits <= 1:
        splits = 1
    return DecodeTile(
        splits=splits,
        min_split=max(min_split, num_keys),
        num_keys=num_keys,
        num_stages=num_stages,
        num_warps=num_warps,
        chunk=4 if min_split == _LONG_SPLIT else 8,
        is_early=is_early,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """num_rows: query tokens times heads of a key head. num_keys: of a tile."""

    num_rows: int
    num_keys: int
    num_stages: int
    num_warps: int


def prefill_tile(*, row_bytes: int, is_float: bool) -> PrefillTile:
    if is_float:
        return PrefillTile(num_rows=64, num_keys=32, num_stages=2, num_warps=8)
    if row_bytes <= 256:
        return PrefillTile(num_rows=128, num_keys=128, num_stages=3, num_warps=8)
    return PrefillTile(num_rows=128, num_keys=64, num_stages=2, num_warps=8)


# Where sums have a fixed order these serve rows of every kind: the same instructions, so that a row
# gets the same bits. Its splits have FIXED_SPLIT keys.
FIXED_SPLIT = 512
FIXED = PrefillTile(num_rows=64, num_keys=32, num_stages=2, num_warps=4)
