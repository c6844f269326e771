"""The convolution before a recurrence: tokens alone, in chunks, beside others, and its states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recurrent import metadata

from pelton.ops import causal_conv
from pelton.ops.causal_conv import ConvSignature
from pelton.ops.registry import bind

ROWS = 5


def kernel_of(channels: int, width: int, dtype: torch.dtype, *, bias: bool, exact: bool = False):
    generator = torch.Generator().manual_seed(1)
    signature = ConvSignature(
        channels=channels, width=width, dtype=dtype, device_type="cpu", batch_invariant=exact
    )
    weights: dict[str, Any] = {
        "weight": torch.randn(channels, width, generator=generator, dtype=torch.float64).to(dtype)
    }
    if bias:
        weights["bias"] = torch.randn(channels, generator=generator, dtype=torch.float64).to(dtype)
    return bind("causal_conv", causal_conv.CANDIDATES, signature, **weights), weights


def expected_of(x: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    """torch's own convolution of a whole sequence [n, C], in float64."""
    weight = weights["weight"].double()
    bias = weights["bias"].double() if "bias" in weights else None
    padded = F.pad(x.double().t()[None], (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))[0].t()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(5, 2), (33, 4), (8, 3)])
def test_whole_sequences_equal_torch(channels, width, bias, dtype, tolerance):
    kernel, weights = kernel_of(channels, width, dtype, bias=bias)
    lengths = (1, 2, 2, 9)
    meta = metadata([(slot, 0, n) for slot, n in enumerate(lengths)], num_padding=2, pad_slot=4)
    # A part of a wider product, as in the layer; three padding tokens.
    x = torch.randn(sum(lengths) + 3, channels + 6).to(dtype)[:, 2 : 2 + channels]
    states = torch.full((ROWS, 1, width - 1, channels), torch.nan, dtype=dtype)
    out = torch.full((len(x), channels), torch.nan, dtype=dtype)
    kernel(len(x), x, states, meta, out)
    start = 0
    for slot, n in enumerate(lengths):
        rows = slice(start, start + n)
        expected = expected_of(x[rows], weights)
        torch.testing.assert_close(out[rows].double(), expected, rtol=tolerance, atol=tolerance)
        last = F.pad(x[rows], (0, 0, width - 1, 0))[-(width - 1) :]
        assert torch.equal(states[slot, 0], last)
        start += n
    assert not out[start:].any()
    assert states[4].isnan().all()


@pytest.mark.parametrize("exact", [True, False])
def test_chunks_and_company_change_nothing(exact):
    """Bit for bit with batch_invariant; at the end the same states."""
    channels, width, length = 13, 4, 23
    kernel, _ = kernel_of(channels, width, torch.float32, bias=True, exact=exact)
    x = torch.randn(length, channels)
    other = torch.randn(3, channels)

    def run(cuts: list[int], with_other: bool) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.full((ROWS, 3, width - 1, channels), torch.nan)
        outs = []
        for first, last in itertools.pairwise(cuts):
            rows = [(2, first, last - first)]
            tokens = x[first:last]
            if with_other:
                rows = [(1, 0, 3), *rows, (0, 0, 3)]
                tokens = torch.cat([other, tokens, other])
            out = torch.empty(len(tokens), channels)
            kernel(len(tokens), tokens, states, metadata(rows, ring=3), out)
            outs.append(out[3:-3] if with_other else out)
        return torch.cat(outs), states[2]

    whole, states = run([0, length], False)
    for cuts in ([0, 1, 2, length], [*range(length), length], [0, 3, 7, 20, length]):
        for with_other in (False, True):
            out, found = run(cuts, with_other)
            assert torch.equal(found, states)
            if exact:
                assert torch.equal(out, whole)
            torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-6)


def test_rejected_drafts_leave_no_trace():
    """Steps of 1 + 3 tokens of which only some are right; each starts at the true position."""
    channels, width, ring = 6, 4, 4
    kernel, weights = kernel_of(channels, width, torch.float64, bias=True)
    x = torch.randn(20, channels, dtype=torch.float64)
    expected = expected_of(x, weights)
    states = torch.full((ROWS, ring, width - 1, channels), torch.nan, dtype=torch.float64)
    position = 0
    for length, num_right in ((5, 5), (4, 1), (4, 2), (3, 3), (4, 4), (1, 1), (2, 1), (4, 3)):
        tokens = torch.randn(length, channels, dtype=torch.float64)
        tokens[:num_right] = x[position : position + num_right]
        out = torch.empty(length, channels, dtype=torch.float64)
        kernel(length, tokens, states, metadata([(3, position, length)], ring=ring), out)
        end = position + num_right
        torch.testing.assert_close(out[:num_right], expected[position:end], rtol=1e-12, atol=1e-12)
        position = end
    assert position == 20


def test_no_tokens():
    kernel, _ = kernel_of(3, 4, torch.float32, bias=False)
    states = torch.full((ROWS, 1, 3, 3), torch.nan)
    out = torch.empty(0, 3)
    kernel(0, torch.empty(0, 3), states, metadata([], num_padding=1), out)
    assert states.isnan().all()
