"""Products that know their shard and bind their kernels once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pelton.layers.context import BuildContext, StepContext
from pelton.layers.parameter import Parameter, Part, PartName, shard, whole
from pelton.ops import linear, linear_add, norm_linear
from pelton.ops.product import Activation, ProductSignature
from pelton.ops.registry import BoundOp, bind
from pelton.ops.step_kernels import step_kernel


def vector(build: BuildContext, size: int) -> Parameter:
    """A [size] weight that every rank holds whole (a norm)."""
    return Parameter(build.weight(size), {None: whole((size,))})


class NormLinear:
    """activation(rms_norm(x) @ W.T + b), output rows cut over the ranks.

    parts: of W, by name; the bias, if any, is cut likewise. norm_eps: None leaves the norm out.
    """

    def __init__(
        self,
        build: BuildContext,
        in_features: int,
        parts: Mapping[PartName, Part],
        *,
        norm_eps: float | None,
        has_bias: bool,
        activation: Activation | None = None,
    ) -> None:
        self.out_features = sum(part.dst_size for part in parts.values())
        self._signature = ProductSignature(
            in_features=in_features,
            out_features=self.out_features,
            dtype=build.dtype,
            device_type=build.device.type,
            has_bias=has_bias,
            batch_invariant=build.batch_invariant,
            activation=activation,
            norm_eps=norm_eps,
        )
        weight = build.weight(self.out_features, in_features)
        self.weight = Parameter(weight, parts, takes_blocks=True)
        self.bias = _bias(build, self.out_features, parts) if has_bias else None
        self.norm = None if norm_eps is None else vector(build, in_features)

    def bind(self) -> None:
        """Choose kernels; call when the weights are loaded."""
        weights: dict[str, Any] = {"weight": self.weight.weight}
        if self.norm is not None:
            weights["norm_weight"] = self.norm.tensor
        if self.bias is not None:
            weights["bias"] = self.bias.tensor
        signature = replace(self._signature, in_blocks=self.weight.blocks is not None)
        self.run = bind("norm_linear", norm_linear.CANDIDATES, signature, **weights)
        _let_go(self.weight, self.run)

    def parameters(self, name: str, norm_name: str) -> dict[str, Parameter]:
        named = _named(name, self.weight, self.bias)
        if self.norm is not None:
            named[f"{norm_name}.weight"] = self.norm
        return named


class LinearAdd:
    """residual += multiplier * (x @ W.T + b), input columns cut over the ranks; partial sums are
    all-reduced.

    post_norm_eps: of an RMS norm over the product before it is added, or None. sums_apart,
    norms_apart: whether it needs memory for the product, and for its norm.
    """

    def __init__(
        self,
        build: BuildContext,
        in_features: int,
        out_features: int,
        *,
        unit: int,
        has_bias: bool,
        post_norm_eps: float | None = None,
        multiplier: float = 1.0,
    ) -> None:
        part = shard((out_features, in_features), build.rank, build.size, dim=1, unit=unit)
        self.sums_apart = build.size > 1 or post_norm_eps is not None or multiplier != 1.0
        self.norms_apart = post_norm_eps is not None
        self._rms_norm = step_kernel("rms_norm", build.device.type)
        self._multiplier = multiplier
        self._post_norm_eps = post_norm_eps
        self.post_norm = None if post_norm_eps is None else vector(build, out_features)
        self._signature = ProductSignature(
            in_features=part.size,
            out_features=out_features,
            dtype=build.dtype,
            device_type=build.device.type,
            has_bias=has_bias,
            batch_invariant=build.batch_invariant,
        )
        weight = build.weight(out_features, part.size)
        self.weight = Parameter(weight, {None: part}, takes_blocks=True)
        self.bias = vector(build, out_features) if has_bias else None

    def bind(self) -> None:
        """Choose kernels; call when the weights are loaded."""
        weights: dict[str, Any] = {"weight": self.weight.weight}
        if self.bias is not None:
            weights["bias"] = self.bias.tensor
        signature = replace(self._signature, in_blocks=self.weight.blocks is not None)
        if not self.sums_apart:
            self._add = bind("linear_add", linear_add.CANDIDATES, signature, **weights)
            _let_go(self.weight, self._add)
        else:
            # Each rank would add the bias: it comes once, after the sum.
            signature = replace(signature, has_bias=False)
            self._product = bind("linear", linear.CANDIDATES, signature, weight=self.weight.weight)
            _let_go(self.weight, self._product)

    def run(self, x: torch.Tensor, ctx: StepContext) -> None:
        """x: [T, in_features / size]; the residual stream is changed in place."""
        residual, partial = ctx.buffers.hidden, ctx.buffers.partial
        if not self.sums_apart:
            self._add(x.shape[0], x, residual)
            return
        self._product(x.shape[0], x, partial)
        ctx.communicator.all_reduce(partial)
        if self.bias is not None:
            partial.add_(self.bias.tensor)
        if self.post_norm is not None:
            assert self._post_norm_eps is not None
            normed = ctx.buffers.normed
            self._rms_norm(partial, self.post_norm.tensor, self._post_norm_eps, normed)
            partial = normed
        residual.add_(partial, alpha=self._multiplier)

    def parameters(self, name: str, post_norm_name: str = "") -> dict[str, Parameter]:
        named = _named(name, self.weight, self.bias)
        if self.post_norm is not None:
            named[f"{post_norm_name}.weight"] = self.post_norm
        return named


def _let_go(weight: Parameter, bound: BoundOp) -> None:
    """Free a weight of which the kernels have a copy of their own."""
    if not bound.keeps_weight:
        weight.tensor = weight.tensor.new_empty(0)


def _bias(build: BuildContext, size: int, parts: Mapping[PartName, Part]) -> Parameter:
    """A bias cut like the rows of its weight."""
    return Parameter(
        build.weight(size),
        {
            name: Part(
                source_shape=part.source_shape[:1],
                dim=0,
                start=part.start,
                size=part.size,
                dst_start=part.dst_start,
                dst_size=part.dst_size,
            )
            for name, part in parts.items()
        },
    )


def _named(name: str, weight: Parameter, bias: Parameter | None) -> dict[str, Parameter]:
    named = {f"{name}.weight": weight}
    if bias is not None:
        named[f"{name}.bias"] = bias
    return named
