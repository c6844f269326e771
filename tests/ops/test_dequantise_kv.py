from __future__ import annotations

import numpy as np
import pytest
import torch
from support.codes import CODES, code_values, decoded

from pelton.ops.dequantise_kv import dequantise_kv
from pelton.ops.dequantise_kv.half import dequantise_fp8
from pelton.ops.quantise_kv import quantise_kv

with_each_code = pytest.mark.parametrize("code", CODES)


@with_each_code
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 4), (0, 4), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 16), (3, 7)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 0), (torch.float32, 0), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
    ids=str,
)
def test_against_float64(dtype, tolerance, heads, shape, code):
    """Any leading dimensions; exact where the product has room for it."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(np.prod(shape))
    kv = torch.randn(num_tokens, 2 * heads[0] * heads[1], generator=generator) * 3
    flat = quantise_kv(kv, heads[0], CODES[code])
    rows = flat.view(*shape, flat.shape[1])
    out = dequantise_kv(rows, *heads, CODES[code], dtype)
    assert out.dtype == dtype
    assert out.shape == (*shape, 2, *heads)
    expected, _ = decoded(flat, *heads, CODES[code])
    np.testing.assert_allclose(
        out.double().numpy().reshape(expected.shape), expected, rtol=tolerance, atol=1e-7
    )


@with_each_code
def test_every_code(code):
    rows = torch.cat(
        [
            torch.arange(256, dtype=torch.uint8),
            torch.tensor([1.5, 3.0]).bfloat16().view(torch.uint8),
        ]
    )[None]
    found = dequantise_kv(rows, 1, 128, CODES[code], torch.float32)[0].flatten().numpy()
    plain = torch.arange(256, dtype=torch.uint8).view(CODES[code]).float().numpy()
    expected = plain * np.repeat([1.5, 3.0], 128)
    finite = np.isfinite(expected)
    assert np.array_equal(found[finite], expected[finite])


@with_each_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zero_bytes_are_zeros_and_a_bad_scale_is_nan(dtype, code):
    rows = torch.zeros(2, 4 * (8 + 2), dtype=torch.uint8)
    rows[1] = 255
    out = dequantise_kv(rows, 2, 8, CODES[code], dtype)
    assert (out[0] == 0).all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("code", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_through_float16_bit_for_bit(dtype, code):
    """Every finite code with many scales; one of NaN too."""
    table = code_values(CODES[code])
    finite = torch.arange(256, dtype=torch.uint8)[torch.from_numpy(~np.isnan(table))]
    finite = finite[: len(finite) // 2 * 2]
    scales = torch.tensor([1.0, 3.14, 1e-20, 7e-6, 1e-4, 0.0, 100.0, torch.nan]).bfloat16()
    rows = torch.cat(
        [finite.expand(8, -1), scales[:, None].expand(8, 2).contiguous().view(torch.uint8)], 1
    )
    for given in (rows.view(2, 4, -1), rows[3], rows[:0]):
        args = given, 1, len(finite) // 2, CODES[code], dtype
        expected, found = dequantise_kv(*args), dequantise_fp8(*args)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert torch.equal(found.isnan(), expected.isnan())


@with_each_code
def test_small_scales_survive_in_float16(code):
    """Scales that float16 cannot hold, of numbers that it can."""
    kv = torch.full((1, 8), 2e-6)
    out = dequantise_kv(quantise_kv(kv, 1, CODES[code]), 1, 4, CODES[code], torch.float16)
    np.testing.assert_allclose(out.double().numpy(), 2e-6, rtol=0.05)
