"""linear, linear_add, norm_linear in Triton: against float64, on a GPU and in the interpreter."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted
from support.products import ACTIVATIONS, ALIGNED, ODD, OPS, TOLERANCE, TritonProduct

from pelton.device.cuda import CUDADevice
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind

ROWS = {
    "one_row": (1,),
    "few_rows": (1, 2, 3, 15, 16, 17, 33, 64),
    "many_rows": (0, 1, 65, 257),
    "fixed": (0, 1, 2, 3, 15, 16, 17, 64, 257, 1030),
}


@needs_triton
@pytest.mark.parametrize("op", OPS)
def test_in_the_interpreter(op):
    run_interpreted("products", op)


def names_of(op: str) -> list[str]:
    return [c.name for c in OPS[op].CANDIDATES if ".triton:" in c.target]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("op", "activation"), [(op, act) for op, acts in ACTIVATIONS.items() for act in acts]
)
def test_against_float64(op, activation, dtype):
    torch.manual_seed(0)
    for name in names_of(op):
        for k, m, has_bias in ((16, 34, False), (576, 1536, True), (2064, 334, True)):
            product = TritonProduct(
                op, name, k, m, dtype=dtype, device="cuda", activation=activation, has_bias=has_bias
            )  # fmt: skip
            for num_rows in ROWS[name]:
                product.check(num_rows, margin=ODD if num_rows == 3 else ALIGNED)
                product.check(num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_fixed_rows_do_not_see_their_batch(op, dtype):
    """Alone, in any batch, at any place of a tile: the same bits."""
    torch.manual_seed(1)
    activation = "silu_mul" if op == "norm_linear" else None
    for k, m in ((576, 1536), (3072, 1024)):
        product = TritonProduct(
            op, "fixed", k, m, dtype=dtype, device="cuda", activation=activation
        )
        given = product.inputs(300)
        whole = product.run(**given)
        for chunk in (1, 3, 16, 17, 100, 299):
            for start in (0, 150, 299):
                end = min(start + chunk, 300)
                piece = product.run(**{n: v[start:end] for n, v in given.items()})
                assert torch.equal(piece, whole[start:end]), (k, m, chunk, start)
        order = torch.randperm(300, device="cuda")
        shuffled = product.run(**{n: v[order] for n, v in given.items()})
        assert torch.equal(shuffled, whole[order]), (k, m)


@pytest.mark.gpu
def test_norm_linear_without_a_norm():
    for name in names_of("norm_linear"):
        product = TritonProduct(
            "norm_linear", name, 64, 96, dtype=torch.float32, device="cuda", has_norm=False
        )
        product.check(1)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_the_ladder_on_a_gpu(op):
    plain = {
        "in_features": 64,
        "out_features": 32,
        "norm_eps": 1e-6 if op == "norm_linear" else None,
    }
    weights = {"weight": torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)}
    if op == "norm_linear":
        weights["norm_weight"] = torch.randn(64, device="cuda", dtype=torch.bfloat16)

    def names(**flags):
        signature = ProductSignature(
            **{**plain, "dtype": torch.bfloat16, "device_type": "cuda", **flags}
        )
        return bind(op, OPS[op].CANDIDATES, signature, **weights).names

    many = "many_rows" if op == "norm_linear" else "reference"
    assert names() == ("one_row", "few_rows", many)
    assert names(batch_invariant=True) == ("fixed",)
    assert names(dtype=torch.float64) == ("reference",)
    assert names(in_features=63) == ("reference",)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_what_binding_compiles_is_all_that_runs(op, batch_invariant, monkeypatch):
    triton = importlib.import_module("triton")
    activation = "silu_mul" if op == "norm_linear" else None
    # A size that no other test has compiled for.
    k, m = 1200, 272
    width = m if activation is None else m // 2
    signature = ProductSignature(
        in_features=k,
        out_features=m,
        dtype=torch.float16,
        device_type="cuda",
        batch_invariant=batch_invariant,
        activation=activation,
        norm_eps=1e-6 if op == "norm_linear" else None,
    )
    weights = {"weight": torch.randn(m, k, device="cuda").half() / 32}
    if op == "norm_linear":
        weights["norm_weight"] = torch.ones(k, device="cuda").half()
    with CUDADevice().compiling():
        bound = bind(op, OPS[op].CANDIDATES, signature, **weights)
    late = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **what: late.append(what["repr"])
    )
    x, out, scratch = (torch.ones(400, n, device="cuda").half() for n in (k, width, m))
    for num_rows in (1, 2, 16, 17, 33, 64, 65, 400):
        arguments = [x[:num_rows], out[:num_rows]]
        if op == "norm_linear":
            arguments.append(scratch[:num_rows])
        bound(num_rows, *arguments)
    torch.cuda.synchronize()
    assert late == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 40, 80])
def test_overlapping_kernels_in_a_graph(num_rows):
    """Kernels start before those that they follow have ended; what they compute is the same."""
    torch.manual_seed(2)
    layers = []
    for _ in range(6):
        pair = []
        for op, k, m, activation in (
            ("norm_linear", 1024, 6144, "silu_mul"), ("linear_add", 3072, 1024, None),
        ):  # fmt: skip
            product = TritonProduct(
                op, "one_row", k, m, dtype=torch.bfloat16, device="cuda", activation=activation
            )
            product.weights["weight"] *= 0.02
            pair.append(bind(op, OPS[op].CANDIDATES, product.signature, **product.weights))
        layers.append(pair)
    hidden = torch.zeros(num_rows, 1024, device="cuda", dtype=torch.bfloat16)
    inner = torch.full((num_rows, 3072), torch.nan, device="cuda", dtype=torch.bfloat16)
    scratch = torch.full((num_rows, 6144), torch.nan, device="cuda", dtype=torch.bfloat16)

    def step(wait: bool = False) -> None:
        for gate_up, down in layers:
            gate_up(num_rows, hidden, inner, scratch)
            if wait:
                torch.cuda.synchronize()
            down(num_rows, inner, hidden)
            if wait:
                torch.cuda.synchronize()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        start = torch.randn_like(hidden)
        hidden.copy_(start)
        step(wait=True)
        expected = hidden.clone()
        for run in (step, graph.replay):
            inner.fill_(torch.nan)
            hidden.copy_(start)
            run()
            assert torch.equal(hidden, expected)
