"""Codes and scales against float64, and within the bounds that the contract states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.codes import CODES, code_values, decoded

from pelton.ops.quantise_kv import quantise_kv

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
# Of |x| and of the head's largest number.
BOUNDS = {
    "int8": (0, 1 / 253),
    "float8_e4m3fn": (1 / 16, 2**-18),
    "float8_e5m2": (1 / 8, 2**-31),
}

with_each_code = pytest.mark.parametrize("code", CODES)


def random_kv(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads of very different sizes, with outliers and zeros: [T, 2 * Hk * D]."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens, 2, num_heads, head_dim)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= 10 ** (torch.rand(shape[:3], generator=generator)[..., None] * 6 - 4)
    values[torch.rand(shape, generator=generator) < 0.05] *= 30
    values[torch.rand(shape, generator=generator) < 0.05] = 0
    return values.flatten(1).to(dtype)


@with_each_code
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 2, 16), (1, 1, 1), (3, 2, 7), (17, 3, 24), (33, 1, 64), (9, 8, 80)], ids=str
)
def test_nearest_codes_within_the_bound(shape, dtype, code):
    num_tokens, num_heads, head_dim = shape
    wide = torch.full((num_tokens, 5 + 2 * num_heads * head_dim), torch.nan).to(dtype)
    kv = wide[:, 5:]
    kv.copy_(random_kv(*shape, dtype))
    before = kv.clone()
    rows = quantise_kv(kv, num_heads, CODES[code])
    assert rows.dtype == torch.uint8
    assert rows.shape == (num_tokens, 2 * num_heads * (head_dim + 2))
    assert torch.equal(kv, before)
    if not num_tokens:
        return
    exact = before.double().numpy().reshape(num_tokens, 2, num_heads, head_dim)
    found, scale = decoded(rows, num_heads, head_dim, CODES[code])
    largest = np.abs(exact).max(-1)
    np.testing.assert_allclose(scale, np.maximum(largest / LARGEST[code], 1.2e-38), rtol=2**-8)
    of_number, of_largest = BOUNDS[code]
    error = np.abs(found - exact)
    assert (error <= of_number * np.abs(exact) + of_largest * largest[..., None] + 1e-38).all()
    table = np.sort(code_values(CODES[code])[~np.isnan(code_values(CODES[code]))])
    best = np.abs(exact[..., None] / scale[..., None, None] - table).min(-1) * scale[..., None]
    # float32 arithmetic may take the other of two codes that are as near.
    assert (error <= best * (1 + 1e-5) + 1e-38).all()


def test_the_bound_is_not_loose():
    """Half of it would be broken."""
    for code, (of_number, of_largest) in BOUNDS.items():
        kv = random_kv(200, 2, 64, torch.float32)
        exact = kv.double().numpy().reshape(200, 2, 2, 64)
        found, _ = decoded(quantise_kv(kv, 2, CODES[code]), 2, 64, CODES[code])
        bound = of_number * np.abs(exact) + of_largest * np.abs(exact).max(-1, keepdims=True)
        assert (np.abs(found - exact) > bound / 2).any()


@with_each_code
def test_a_token_does_not_see_its_neighbours(code):
    """Nor a head another head: shards and chunks store the same bytes."""
    kv = random_kv(20, 4, 16, torch.float32)
    rows = quantise_kv(kv, 4, CODES[code])
    for token in range(20):
        assert torch.equal(quantise_kv(kv[token : token + 1], 4, CODES[code])[0], rows[token])
    heads = kv.view(20, 2, 4, 16)
    for first in (0, 2):
        part = heads[:, :, first : first + 2].flatten(1)
        found, scale = decoded(quantise_kv(part, 2, CODES[code]), 2, 16, CODES[code])
        whole, whole_scale = decoded(rows, 4, 16, CODES[code])
        assert np.array_equal(found, whole[:, :, first : first + 2])
        assert np.array_equal(scale, whole_scale[:, :, first : first + 2])


@with_each_code
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes(dtype, code):
    """Zeros, the type's largest and smallest numbers, and one outlier among small ones: no code is
    NaN or infinite, and nothing comes back that is not finite."""
    info = torch.finfo(dtype)
    most = min(info.max, torch.finfo(torch.float32).max / 2)
    heads = torch.tensor(
        [[0.0] * 4, [most, -most, 1, 0], [info.tiny] * 4, [info.smallest_normal, 0, 0, 0]],
        dtype=torch.float64,
    ).to(dtype)
    kv = torch.cat([heads, heads.flip(-1)], 1)
    found, scale = decoded(quantise_kv(kv, 1, CODES[code]), 1, 4, CODES[code])
    assert np.isfinite(found).all()
    assert (scale > 0).all()
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[1, 0, 0, :2], [most, -most], rtol=2**-8)


@with_each_code
def test_no_code_overflows(code):
    """A scale that is rounded down leaves numbers above the largest code."""
    above = 0
    for largest in np.linspace(1, 2, 40):
        kv = torch.tensor([[largest, -largest, 0.3, 0.0]])
        found, scale = decoded(quantise_kv(kv, 1, CODES[code]), 1, 2, CODES[code])
        above += scale[0, 0, 0] * LARGEST[code] < largest
        np.testing.assert_allclose(found[0, 0, 0], [largest, -largest], rtol=1 / 253)
    assert 5 < above < 35


@with_each_code
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(bad, code):
    kv = torch.ones(3, 2 * 2 * 4)
    kv[1, 5] = bad
    found, _ = decoded(quantise_kv(kv, 2, CODES[code]), 2, 4, CODES[code])
    is_bad = np.isnan(found).all(-1)
    assert np.isnan(found).any(-1).tolist() == is_bad.tolist()
    assert is_bad.tolist() == [
        [[False] * 2] * 2,
        [[False, True], [False] * 2],
        [[False] * 2] * 2,
    ]
