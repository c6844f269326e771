"""linear, linear_add, norm_linear: every candidate against float64, and the invariant one bit for
bit whatever stands around a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton.device.cpu import CPUDevice
from pelton.errors import UnsupportedError
from pelton.ops import linear, linear_add, norm_linear
from pelton.ops.product import INVARIANT_TILE, ProductSignature
from pelton.ops.registry import Candidate, bind

OPS = {"linear": linear, "linear_add": linear_add, "norm_linear": norm_linear}
# Those in Triton: test_triton_product.py. For weights in blocks: test_block_product.py.
ALL = [
    (op, candidate.name)
    for op, module in OPS.items()
    for candidate in module.CANDIDATES
    if ".triton:" not in candidate.target and candidate.name != "blocks"
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-3
ROWS = [0, 1, 2, INVARIANT_TILE - 1, INVARIANT_TILE, INVARIANT_TILE + 1, 2 * INVARIANT_TILE + 3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    set_num_threads(1)
    torch.manual_seed(0)
    yield
    set_num_threads(before)


def set_num_threads(count: int) -> None:
    """For torch and for the kernels of our own."""
    CPUDevice(count)


def candidate_of(op: str, name: str) -> Candidate:
    return next(c for c in OPS[op].CANDIDATES if c.name == name)


def on_cpu(op: str) -> list[Candidate]:
    return [candidate_of(op, name) for listed, name in ALL if listed == op]


class Product:
    """One op over random weights. run(x) -> out; exact(x) -> float64."""

    def __init__(
        self,
        op: str,
        name: str,
        k: int,
        m: int,
        dtype: torch.dtype = torch.float32,
        *,
        has_bias: bool = False,
        silu_mul: bool = False,
        batch_invariant: bool = False,
        has_norm: bool = True,
    ) -> None:
        self.op, self.m, self.dtype = op, m, dtype
        self.silu_mul = silu_mul
        self.weights = {"weight": torch.randn(m, k).to(dtype)}
        if has_bias:
            self.weights["bias"] = torch.randn(m).to(dtype)
        has_norm = has_norm and op == "norm_linear"
        if has_norm:
            self.weights["norm_weight"] = torch.randn(k).to(dtype)
        self.signature = ProductSignature(
            in_features=k,
            out_features=m,
            dtype=dtype,
            device_type="cpu",
            has_bias=has_bias,
            batch_invariant=batch_invariant or name == "tiled",
            activation="silu_mul" if silu_mul else None,
            norm_eps=EPS if has_norm else None,
        )
        candidate = candidate_of(op, name)
        self.is_refused = candidate.refuses(self.signature) is not None
        if not self.is_refused:
            self.kernel = candidate.load()(self.signature, **self.weights)

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        before = x.clone()
        scratch = torch.full((len(x), self.m), torch.nan, dtype=self.dtype)
        if self.op == "linear_add":
            assert residual is not None
            out = residual.clone()
            self.kernel(x, out)
        elif self.op == "linear":
            out = scratch
            self.kernel(x, out)
        else:
            out = scratch
            if self.silu_mul:
                out = torch.full((len(x), self.m // 2), torch.nan, dtype=self.dtype)
            self.kernel(x, out, scratch)
        assert torch.equal(x, before), "the input is not changed"
        return out

    def exact(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x, weights = x.double(), {name: w.double() for name, w in self.weights.items()}
        if "norm_weight" in weights:
            mean = (x * x).sum(-1, keepdim=True) / x.shape[1]
            x = x / (mean + EPS).sqrt() * weights["norm_weight"]
        out = x @ weights["weight"].T + weights.get("bias", 0.0)
        if self.silu_mul:
            gate, up = out.chunk(2, -1)
            out = gate / (1 + (-gate).exp()) * up
        return out if residual is None else out + residual.double()


def inputs(product: Product, num_rows: int, k: int) -> dict[str, Any]:
    values = {"x": torch.randn(num_rows, k).to(product.dtype)}
    if product.op == "linear_add":
        values["residual"] = torch.randn(num_rows, product.m).to(product.dtype)
    return values


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("op", "name"), ALL)
def test_against_float64(op, name, dtype):
    cases = [(k, m, b, False) for k, m in ((1, 1), (48, 96), (49, 33), (300, 17)) for b in (0, 1)]
    if op == "norm_linear":
        cases += [(48, 96, False, True), (49, 34, True, True), (49, 64, True, True)]
    if dtype == torch.float64 and name == "packed":
        pytest.skip("a kernel for float32 and bfloat16")
    for k, m, has_bias, silu_mul in cases:
        product = Product(op, name, k, m, dtype, has_bias=bool(has_bias), silu_mul=silu_mul)
        if product.is_refused:
            assert (name == "matvec" and has_bias) or (name == "packed" and m % 32)
            continue
        for num_rows in ROWS if name != "matvec" else [1]:
            given = inputs(product, num_rows, k)
            out, expected = product.run(**given), product.exact(**given)
            assert out.shape == expected.shape
            assert out.dtype == dtype
            # Sums of K terms: relative to the size of a row, since single elements cancel.
            size = expected.abs().amax().clamp(min=1.0) if num_rows else 1.0
            error = ((out.double() - expected).abs() / size).amax() if num_rows else 0.0
            assert error <= TOLERANCE[dtype], (k, m, num_rows)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["packed", "tiled"])
@pytest.mark.parametrize("op", OPS)
def test_invariant_rows_do_not_see_their_batch(op, name, dtype, num_threads):
    """Alone, in any batch, at any place of a tile, in chunks of 1, 3 and 16: the same bits."""
    set_num_threads(num_threads)
    for k, m in ((48, 96), (49, 64), (576, 1536)):
        product = Product(op, name, k, m, dtype, silu_mul=op == "norm_linear", batch_invariant=True)
        given = inputs(product, 37, k)
        whole = product.run(**given)
        for chunk in (1, 3, 16, 17, 36):
            pieces = [
                product.run(**{name: v[i : i + chunk] for name, v in given.items()})
                for i in range(0, 37, chunk)
            ]
            assert torch.equal(torch.cat(pieces), whole), (k, m, chunk)
        order = torch.randperm(37)
        shuffled = product.run(**{name: v[order] for name, v in given.items()})
        assert torch.equal(shuffled, whole[order]), (k, m)
        # Threads change nothing either: requests of one engine may see several numbers of them.
        set_num_threads(3 - num_threads)
        assert torch.equal(product.run(**given), whole), (k, m)
        set_num_threads(num_threads)


@pytest.mark.parametrize("name", [name for op, name in ALL if op == "norm_linear"])
def test_norm_linear_without_a_norm(name):
    for silu_mul in (False, True):
        product = Product("norm_linear", name, 49, 64, silu_mul=silu_mul, has_norm=False)
        for num_rows in (1,) if name == "matvec" else (1, 19):
            x = torch.randn(num_rows, 49)
            torch.testing.assert_close(
                product.run(x).double(), product.exact(x), rtol=1e-4, atol=1e-4
            )


def test_norm_of_large_and_tiny_rows_stays_finite():
    for dtype in (torch.float32, torch.bfloat16):
        product = Product("norm_linear", "reference", 48, 8, dtype)
        x = torch.randn(3, 48).to(dtype) * torch.tensor([[1e15], [1e-15], [0.0]], dtype=dtype)
        out, expected = product.run(x), product.exact(x)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out.double(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("op", OPS)
def test_the_ladder_takes_one_row_and_many_and_none(op):
    product = Product(op, "reference", 48, 96)
    bound = bind(op, on_cpu(op)[1:], product.signature, **product.weights)
    assert bound.names == ("matvec", "reference")
    assert bound.keeps_weight
    for num_rows in (0, 1, 2, 17):
        given = inputs(product, num_rows, 48)
        product.kernel = lambda *args, n=num_rows: bound(n, *args)
        torch.testing.assert_close(product.run(**given).double(), product.exact(**given),
                                   rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_which_candidates_are_taken(op, monkeypatch):
    plain: dict[str, Any] = {"in_features": 8, "out_features": 8, "dtype": torch.float32}

    def names(**flags: Any) -> tuple[str, ...]:
        signature = ProductSignature(**{**plain, "norm_eps": EPS, "device_type": "cpu", **flags})
        weights = {"weight": torch.zeros(8, 8, dtype=signature.dtype)}
        if op == "norm_linear":
            weights["norm_weight"] = torch.zeros(8, dtype=signature.dtype)
        return bind(op, OPS[op].CANDIDATES, signature, **weights).names

    assert names() == names(has_bias=True) == names(batch_invariant=True) == ("packed",)
    assert names(device_type="cuda") == ("reference",)
    assert names(dtype=torch.float64) == ("matvec", "reference")
    monkeypatch.setattr("pelton.ops.native_product.library", lambda: None)
    assert names() == ("matvec", "reference")
    assert names(has_bias=True) == ("reference",)
    assert names(batch_invariant=True) == ("tiled",)
    with pytest.raises(UnsupportedError, match="depend on the number of rows"):
        bind(
            op,
            on_cpu(op)[:3],
            ProductSignature(**plain, device_type="cpu", batch_invariant=True),
        )


@pytest.mark.parametrize("op", OPS)
def test_packed_products_take_many_rows_strided_rows_and_gelu(op):
    """Enough rows for the threads to share them; x and out as columns of wider buffers."""
    set_num_threads(2)
    for num_rows, k, m in ((300, 70, 64), (40, 64, 48)):
        product = Product(op, "packed", k, m, torch.bfloat16, has_bias=True)
        given = inputs(product, num_rows, k)
        expected = product.exact(**given)
        wide = torch.randn(num_rows, k + 7).to(torch.bfloat16)
        wide[:, 3 : 3 + k] = given["x"]
        target = torch.full((num_rows, m + 5), torch.nan, dtype=torch.bfloat16)
        out = target[:, 2 : 2 + m]
        if op == "linear_add":
            out.copy_(given["residual"])
        arguments = (wide[:, 3 : 3 + k], out)
        product.kernel(*arguments, out) if op == "norm_linear" else product.kernel(*arguments)
        error = (out.double() - expected).abs() / expected.abs().amax()
        assert error.amax() <= TOLERANCE[torch.bfloat16]
        assert target[:, :2].isnan().all()
        assert target[:, 2 + m :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh_mul", "gelu_mul", "gelu"])
def test_gelu(activation, dtype):
    """With an odd number of panels, too, where nothing is halved; few rows and enough for tiles."""
    is_halved = activation != "gelu"
    num_features = 64 if is_halved else 72
    weights = {
        "weight": torch.randn(num_features, 48).to(dtype),
        "bias": torch.randn(num_features).to(dtype),
    }
    signature = ProductSignature(
        in_features=48, out_features=num_features, dtype=dtype, device_type="cpu", has_bias=True,
        activation=activation,
    )  # fmt: skip
    for num_rows in (1, 3, 53):
        x = torch.randn(num_rows, 48).to(dtype)
        both = x.double() @ weights["weight"].double().T + weights["bias"].double()
        gate = both[:, :32] if is_halved else both
        if activation == "gelu_tanh_mul":
            slope = gate + 0.044715 * gate**3
            expected = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * slope))
        else:
            expected = 0.5 * gate * (1 + torch.erf(gate / 2**0.5))
        expected = expected * both[:, 32:] if is_halved else expected
        for name in ("packed", "reference", "tiled"):
            signature = replace(signature, batch_invariant=name == "tiled")
            out = torch.full((num_rows, expected.shape[1]), torch.nan, dtype=dtype)
            scratch = torch.empty(num_rows, num_features, dtype=dtype) if is_halved else out
            candidate_of("norm_linear", name).load()(signature, **weights)(x, out, scratch)
            error = (out.double() - expected).abs().amax() / expected.abs().amax()
            assert error <= TOLERANCE[dtype], (name, num_rows)
