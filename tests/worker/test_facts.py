"""Which GPU is looked at, where several engines share a host."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.worker import facts


@pytest.mark.parametrize(
    ("device", "first", "index"),
    [
        ("cuda", 0, 0),
        ("cuda", 2, 2),
        ("auto", 2, 2),
        ("cuda:1", 0, 1),
        ("cuda:9", 0, 9),  # refused by name
        ("cuda", 9, 3),  # refused with all engines' GPUs in mind
    ],
)
def test_an_engine_looks_at_its_first_gpu(device: str, first: int, index: int, monkeypatch: Any):
    monkeypatch.setattr(facts.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(facts.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(facts, "_cuda_facts", lambda index: index)
    assert facts.device_facts(device, first) == index
