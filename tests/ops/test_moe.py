"""Every candidate of moe against float64, token by token; the tiled one bit for bit whatever stands
around a token."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support.moe import BIASED, CASES, PLAIN, exact, weights_of

from pelton.errors import UnsupportedError
from pelton.ops import moe
from pelton.ops.moe import MoESignature
from pelton.ops.product import INVARIANT_TILE
from pelton.ops.registry import bind

NAMES = ["reference", "sorted", "tiled"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def kernel_of(name: str, signature: MoESignature, weights: dict[str, torch.Tensor]) -> Any:
    candidate = next(c for c in moe.CANDIDATES if c.name == name)
    return candidate.load()(signature, **weights)


def run(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    before, out = x.clone(), torch.full_like(x, torch.nan)
    kernel(x, out)
    assert torch.equal(x.nan_to_num(), before.nan_to_num()), "the input is not changed"
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, case, dtype):
    signature = replace(PLAIN, dtype=dtype, **CASES[case])
    weights = weights_of(signature)
    kernel = kernel_of(name, signature, weights)
    for num_rows in (0, 1, 2, INVARIANT_TILE - 1, INVARIANT_TILE + 1, 61):
        x = torch.randn(num_rows, signature.hidden_size).to(dtype)
        out, expected = run(kernel, x), exact(signature, weights, x)
        assert out.dtype == dtype
        if num_rows:
            size = max(np.abs(expected).max(), 1.0)
            error = np.abs(out.double().numpy() - expected).max() / size
            assert error <= TOLERANCE[dtype], num_rows


@pytest.mark.parametrize("name", NAMES)
def test_of_equal_logits_the_lower_expert_is_chosen(name):
    signature = replace(PLAIN, num_experts=40, top_k=5)
    weights = weights_of(signature)
    weights["router"][:] = weights["router"][7]
    x = torch.randn(20, signature.hidden_size)
    expected = exact(signature, weights, x)
    out = run(kernel_of(name, signature, weights), x)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_spoilt_token_hurts_itself_alone(name):
    """A token that is NaN, and one that overflows in the experts."""
    signature = replace(PLAIN, num_experts=3, top_k=1)
    weights = weights_of(signature)
    kernel = kernel_of(name, signature, weights)
    x = torch.randn(21, signature.hidden_size)
    x[0] *= 1e30
    spoilt = x.clone()
    spoilt[5] = torch.nan
    clean, out = run(kernel, x), run(kernel, spoilt)
    others = [i for i in range(1, 21) if i != 5]
    assert torch.isfinite(clean[others]).all()
    torch.testing.assert_close(out[others], clean[others])
    assert out[5].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_what_another_expert_makes_of_a_token_does_not_matter(name):
    """The first token, which would overflow in an expert that others use."""
    signature = replace(PLAIN, num_experts=3, top_k=1)
    weights = weights_of(signature)
    weights["down"][2] *= 1e30
    x = torch.randn(21, signature.hidden_size)
    x[0] = weights["router"][0] * 1e10
    kernel = kernel_of(name, signature, weights)
    alone, out = run(kernel, x[:1]), run(kernel, x)
    assert torch.isfinite(alone).all()
    assert out[1:].abs().max() > 1e30
    torch.testing.assert_close(out[:1], alone)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("looks", [True, False])
def test_tiled_tokens_do_not_see_their_batch(looks, dtype, num_threads, monkeypatch):
    """Alone, in any batch, in any order, in chunks: the same bits, also where the host goes
    through every tile that there could be."""
    torch.set_num_threads(num_threads)
    for case, width in product(("gpt-oss", "weights as they are"), (32, 17, 19)):
        signature = replace(PLAIN, dtype=dtype, batch_invariant=True, **CASES[case])
        signature = replace(signature, hidden_size=48, intermediate_size=width)
        weights = weights_of(signature)
        if not looks:
            signature = replace(signature, device_type="cuda")
        kernel = kernel_of("tiled", signature, weights)
        x = torch.randn(61, 48).to(dtype)
        whole = run(kernel, x)
        for chunk in (1, 3, 16, 17, 60):
            pieces = [run(kernel, x[i : i + chunk]) for i in range(0, 61, chunk)]
            assert torch.equal(torch.cat(pieces), whole), chunk
        order = torch.randperm(61)
        assert torch.equal(run(kernel, x[order]), whole[order])
        torch.set_num_threads(3 - num_threads)
        assert torch.equal(run(kernel, x), whole)
        torch.set_num_threads(num_threads)


def test_tiled_needs_no_look_at_the_device():
    """Without a look the same result, in as many tiles as there can be."""
    weights = weights_of(replace(PLAIN, **BIASED))
    signature = replace(PLAIN, **BIASED)
    for num_rows in (1, 2, 5, 16, 61, 200):
        x = torch.randn(num_rows, PLAIN.hidden_size)
        with_look = run(kernel_of("tiled", signature, weights), x)
        blind = run(kernel_of("tiled", replace(signature, device_type="cuda"), weights), x)
        assert torch.equal(with_look, blind)


def test_which_candidates_are_taken():
    def names(**changes: Any) -> tuple[str, ...]:
        signature = replace(PLAIN, **changes)
        return bind("moe", moe.CANDIDATES, signature, **weights_of(signature)).names

    assert names() == ("sorted",)
    assert names(batch_invariant=True) == ("tiled",)
    has_triton = importlib.util.find_spec("triton") is not None
    assert names(device_type="cuda") == (
        ("few", "in_order") if has_triton else ("tiled", "reference")
    )
    assert names(device_type="cuda", batch_invariant=True) == ("tiled",)
    reasons = r"grouped: .*elsewhere than on CUDA; sorted: .*depend on the number of rows"
    with pytest.raises(UnsupportedError, match=reasons):
        bind("moe", moe.CANDIDATES[:4], replace(PLAIN, batch_invariant=True), **weights_of(PLAIN))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["reference", "tiled", "grouped", "few", "in_order"])
def test_on_a_gpu_without_waiting_for_it(name, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    signature = replace(PLAIN, **CASES["gpt-oss"], dtype=dtype, num_experts=33)
    signature = replace(signature, hidden_size=64, intermediate_size=48, device_type="cuda")
    candidate = next(c for c in moe.CANDIDATES if c.name == name)
    if candidate.refuses(signature) is not None:
        assert name == "grouped"
        assert dtype != torch.bfloat16
        return
    weights = weights_of(signature)
    kernel = candidate.load()(signature, **{k: w.cuda() for k, w in weights.items()})
    for num_rows in (1, 2, 17, 200):
        if num_rows > (candidate.max_rows or num_rows):
            continue
        x = torch.randn(num_rows, 64).to(dtype)
        on_device, out = x.cuda(), torch.full_like(x, torch.nan).cuda()
        kernel(on_device, out)
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernel(on_device, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # Products of a GPU round otherwise, so near choices may differ: most rows must agree.
        expected = torch.full_like(x, torch.nan)
        kernel_of("reference", replace(signature, device_type="cpu"), weights)(x, expected)
        size = expected.abs().max()
        error = ((out.cpu() - expected).abs() / size).amax(-1)
        assert (error <= 2e-2).float().mean() >= 0.95
