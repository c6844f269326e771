"""What a layer needs of the KV cache, as data. No tensors here: the layout is the backend's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's keys and values.

    index: execution order among the layers that touch KV.
    shares: index of the layer whose KV this one reads, or None; writes: whether it stores its own.
    page_bytes: bytes of one block of this layer, on one rank.
    num_kv_heads: heads of this rank (rank of size ranks in `sharding`).
    window: tokens visible to the left of and including the query, for kind "window".
    scale_dtype: element type of quantisation scales, or None.
    lookahead: tokens past the sequence's end that a step may write (drafts).
    """

    index: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    page_bytes: int
    dtype: str
    role: Literal["target", "draft"] = "target"
    kind: Literal["full", "window", "mla", "recurrent", "cross"] = "full"
    shares: int | None = None
    writes: bool = True
    window: int | None = None
    scale_dtype: str | None = None
    sharding: tuple[int, int] = (0, 1)
    lookahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table. block_size in tokens."""

    index: int
    layers: tuple[int, ...]
    block_size: int
    kind: Literal["full", "window", "mla", "recurrent", "cross"] = "full"
    window: int | None = None
