"""MXFP4, bit for bit as transformers reads it."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pelton.errors import CheckpointError
from pelton.weights.mxfp4 import dequantise
from pelton.weights.safetensors import SafetensorsSource


def random_blocks(*shape: int, low: int = 0, high: int = 255) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_and_scale_equals_transformers(dtype):
    """In float32 and in bfloat16, which hold all values alike; signs of zeros too."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    actual = dequantise(blocks, scales).to(dtype).transpose(1, 2).contiguous()
    assert torch.equal(as_bits(actual), as_bits(expected))


def test_random_blocks_equal_transformers():
    blocks, scales = random_blocks(3, 10, 2)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    actual = dequantise(blocks, scales).bfloat16()
    assert torch.equal(as_bits(actual.transpose(1, 2).contiguous()), as_bits(expected))


def test_the_scale_that_means_nan():
    blocks, _ = random_blocks(1)
    assert dequantise(blocks, torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_a_pair_is_one_tensor_under_its_blocks_name(tmp_path):
    blocks, scales = random_blocks(3, 10, 2)
    plain = torch.randn(4, 5)
    path = tmp_path / "a.safetensors"
    save_file({"x_blocks": blocks, "x_scales": scales, "y": plain, "y_scales": plain.clone()}, path)
    source = SafetensorsSource([path])
    assert sorted(source.names()) == ["x_blocks", "y", "y_scales"]
    assert source.shape("x_blocks") == (3, 10, 64)
    whole = dequantise(blocks, scales)
    for dim, start, size in ((0, 1, 2), (1, 3, 5), (2, 7, 41), (2, 32, 32)):
        cut = source.read("x_blocks", dim, start, size)
        assert torch.equal(cut, whole.narrow(dim, start, size))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x_scales": None}, "'x_blocks' has no 'x_scales' beside it"),
        ({"x_scales": torch.zeros(3, 10, 3, dtype=torch.uint8)}, "are not MXFP4 blocks"),
        ({"x_scales": torch.zeros(3, 10, 2)}, "'x_scales' of F32"),
        ({"x_blocks": torch.zeros(3, 10, 2, 8, dtype=torch.uint8)}, "are not MXFP4 blocks"),
    ],
)
def test_halves_that_do_not_fit(tmp_path, change, says):
    blocks, scales = random_blocks(3, 10, 2)
    tensors = {"x_blocks": blocks, "x_scales": scales, **change}
    path = tmp_path / "a.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError, match=re.escape(says)):
        SafetensorsSource([path])
