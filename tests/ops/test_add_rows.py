"""A running sum does not depend on how its rows were cut into calls."""

from __future__ import annotations

import pytest
import torch

from pelton.ops.add_rows import add_rows


@pytest.mark.parametrize("width", [1, 7, 48, 1000])
@pytest.mark.parametrize("cut", [0, 1, 16, 31, 100])
def test_any_cut_gives_the_same_bits(cut, width):
    x = torch.randn(100, width, generator=torch.Generator().manual_seed(1)) * 100
    whole, parts = torch.zeros(width), torch.zeros(width)
    add_rows(x, whole)
    add_rows(x[:cut], parts)
    add_rows(x[cut:], parts)
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole, x.double().sum(0).float(), rtol=1e-4, atol=1e-2)


def test_it_adds_to_what_is_there():
    total = torch.full((3,), 5.0)
    add_rows(torch.tensor([[1.0, 2.0, 3.0]]), total)
    assert total.tolist() == [6.0, 7.0, 8.0]
    add_rows(torch.zeros(0, 3), total)
    assert total.tolist() == [6.0, 7.0, 8.0]
