"""The reference against the formula; see test_triton_steps.py for the kernel."""

from __future__ import annotations

import torch

from pelton.ops.rms_norm import rms_norm


def test_rows_are_normed_by_themselves():
    x, weight = torch.randn(3, 10, dtype=torch.float64), torch.rand(10, dtype=torch.float64)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, weight, 0.5, out)
    expected = x / (x.square().mean(1, keepdim=True) + 0.5).sqrt() * weight
    torch.testing.assert_close(out, expected)
