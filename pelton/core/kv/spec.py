"""What a layer needs of the KV cache, as data. No tensors here: the layout is the backend's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pelton.config.model import Mamba2Config

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
# Types of one byte hold codes: a scale for each head of each token stands beside them.
_SCALE_DTYPE = "bfloat16"
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """What a recurrent layer remembers of a sequence after a position, on one rank.

    ssm: the state that the recurrence multiplies and adds to. conv: the last inputs of the
    convolution before it. Their bytes lie one behind the other, ssm first.
    """

    ssm_shape: tuple[int, ...]
    ssm_dtype: str
    conv_shape: tuple[int, ...]
    conv_dtype: str

    @property
    def ssm_bytes(self) -> int:
        return math.prod(self.ssm_shape) * _DTYPE_BYTES[self.ssm_dtype]

    @property
    def conv_bytes(self) -> int:
        return math.prod(self.conv_shape) * _DTYPE_BYTES[self.conv_dtype]

    @property
    def state_bytes(self) -> int:
        """Of both, rounded up so that states may lie one behind the other."""
        return -(-(self.ssm_bytes + self.conv_bytes) // _ALIGNMENT) * _ALIGNMENT


def mamba2_state(config: Mamba2Config, dtype: str, *, num_ranks: int = 1) -> RecurrentSpec:
    """On one of num_ranks ranks; the recurrence counts in float32, or float64 for float64. With
    fewer groups than ranks a group stands on several."""
    num_heads = config.num_heads // num_ranks
    num_groups = max(config.num_groups // num_ranks, 1)
    channels = num_heads * config.head_dim + 2 * num_groups * config.state_size
    return RecurrentSpec(
        ssm_shape=(num_heads, config.head_dim, config.state_size),
        ssm_dtype="float64" if dtype == "float64" else "float32",
        conv_shape=(config.conv_width - 1, channels),
        conv_dtype=dtype,
    )


def scale_dtype_of(dtype: str) -> str | None:
    """Element type of the scales beside keys and values of `dtype`, or None."""
    return _SCALE_DTYPE if _DTYPE_BYTES[dtype] == 1 else None


def page_bytes_of(dtype: str, *, block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one block of one layer's keys and values, scales included."""
    scale = scale_dtype_of(dtype)
    head = head_dim * _DTYPE_BYTES[dtype] + (0 if scale is None else _DTYPE_BYTES[scale])
    return 2 * block_size * num_kv_heads * head


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
    recurrent: what a layer of kind "recurrent" remembers; it has no heads, and a head_dim of 0.
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
    recurrent: RecurrentSpec | None = None

    @property
    def state_bytes(self) -> int:
        """Of one state of a recurrent layer; 0 for others."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table. block_size in tokens.

    Kind "recurrent" has no table: a row's state is not in the pool. What lies there are
    checkpoints, copies of it after every block_size tokens, each in `pages` blocks.
    """

    index: int
    layers: tuple[int, ...]
    block_size: int
    kind: Literal["full", "window", "mla", "recurrent", "cross"] = "full"
    window: int | None = None
    pages: int = 1

    @property
    def has_table(self) -> bool:
        return self.kind != "recurrent"
