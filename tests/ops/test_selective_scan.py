"""Mamba 2's recurrence: every candidate against a plain loop, in chunks, beside others, states."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support.recurrent import metadata

from pelton.ops.registry import BoundOp, bind
from pelton.ops.selective_scan import CANDIDATES, ScanSignature

ROWS = 5
SHAPES = {"one group": (4, 3, 1, 5), "two groups": (6, 8, 2, 16), "all groups": (3, 1, 3, 2)}
BY_NAME = {one.name: (one,) for one in CANDIDATES if one.name != "triton"}
NO_LIMITS = (0.0, math.inf)


def make(
    candidate: str,
    shape: str = "two groups",
    dtype: torch.dtype = torch.float64,
    limits: tuple[float, float] = NO_LIMITS,
) -> tuple[BoundOp, dict[str, torch.Tensor], ScanSignature]:
    heads, head_dim, groups, size = SHAPES[shape]
    signature = ScanSignature(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size,
        dt_limits=limits,
        dtype=dtype,
        device_type="cpu",
        batch_invariant=candidate == "reference",
    )
    generator = torch.Generator().manual_seed(2)
    weights = {
        "a_log": torch.rand(heads, generator=generator, dtype=torch.float64) * 3,
        "d": torch.randn(heads, generator=generator, dtype=torch.float64),
        "dt_bias": torch.randn(heads, generator=generator, dtype=torch.float64) - 1,
    }
    return bind("selective_scan", BY_NAME[candidate], signature, **weights), weights, signature


def inputs_of(signature: ScanSignature, length: int, seed: int = 0) -> list[torch.Tensor]:
    """x, dt, b, c as parts of wider products."""
    generator = torch.Generator().manual_seed(seed)
    grouped = signature.num_groups * signature.state_size
    widths = (signature.num_heads * signature.head_dim, signature.num_heads, grouped, grouped)
    return [
        torch.randn(length, width + 3, generator=generator, dtype=torch.float64).to(
            signature.dtype
        )[:, :width]
        for width in widths
    ]


def expected_of(
    inputs: list[torch.Tensor], weights: dict[str, torch.Tensor], signature: ScanSignature
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, number by number: out [n, H * P] and the states after each token."""
    x, dt, b, c = (t.double() for t in inputs)
    heads, head_dim = signature.num_heads, signature.head_dim
    groups, size = signature.num_groups, signature.state_size
    length = len(x)
    out = torch.empty(length, heads, head_dim, dtype=torch.float64)
    states = torch.empty(length, heads, head_dim, size, dtype=torch.float64)
    for h in range(heads):
        g = h * groups // heads
        state = torch.zeros(head_dim, size, dtype=torch.float64)
        for t in range(length):
            step = math.log1p(math.exp(dt[t, h] + weights["dt_bias"][h]))
            step = min(max(step, signature.dt_limits[0]), signature.dt_limits[1])
            decay = math.exp(-math.exp(weights["a_log"][h]) * step)
            value = x[t, h * head_dim : (h + 1) * head_dim]
            key = b[t, g * size : (g + 1) * size]
            state = decay * state + step * torch.outer(value, key)
            query = c[t, g * size : (g + 1) * size]
            out[t, h] = state @ query + weights["d"][h] * value
            states[t, h] = state
    return out.flatten(1), states


def run(
    kernel: BoundOp,
    inputs: list[torch.Tensor],
    states: torch.Tensor,
    rows: list[tuple[int, int, int]],
    **options: Any,
) -> torch.Tensor:
    ring = states.shape[1]
    out = torch.full(inputs[0].shape, torch.nan, dtype=inputs[0].dtype)
    kernel(len(out), *inputs, states, metadata(rows, ring=ring, **options), out)
    return out


def empty_states(signature: ScanSignature, ring: int = 1) -> torch.Tensor:
    shape = (signature.num_heads, signature.head_dim, signature.state_size)
    dtype = torch.promote_types(signature.dtype, torch.float32)
    return torch.full((ROWS, ring, *shape), torch.nan, dtype=dtype)


@pytest.mark.parametrize("candidate", BY_NAME)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limits", [NO_LIMITS, (0.2, 0.9)])
def test_equals_a_plain_loop(limits, shape, candidate):
    """Lengths around the chunk's; two rows of one length; padding."""
    kernel, weights, signature = make(candidate, shape, limits=limits)
    lengths = (1, 9, 9, 63) if shape != "two groups" else (7, 64, 65, 130)
    inputs = inputs_of(signature, sum(lengths) + 2)
    states = empty_states(signature)
    rows = [(slot, 0, n) for slot, n in enumerate(lengths)]
    out = run(kernel, inputs, states, rows, num_padding=2, pad_slot=4)
    start = 0
    for slot, n in enumerate(lengths):
        part = slice(start, start + n)
        expected, after = expected_of([t[part] for t in inputs], weights, signature)
        torch.testing.assert_close(out[part], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(states[slot, 0], after[-1], rtol=1e-10, atol=1e-10)
        start += n
    assert not out[start:].any()
    assert states[4].isnan().all()


@pytest.mark.parametrize("candidate", BY_NAME)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision(dtype, tolerance, candidate):
    kernel, weights, signature = make(candidate, dtype=dtype)
    inputs = inputs_of(signature, 100)
    expected, _ = expected_of(inputs, weights, signature)
    out = run(kernel, inputs, empty_states(signature), [(0, 0, 100)])
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("candidate", BY_NAME)
def test_strong_decay_beside_weak(candidate):
    """Sums of log decays reach thousands, and differences of a thousandth count."""
    kernel, weights, signature = make(candidate, dtype=torch.float32)
    inputs = inputs_of(signature, 64)
    inputs[1][:] = -6.0
    inputs[1][10:20] = 60.0
    expected, _ = expected_of(inputs, weights, signature)
    out = run(kernel, inputs, empty_states(signature), [(0, 0, 64)])
    scale = float(expected[20:].abs().max())
    torch.testing.assert_close(out[20:] / scale, expected[20:].float() / scale, rtol=0, atol=3e-6)


@pytest.mark.parametrize("candidate", BY_NAME)
@pytest.mark.parametrize("ring", [1, 3])
def test_chunks_and_company(ring, candidate):
    """The reference bit for bit. The ring holds the states after the last positions."""
    kernel, weights, signature = make(candidate, dtype=torch.float32)
    length = 41
    inputs, other = inputs_of(signature, length), inputs_of(signature, 6, seed=1)
    _, after = expected_of(inputs, weights, signature)

    def one(cuts: list[int], with_other: bool) -> tuple[torch.Tensor, torch.Tensor]:
        states, outs = empty_states(signature, ring), []
        for first, last in itertools.pairwise(cuts):
            rows, tokens = [(2, first, last - first)], [t[first:last] for t in inputs]
            if with_other:
                rows = [(1, 0, 3), *rows, (0, 0, 3)]
                tokens = [torch.cat([o[:3], t, o[3:]]) for t, o in zip(tokens, other)]
            out = run(kernel, tokens, states, rows)
            outs.append(out[3:-3] if with_other else out)
        return torch.cat(outs), states[2]

    whole, states = one([0, length], False)
    for back in range(ring):
        position = length - 1 - back
        torch.testing.assert_close(
            states[position % ring].double(), after[position], rtol=1e-4, atol=1e-5
        )
    for cuts in ([0, 1, 2, length], [*range(length), length], [0, 3, 20, length]):
        for with_other in (False, True):
            out, found = one(cuts, with_other)
            torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-4)
            if candidate == "reference":
                assert torch.equal(out, whole)
                assert torch.equal(found, states)


@pytest.mark.parametrize("candidate", BY_NAME)
def test_rejected_drafts_leave_no_trace(candidate):
    """Steps of 1 + 3 tokens of which only some are right; each starts at the true position."""
    kernel, weights, signature = make(candidate)
    inputs = inputs_of(signature, 31)
    expected, _ = expected_of(inputs, weights, signature)
    states = empty_states(signature, ring=4)
    position = 0
    steps = ((16, 16), (4, 1), (4, 2), (3, 3), (4, 4), (1, 1), (2, 1), (4, 3))
    for number, (length, num_right) in enumerate(steps):
        tokens = [t.clone() for t in inputs_of(signature, length, seed=100 + number)]
        end = position + num_right
        for token, t in zip(tokens, inputs):
            token[:num_right] = t[position:end]
        out = run(kernel, tokens, states, [(3, position, length)])
        torch.testing.assert_close(out[:num_right], expected[position:end], rtol=1e-9, atol=1e-9)
        position = end
    assert position == 31


def test_batch_invariance_takes_the_reference():
    *_, signature = make("reference")
    weights = {name: torch.zeros(6) for name in ("a_log", "d", "dt_bias")}
    assert bind("selective_scan", CANDIDATES, signature, **weights).names == ("reference",)


@pytest.mark.parametrize("candidate", BY_NAME)
def test_no_tokens(candidate):
    kernel, _, signature = make(candidate)
    states = empty_states(signature)
    run(kernel, inputs_of(signature, 0), states, [], num_padding=1)
    assert states.isnan().all()
