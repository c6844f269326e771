"""Products with weights in blocks: exact for quantised x, near for x, the same in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.blocks import columns_of, numbers, random_blocks

import pelton.device.native.library as library_module
from pelton.device.cpu import CPUDevice
from pelton.device.native.build import build
from pelton.device.native.forms import FORMS
from pelton.device.native.levels import Level, usable_levels
from pelton.device.native.library import library
from pelton.ops import linear, linear_add, lm_head_sample, norm_linear
from pelton.ops.block_weight import BlockWeight, Run
from pelton.ops.lm_head_sample import DrawRows, HeadSignature
from pelton.ops.lm_head_sample.reference import composed
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")

OPS = {"linear": linear, "linear_add": linear_add, "norm_linear": norm_linear}
EPS = 1e-3
BLOCK = 32
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
# From so many rows on, AMX multiplies in bfloat16.
MANY = 9
# From so many on, in memory that all parts share.
VERY_MANY = 129


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    CPUDevice(1)
    torch.manual_seed(0)
    yield
    CPUDevice(before)


@pytest.fixture
def use(monkeypatch):
    """use(level): products by the kernels of a level."""

    def use(level: Level) -> None:
        loaded = library_module._load(str(build(level)), level.name)
        for place in ("native_product", "block_weight"):
            monkeypatch.setattr(f"pelton.ops.{place}.loaded", lambda: loaded)

    return use


class Product:
    """One op over random blocks. runs: (form, rows) of the weight."""

    def __init__(
        self,
        op: str,
        runs: list[tuple[str, int]],
        k: int,
        dtype: torch.dtype = torch.float32,
        *,
        activation: Any = None,
        has_bias: bool = False,
        batch_invariant: bool = True,
    ) -> None:
        self.op, self.dtype, self.activation = op, dtype, activation
        parts = [random_blocks(form, n, k, seed=i) for i, (form, n) in enumerate(runs)]
        self.weight = BlockWeight(k, [Run(form, n) for form, n in runs])
        first = 0
        for part in parts:
            self.weight.pack(first, part)
            first += len(part)
        self.numbers = torch.cat(
            [numbers(form, part) for (form, _), part in zip(runs, parts, strict=True)]
        ).double()
        self.n = first
        self.bias = torch.randn(first).to(dtype) if has_bias else None
        self.norm = torch.randn(k).to(dtype) if op == "norm_linear" else None
        weights: dict[str, Any] = {"weight": self.weight}
        if has_bias:
            weights["bias"] = self.bias
        if self.norm is not None:
            weights["norm_weight"] = self.norm
        signature = ProductSignature(
            in_features=k,
            out_features=first,
            dtype=dtype,
            device_type="cpu",
            has_bias=has_bias,
            batch_invariant=batch_invariant,
            activation=activation,
            norm_eps=None if self.norm is None else EPS,
            in_blocks=True,
        )
        self.kernel = bind(op, OPS[op].CANDIDATES, signature, **weights)
        assert self.kernel.names == ("blocks",)

    def run(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual: what `out` holds before."""
        out = residual.clone()
        self.kernel(len(x), x, out, out) if self.op == "norm_linear" else self.kernel(
            len(x), x, out
        )
        return out

    def given(self, num_rows: int) -> dict[str, torch.Tensor]:
        width = self.n // 2 if self.activation else self.n
        before = (
            torch.randn(num_rows, width)
            if self.op == "linear_add"
            else torch.full((num_rows, width), torch.nan)
        )
        x = torch.randn(num_rows, self.weight.shape[1])
        return {"x": x.to(self.dtype), "residual": before.to(self.dtype)}

    def exact(self, x: torch.Tensor, residual: torch.Tensor, *, quantised: bool) -> torch.Tensor:
        x = self.seen(x)
        out = (as_quantised(x) if quantised else x) @ self.numbers.T
        if self.bias is not None:
            out = out + self.bias.double()
        if self.activation:
            gate, up = out.chunk(2, -1)
            gelu = torch.nn.functional.gelu(gate, approximate="tanh")
            out = (gate * gate.sigmoid() if self.activation == "silu_mul" else gelu) * up
        return out + residual.double() if self.op == "linear_add" else out

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """x as it is multiplied, before it is quantised."""
        x = x.double()
        if self.norm is None:
            return x
        mean = (x * x).mean(-1, keepdim=True)
        return x / (mean + EPS).sqrt() * self.norm.double()


def as_quantised(x: torch.Tensor) -> torch.Tensor:
    """With float32's scales, so that all codes are the kernel's where x is float32's."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True).float()
    factor = torch.full_like(most, 32512) / most  # 32512 / most would be 32512 * (1 / most)
    codes = (blocks * factor.double()).nan_to_num().round()
    codes += (codes + 128) % 256 == 0  # no low byte is -128
    return (codes * (most / 32512).double()).flatten(-2)


def assert_close(is_: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    error = (is_.double() - right).abs().amax() / right.abs().amax().clamp(min=1)
    assert error <= tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_exact_for_quantised_x(level, form, dtype, use):
    """Every level, form and number of rows that takes a way of its own; 1 and 2 threads. What is
    normed in float32 may be rounded to another code: norm_linear is left to the next test."""
    use(level)
    k = max(columns_of(form), 64)
    for n in (1, 33):
        for num_threads in (1, 2):
            library_module.loaded().set_num_threads(num_threads)
            for op in ("linear", "linear_add"):
                product = Product(op, [(form, n)], k, dtype, has_bias=op == "linear_add")
                for num_rows in (0, 1, 2, 3, 7, 8, 9, 40):
                    given = product.given(num_rows)
                    out = product.run(**given)
                    if num_rows:
                        right = product.exact(**given, quantised=True)
                        assert_close(out, right, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_no_further_from_float64_than_is_said(form, dtype):
    """By the bound in bind_blocks: 1.5 scales of x for each number of the weight."""
    k = 768
    for op in OPS:
        product = Product(op, [(form, 48)], k, dtype)
        given = product.given(19)
        right = product.exact(**given, quantised=False)
        most = product.seen(given["x"]).unflatten(-1, (-1, BLOCK)).abs().amax(-1)
        sums = product.numbers.abs().unflatten(-1, (-1, BLOCK)).sum(-1)
        bound = most @ sums.T / 21674
        rounding = TOLERANCE[dtype] * right.abs().amax()
        error = (product.run(**given).double() - right).abs()
        assert (error <= bound * 1.001 + rounding).all()
        # The bound is for the worst case; what happens is a random walk.
        assert error.mean() <= bound.mean() / 4 + rounding


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_gate_and_up_and_several_forms(activation, batch_invariant):
    for runs in ([("Q4_1", 96)], [("Q4_K", 48), ("Q6_K", 48)], [("Q8_0", 16), ("Q5_0", 16)]):
        product = Product(
            "norm_linear",
            runs,
            256,
            torch.bfloat16,
            activation=activation,
            has_bias=True,
            batch_invariant=batch_invariant,
        )
        for num_rows in (1, 11, 70):
            given = product.given(num_rows)
            out = product.run(**given)
            assert_close(out, product.exact(**given, quantised=False), 2e-2)


@pytest.mark.parametrize("has_bias", [True, False])
def test_many_rows_of_a_weight_that_is_dequantised_in_pieces(has_bias):
    """More than the 4 MiB that are numbers at one time, with an odd panel at the end."""
    product = Product(
        "linear", [("Q5_1", 1024), ("Q4_0", 1100)], 1024, torch.bfloat16, has_bias=has_bias,
        batch_invariant=False,
    )  # fmt: skip
    given = product.given(VERY_MANY)
    assert_close(product.run(**given), product.exact(**given, quantised=False), 1e-2)
    gated = Product(
        "norm_linear", [("Q4_0", 2240), ("Q5_K", 2240)], 512, torch.bfloat16,
        has_bias=has_bias, activation="silu_mul", batch_invariant=False,
    )  # fmt: skip
    given = gated.given(VERY_MANY)
    assert_close(gated.run(**given), gated.exact(**given, quantised=False), 1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_rows_do_not_see_their_batch(level, dtype, use):
    """With batch_invariant: alone, at any place, with any number of threads, the same bits."""
    use(level)
    for runs, k, op, activation in (
        ([("Q4_1", 192)], 576, "norm_linear", "silu_mul"),
        ([("Q4_K", 32), ("Q6_K", 17)], 512, "norm_linear", None),
        ([("Q8_0", 33)], 96, "linear", None),
        ([("Q5_0", 16), ("Q5_1", 20)], 96, "linear_add", None),
    ):
        product = Product(op, runs, k, dtype, activation=activation)
        given = product.given(37)
        whole = product.run(**given)
        for chunk in (1, 3, 16, 36):
            pieces = [
                product.run(**{name: v[i : i + chunk] for name, v in given.items()})
                for i in range(0, 37, chunk)
            ]
            assert torch.equal(torch.cat(pieces), whole), chunk
        order = torch.randperm(37)
        shuffled = product.run(**{name: v[order] for name, v in given.items()})
        assert torch.equal(shuffled, whole[order])
        library_module.loaded().set_num_threads(2)
        assert torch.equal(product.run(**given), whole)


def test_rows_and_outputs_may_be_strided():
    product = Product("linear", [("Q4_0", 40)], 64, torch.bfloat16, batch_invariant=False)
    for num_rows in (5, MANY):
        given = product.given(num_rows)
        wide = torch.full((num_rows, 71), torch.nan, dtype=torch.bfloat16)
        wide[:, 3:67] = given["x"]
        out = torch.full((num_rows, 50), torch.nan, dtype=torch.bfloat16)
        product.kernel(num_rows, wide[:, 3:67], out[:, 4:44])
        assert_close(out[:, 4:44], product.exact(**given, quantised=False), 2e-2)
        assert out[:, :4].isnan().all()
        assert out[:, 44:].isnan().all()


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q6_K"])
def test_what_is_not_a_number_comes_out_so_and_in_its_row_alone(form):
    """A request whose hidden states are broken must be seen to be."""
    product = Product("linear", [(form, 16)], 256)
    for bad in (torch.nan, torch.inf, -torch.inf):
        given = product.given(3)
        given["x"][1, 77] = bad
        out = product.run(**given)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


def test_zeros_and_extremes():
    product = Product("linear", [("Q4_1", 16)], 64)
    given = product.given(4)
    for row, factor in enumerate((0.0, 1e-36, 1e-20, 1e30)):
        given["x"][row] *= factor
    out, right = product.run(**given), product.exact(**given, quantised=True)
    assert (out[0] == 0).all()
    assert (out[1] == 0).all()  # below 1e-30 counts as nothing
    for row in (2, 3):
        error = (out[row].double() - right[row]).abs().amax() / right[row].abs().amax()
        assert error <= 1e-6


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tokens_of_a_head_in_blocks_are_those_of_its_logits(dtype, batch_invariant):
    """lm_head_sample: greedy rows and random ones, rows that indices names, 1 and 2 threads."""
    product = Product("norm_linear", [("Q8_0", 517)], 96, dtype, batch_invariant=batch_invariant)
    num_rows, slots = MANY + 4, torch.arange(MANY + 4) * 7 % (MANY + 4)
    rows = DrawRows(
        slots=slots,
        positions=torch.arange(num_rows, dtype=torch.int32) + 3,
        temperature=torch.tensor([0.0, 0.7, 2.0, 0.0] * 5),
        seeds=torch.arange(num_rows) * 10**15 - 7,
    )
    hidden = torch.randn(30, 96).to(dtype)
    hidden[13, 5] = torch.nan
    indices = torch.randperm(30)[:num_rows]
    indices[indices == 13] = indices[4]
    indices[4] = 13
    logits = torch.empty(num_rows, 517, dtype=dtype)

    def head(x: torch.Tensor, out: torch.Tensor) -> None:
        product.kernel(len(x), x, out, out)

    signature = HeadSignature(
        hidden_size=96,
        vocab_size=517,
        dtype=dtype,
        device_type="cpu",
        norm_eps=EPS,
        batch_invariant=batch_invariant,
        in_blocks=True,
    )
    weights = {"head": head, "weight": product.weight, "norm_weight": product.norm}
    bound = bind("lm_head_sample", lm_head_sample.CANDIDATES, signature, **weights)
    assert bound.names == ("blocks",)
    found = []
    for kernel in (bound, lambda n, *args: composed(signature, **weights)(*args)):
        for num_threads in (1, 2):
            CPUDevice(num_threads)
            for count in (1, 9, num_rows):
                ids, status = torch.full((2, count), -9, dtype=torch.int32)
                some = replace(rows, slots=slots[:count], positions=rows.positions[:count])
                kernel(count, hidden, indices[:count], some, logits[:count], ids, status)
                found.append((ids.tolist(), status.tolist()))
    assert found[:6] == found[6:]
    assert found[2][1] == [int(i == 4) for i in range(num_rows)]
    assert len(set(found[2][0])) > 6
