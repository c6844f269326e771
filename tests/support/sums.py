"""What every way of adding rows must do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from pelton.ops.add_rows.reference import add_rows


def check_add_rows(kernel: Any, device: str = "cpu") -> None:
    """The reference's bits, whole and in parts."""
    generator = torch.Generator().manual_seed(1)
    for width in (1, 130, 300):
        x = torch.randn(37, width, generator=generator) * 100
        expected = torch.ones(width)
        add_rows(x, expected)
        for cuts in ((0, 37), (0, 0, 1, 20, 37)):
            total = torch.ones(width, device=device)
            for first, last in pairwise(cuts):
                kernel(x[first:last].to(device), total)
            assert torch.equal(total.cpu(), expected)
