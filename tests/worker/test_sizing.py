"""The KV cache takes what is left, on a device that counts its memory."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny import checkpoint_of, make_config, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.core.kv.host_pages import MoveCosts
from pelton.device.cpu import CPUDevice
from pelton.errors import ConfigError
from pelton.worker import sizing
from pelton.worker.worker import Worker

GRAPHS = GraphsConfig(decode_sizes=(1, 2, 4), token_sizes=(16, 64))
OTHERS = 1_000_000


class CountingDevice(CPUDevice):
    """Counts what is allocated through it and not freed. A recording costs 10,000 bytes."""

    records_when_asked = False

    def __init__(self, total: int) -> None:
        self.total, self.used, self.most = total, OTHERS, OTHERS
        super().__init__(1)  # its probe allocates, too

    def _count(self, tensor: torch.Tensor, num_bytes: int) -> None:
        def free() -> None:
            self.used -= num_bytes

        self.used += num_bytes
        self.most = max(self.most, self.used)
        weakref.finalize(tensor, free)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().zeros(shape, dtype)
        self._count(tensor, tensor.nbytes)
        return tensor

    empty = zeros

    def record(self, run: Any) -> Any:
        recording = super().record(run)
        self._count(recording, 10_000)  # type: ignore[arg-type]
        return recording

    def memory(self) -> tuple[int, int]:
        return self.used, self.total

    def release_cached(self) -> None:
        return None


def worker_on(total: int, share: float = 0.9, **changes: Any) -> tuple[Worker, CountingDevice]:
    device = CountingDevice(total)
    config = make_config(tiny_llama(), attention_backend="invariant", graphs=GRAPHS, **changes)
    cache = replace(config.cache, memory_share=share)
    worker = Worker(
        replace(config, cache=cache),
        checkpoint_of(tiny_llama()),
        device=device,
        move_costs=MoveCosts(),
    )
    return worker, device


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    from pelton.attention.invariant_backend import InvariantBackend

    monkeypatch.setattr(InvariantBackend, "refreshes_in_place", True)
    monkeypatch.setattr(sizing, "_SLACK_BYTES", 50_000)


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_everything_together_keeps_to_the_share(share):
    worker, device = worker_on(12_000_000, share, num_blocks=100_000)
    allowed = share * device.total
    assert worker.config.cache.num_blocks < 100_000
    assert device.most <= allowed
    # No more is left over than the slack, a block, and what the probe had twice.
    assert device.used > allowed - 400_000
    table = worker.config.memory
    assert table is not None
    assert table.others == OTHERS
    assert table.graphs >= 10_000 * len(worker._assembled.executor._steps)
    assert table.kv == worker._assembled.kv_bytes
    assert 0 <= table.free - (device.total - allowed) < 400_000


def test_no_more_than_can_be_used():
    worker, _ = worker_on(10**9, num_blocks=64)
    assert worker.config.cache.num_blocks == 64


def test_too_little_names_flags_and_values_that_work():
    with pytest.raises(ConfigError) as caught:
        worker_on(12_000_000, 0.12, num_blocks=100_000)
    text = str(caught.value)
    found = re.search(r"raise gpu_memory_utilization to (0\.\d+)", text)
    assert found, text
    assert "lower max_num_batched_tokens" in text
    worker, _ = worker_on(12_000_000, float(found[1]), num_blocks=100_000)
    assert (worker.config.cache.num_blocks - 1) * 4 >= worker.config.max_model_len
