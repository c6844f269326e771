"""A machine that is dealt out to several engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pelton.config.engine import EngineArgs
from pelton.config.hardware import DeviceFacts
from pelton.errors import ConfigError
from pelton.setup.shares import share_of

FACTS = DeviceFacts(
    kind="cpu",
    name="a chip",
    total_bytes=900,
    free_bytes=301,
    num_cores=7,
    fast_bf16=True,
    fast_fp16=False,
)
GPUS = replace(FACTS, kind="cuda", num_devices=8, num_cores=32, host_free_bytes=1000)


def args(num_replicas: int, **changes: int) -> EngineArgs:
    return EngineArgs(data_parallel_size=num_replicas, **changes)  # type: ignore[arg-type]


def test_a_cpu_is_dealt_out_in_equal_parts():
    share = share_of(FACTS, args(3))
    assert (share.num_cores, share.total_bytes, share.free_bytes) == (2, 300, 100)
    assert FACTS.name in share.name
    assert share_of(FACTS, args(8)).num_cores == 1


def test_gpus_are_dealt_out_whole():
    share = share_of(GPUS, args(4, tensor_parallel_size=2))
    assert (share.num_devices, share.num_cores, share.host_free_bytes) == (2, 8, 250)
    assert (share.total_bytes, share.free_bytes) == (GPUS.total_bytes, GPUS.free_bytes)
    with pytest.raises(ConfigError, match=r"needs 9 GPUs and there are 8"):
        share_of(GPUS, args(9))
    with pytest.raises(ConfigError, match=r"needs 12 GPUs, 4 for each engine, and there are 8"):
        share_of(GPUS, args(3, tensor_parallel_size=2, pipeline_parallel_size=2))
