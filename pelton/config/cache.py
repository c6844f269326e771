"""The KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """`num_blocks` counts every block of the pool, the null block included; `block_size` is in
    tokens; `dtype` is the element type of keys and values: the engine's, or what they are quantised
    to ("float8_e4m3fn", "float8_e5m2", "int8"). `checkpoint_interval`: after how many tokens, each
    time, recurrent state is kept for prefix hits; 0: never.
    `num_host_pages`: how many blocks of preempted requests host memory may hold; 0: what they had
    is computed again.
    `memory_share`: of the device's memory that everything together may use; num_blocks is then the
    most, and the worker takes what it finds left. None: num_blocks is given."""

    block_size: int
    num_blocks: int
    dtype: str
    enable_prefix_caching: bool = True
    checkpoint_interval: int = 0
    num_host_pages: int = 0
    memory_share: float | None = None
