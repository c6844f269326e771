from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.rope import rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 16, 24])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 17])
def test_against_complex_rotation(num_tokens, rotary_dim, dtype):
    """Pair (i, i + half) of a head is a complex number, turned by position * frequency i."""
    torch.manual_seed(0)
    head_dim, half = 24, rotary_dim // 2
    # Queries and keys lie side by side with values in one product's output: strided views.
    qkv = torch.randn(num_tokens, 7, head_dim).to(dtype)
    position = torch.randint(0, 500, (num_tokens,))
    angle = position[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    heads = qkv[:, :5]
    before = qkv.clone()
    pairs = before[:, :5].double().numpy()
    turned = (pairs[..., :half] + 1j * pairs[..., half:rotary_dim]) * (
        cos.double().numpy() + 1j * sin.double().numpy()
    )[:, None]
    rope(heads, torch.cat([cos, cos], -1)[:, None], sin[:, None])
    expected = np.concatenate([turned.real, turned.imag, pairs[..., rotary_dim:]], -1)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    np.testing.assert_allclose(heads.double().numpy(), expected, rtol=0, atol=tolerance)
    assert torch.equal(qkv[:, 5:], before[:, 5:]), "values are not rotated"


def test_a_token_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    heads, cos, sin = torch.randn(9, 3, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 8)
    alone = heads[4:5].clone()
    rope(alone, cos[4:5], sin[4:5])
    rope(heads, cos, sin)
    assert torch.equal(alone, heads[4:5])
