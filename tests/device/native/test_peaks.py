"""What the CPU can do at most: measured, and in the right units."""

from __future__ import annotations

import pytest

from pelton.device.native import peaks
from pelton.device.native.library import library


@pytest.fixture
def kernels():
    found = library()
    if found is None:
        pytest.skip("no C kernels on this machine")
    return found


def test_reads(kernels, monkeypatch):
    monkeypatch.setattr(peaks, "_SECONDS", 0.002)
    rates = peaks.read_rates(kernels, (2**16, 2**20 + 64))
    assert list(rates) == [2**16, 2**20 + 64]
    assert all(1e8 < rate < 1e13 for rate in rates.values())


def test_products(kernels, monkeypatch):
    monkeypatch.setattr(peaks, "_SECONDS", 0.002)
    rates = peaks.product_rates(kernels)
    assert "float32" in rates
    assert set(rates) <= set(peaks.KINDS)
    assert ("bf16_tile" in rates) == kernels.has_amx
    assert all(1e8 < rate < 1e15 for rate in rates.values())


def test_operations_of_a_kind(kernels):
    of_one = kernels.functions.pelton_peak_operations
    assert of_one(0) == 32, "16 lanes, a product and a sum"
    assert of_one(1) in (0, 64)
    assert of_one(2) in (0, 2 * 16 * 16 * 32)
    assert of_one(3) == 0
