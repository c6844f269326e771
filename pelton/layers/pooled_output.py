"""What a pooling engine has in the place of a head: the last norm, and perhaps a classifier."""

from __future__ import annotations

import torch

from pelton.layers.context import BuildContext
from pelton.layers.linear import vector
from pelton.layers.parameter import Parameter, whole
from pelton.ops import linear
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind
from pelton.ops.step_kernels import step_kernel


class PooledOutput:
    """The final RMS norm, and for num_labels > 0 features [N, H] -> scores [N, num_labels].

    The classifier works in float32: its product is small, and its result is what users compare.
    """

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        *,
        norm_eps: float,
        num_labels: int,
        has_bias: bool,
    ) -> None:
        self.norm = vector(build, hidden_size)
        self._norm_eps = norm_eps
        self._norm_kernel = step_kernel("rms_norm", build.device.type)
        self.weight: Parameter | None = None
        self.bias: Parameter | None = None
        if num_labels:
            shape = num_labels, hidden_size
            self.weight = Parameter(build.weight(*shape), {None: whole(shape)})
            self.bias = vector(build, num_labels) if has_bias else None
            self._signature = ProductSignature(
                in_features=hidden_size,
                out_features=num_labels,
                dtype=torch.float32,
                device_type=build.device.type,
                has_bias=has_bias,
                batch_invariant=build.batch_invariant,
            )

    def parameters(self) -> dict[str, Parameter]:
        named = {"norm.weight": self.norm}
        if self.weight is not None:
            named["classifier.weight"] = self.weight
        if self.bias is not None:
            named["classifier.bias"] = self.bias
        return named

    def bind(self) -> None:
        """Call when the weights are loaded."""
        if self.weight is None:
            return
        weights = {"weight": self.weight.tensor.float()}
        if self.bias is not None:
            weights["bias"] = self.bias.tensor.float()
        self._product = bind("linear", linear.CANDIDATES, self._signature, **weights)

    def run_norm(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden, out: [N, H], of one type."""
        self._norm_kernel(hidden, self.norm.tensor, self._norm_eps, out)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """features: [N, H] float32 -> [N, num_labels] float32, before any activation."""
        scores = features.new_empty(len(features), self._signature.out_features)
        self._product(len(features), features, scores)
        return scores
