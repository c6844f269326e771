"""The recurrent ops in Triton: on a GPU, and a few sizes in the interpreter."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted
from support.triton_recurrent import (
    FEW,
    MANY,
    SINGLE,
    TOLERANCE,
    check_conv,
    check_fixed_scan,
    check_gated_norm,
    check_scan,
)

DTYPES = list(TOLERANCE)


@needs_triton
def test_in_the_interpreter():
    run_interpreted("triton_recurrent")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ring", [1, 2, 5])
@pytest.mark.parametrize("rows", [SINGLE, FEW, MANY], ids=["single", "few", "many"])
def test_convolution(rows, ring, dtype):
    for channels, width, has_bias in ((37, 4, True), (256, 2, False), (1000, 3, True)):
        for num_padding in (0, 3):
            check_conv(
                rows, channels=channels, width=width, ring=ring, has_bias=has_bias,
                num_padding=num_padding, dtype=dtype, device="cuda",
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ring", [1, 4])
@pytest.mark.parametrize("rows", [SINGLE, FEW, MANY], ids=["single", "few", "many"])
@pytest.mark.parametrize("shape", [(4, 24, 2, 40), (3, 64, 1, 128), (6, 3, 6, 2)], ids=str)
def test_scan(shape, rows, ring, dtype):
    for num_padding in (0, 3):
        check_scan(
            rows, shape=shape, ring=ring, num_padding=num_padding, dtype=dtype, device="cuda"
        )
    check_scan(rows, shape=shape, ring=ring, dtype=dtype, device="cuda", dt_limits=(0.2, 0.9))
    check_scan(rows, shape=shape, ring=ring, dtype=dtype, device="cuda", batch_invariant=True)


@pytest.mark.gpu
def test_strong_decay_beside_weak():
    check_scan([(3, 0, 64)], shape=(2, 64, 1, 128), strong=True, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ring", [1, 3])
def test_fixed_scan_gives_a_token_the_same_bits_everywhere(ring, dtype):
    check_fixed_scan(length=130, ring=ring, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm(dtype):
    for num_rows, groups, size in ((0, 1, 4), (3, 1, 50), (2, 3, 17), (70, 1, 3072), (5, 8, 1024)):
        check_gated_norm(num_rows, groups, size, dtype, device="cuda")


@pytest.mark.gpu
def test_a_row_of_a_convolution_has_the_same_bits_in_either_kernel():
    """A token that is its row's only one, and the same token of a longer row."""
    from support.recurrent import metadata
    from support.triton_recurrent import on

    from pelton.ops.causal_conv import ConvSignature
    from pelton.ops.causal_conv.triton import causal_conv

    torch.manual_seed(0)
    signature = ConvSignature(channels=300, width=4, dtype=torch.bfloat16, device_type="cuda")
    weight, bias = torch.randn(300, 4, device="cuda"), torch.randn(300, device="cuda")
    kernel = causal_conv(signature, weight.bfloat16(), bias.bfloat16())
    x = torch.randn(50, 300, device="cuda").bfloat16()
    whole, out = torch.empty(2, 50, 300, device="cuda").bfloat16()
    states = torch.full((2, 1, 3, 300), torch.nan, device="cuda").bfloat16()
    kernel(x, states, on("cuda", metadata([(0, 0, 50)])), whole)
    for t in range(50):
        kernel(x[t : t + 1], states, on("cuda", metadata([(1, t, 1)])), out[t : t + 1])
    assert torch.equal(out, whole)
    assert torch.equal(states[0], states[1])
