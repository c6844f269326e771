"""Random weights follow from name and position alone, on every device."""

from __future__ import annotations

import pytest
import torch

from pelton.weights.dummy import DummySource

WORD = 2**32


def source(device: str = "cpu", seed: int = 0) -> DummySource:
    made = DummySource.__new__(DummySource)
    made._seed, made._device = seed, torch.device(device)
    return made


def test_values_are_uniform_and_their_own():
    values = source()._values("a", 0, 1 << 18)
    assert float(values.mean()) == pytest.approx(0, abs=2e-4)
    assert float(values.std()) == pytest.approx(0.02, rel=1e-2)
    assert float(values.abs().max()) == pytest.approx(0.02 * 3**0.5, rel=1e-3)
    others = [
        values[1:],
        source()._values("b", 0, 1 << 18)[:-1],
        source(seed=1)._values("a", 1, (1 << 18) - 1),
    ]
    for other in others:
        pair = torch.stack([values[: len(other)], other])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.01


@pytest.mark.parametrize("start", [0, 1, 12345, WORD - 7, WORD, 3 * WORD - 1])
def test_any_cut_is_the_same(start):
    whole = source()._values("a", start, 40)
    assert len(set(whole.tolist())) > 35
    for first, last in ((0, 1), (3, 20), (6, 8), (39, 40)):
        assert torch.equal(source()._values("a", start + first, last - first), whole[first:last])


@pytest.mark.gpu
def test_a_gpu_makes_the_same():
    for start in (0, WORD - 7):
        gpu = source("cuda")._values("a", start, 1000)
        assert torch.equal(gpu.cpu(), source()._values("a", start, 1000))
