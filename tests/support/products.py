"""The product ops' Triton kernels beside float64. As a program: in Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__":
    import support.interpreter  # noqa: F401

import torch

from pelton.ops import linear, linear_add, norm_linear
from pelton.ops.product import Activation, ProductSignature

OPS = {"linear": linear, "linear_add": linear_add, "norm_linear": norm_linear}
ACTIVATIONS: dict[str, tuple[Activation | None, ...]] = {
    "linear": (None,),
    "linear_add": (None,),
    "norm_linear": (None, "silu_mul", "gelu_tanh_mul", "gelu_mul"),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
EPS = 1e-3
# Of buffers around x and out: wide loads stay possible, or do not.
ALIGNED, ODD = 16, 3


class TritonProduct:
    """One candidate over random weights."""

    def __init__(
        self,
        op: str,
        name: str,
        k: int,
        m: int,
        *,
        dtype: torch.dtype,
        device: str,
        activation: Activation | None = None,
        has_bias: bool = False,
        has_norm: bool = True,
    ) -> None:
        self.op, self.k, self.m = op, k, m
        self.dtype, self.device = dtype, device
        self.width = m if activation is None else m // 2
        self.weights = {"weight": self.random(m, k)}
        has_norm = has_norm and op == "norm_linear"
        if has_norm:
            self.weights["norm_weight"] = self.random(k)
        if has_bias:
            self.weights["bias"] = self.random(m)
        self.signature = ProductSignature(
            in_features=k,
            out_features=m,
            dtype=dtype,
            device_type="cuda",
            has_bias=has_bias,
            batch_invariant=name == "fixed",
            activation=activation,
            norm_eps=EPS if has_norm else None,
        )
        candidate = next(c for c in OPS[op].CANDIDATES if c.name == name and ".triton:" in c.target)
        self.kernel = candidate.load()(self.signature, **self.weights)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def run(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, margin: int = 0
    ) -> torch.Tensor:
        """x and out as columns of wider buffers, whose margins stay what they are."""
        num_rows = x.shape[0]
        wide = self.random(num_rows, self.k + 2 * margin)
        wide[:, margin : margin + self.k] = x
        target = torch.full(
            (num_rows, self.width + 2 * margin), torch.nan, dtype=self.dtype, device=self.device
        )
        out = target[:, margin : margin + self.width]
        if residual is not None:
            out.copy_(residual)
        arguments = [wide[:, margin : margin + self.k], out]
        if self.op == "norm_linear":
            scratch = torch.full(
                (num_rows, self.m), torch.nan, dtype=self.dtype, device=self.device
            )
            arguments.append(out if self.signature.activation is None else scratch)
        self.kernel(*arguments)
        assert torch.equal(wide[:, margin : margin + self.k], x), "the input is not changed"
        assert target[:, :margin].isnan().all()
        assert target[:, margin + self.width :].isnan().all()
        return out.clone()

    def exact(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x, weights = x.double(), {name: w.double() for name, w in self.weights.items()}
        if "norm_weight" in weights:
            x = x / ((x * x).mean(-1, keepdim=True) + EPS).sqrt() * weights["norm_weight"]
        out = x @ weights["weight"].T + weights.get("bias", 0.0)
        if self.signature.activation is not None:
            gate, up = out.chunk(2, -1)
            if self.signature.activation == "silu_mul":
                out = gate / (1 + (-gate).exp()) * up
            elif self.signature.activation == "gelu_mul":
                out = 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
            else:
                inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
                out = 0.5 * gate * (1 + inner.tanh()) * up
        return out if residual is None else out + residual.double()

    def inputs(self, num_rows: int) -> dict[str, Any]:
        values = {"x": self.random(num_rows, self.k)}
        if self.op == "linear_add":
            values["residual"] = self.random(num_rows, self.width)
        return values

    def check(self, num_rows: int, *, margin: int = 0) -> None:
        given = self.inputs(num_rows)
        out, expected = self.run(**given, margin=margin), self.exact(**given)
        if num_rows:
            # Sums of K terms: relative to the size of all, since single elements cancel.
            size = expected.abs().amax().clamp(min=1.0)
            error = float(((out.double() - expected).abs() / size).amax())
            # NaN passes no comparison.
            assert error <= TOLERANCE[self.dtype], (self.signature, num_rows, margin, error)


def check_in_interpreter(op: str) -> None:
    """Small sizes; float16 for the matrix units: the interpreter has no dots in bfloat16."""
    for activation in ACTIVATIONS[op]:
        for name, rows, dtype, k, m in (
            ("one_row", (1,), torch.bfloat16, 1040, 12),
            ("few_rows", (1, 17), torch.float16, 1040, 132),
            ("fixed", (0, 3, 17), torch.float32, 48, 66),
        ):
            product = TritonProduct(
                op, name, k, m, dtype=dtype, device="cpu", activation=activation, has_bias=True
            )
            for num_rows in rows:
                product.check(num_rows, margin=ODD)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_in_interpreter(sys.argv[1])
