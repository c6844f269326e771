"""What stands behind an encoder that sorts texts, or their tokens, into classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.config.encoder import EncoderConfig
from pelton.config.model import ModelConfig
from pelton.layers.context import BuildContext
from pelton.layers.encoder import LayerNorm
from pelton.layers.linear import vector
from pelton.layers.parameter import Parameter, whole
from pelton.ops import linear
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind


class _Product:
    """In float32: it is small, and its result is what users compare."""

    def __init__(self, build: BuildContext, rows: int, columns: int, *, has_bias: bool) -> None:
        shape = rows, columns
        self.weight = Parameter(build.weight(*shape), {None: whole(shape)})
        self.bias = vector(build, rows) if has_bias else None
        self._signature = ProductSignature(
            in_features=columns,
            out_features=rows,
            dtype=torch.float32,
            device_type=build.device.type,
            has_bias=has_bias,
            batch_invariant=build.batch_invariant,
        )

    def bind(self) -> None:
        weights = {"weight": self.weight.tensor.float()}
        if self.bias is not None:
            weights["bias"] = self.bias.tensor.float()
        self._product = bind("linear", linear.CANDIDATES, self._signature, **weights)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), self._signature.out_features)
        self._product(len(x), x, out)
        return out

    def parameters(self, name: str) -> dict[str, Parameter]:
        named = {f"{name}.weight": self.weight}
        if self.bias is not None:
            named[f"{name}.bias"] = self.bias
        return named


class EncoderClassifier:
    """features [N, H] float32 -> scores [N, num_labels] float32, before any activation.

    What comes before the product with the classes: a product and tanh (of texts alone), or a
    product, GELU and a norm; as the configuration says.
    """

    def __init__(self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig) -> None:
        hidden = config.hidden_size
        self._kind = kind = encoder.inner_of(config.classifier)
        self._parts = {"classifier": _Product(build, config.num_labels, hidden, has_bias=True)}
        if kind:
            has_bias = encoder.classifier_inner_bias
            self._parts["inner"] = _Product(build, hidden, hidden, has_bias=has_bias)
        self._norm: LayerNorm | None = None
        if kind == "gelu_norm":
            self._norm = LayerNorm(
                build, hidden, eps=config.rms_norm_eps, has_bias=encoder.norm_bias
            )
        self._eps = config.rms_norm_eps

    def bind(self) -> None:
        """Call when the weights are loaded."""
        for part in self._parts.values():
            part.bind()
        if self._norm is not None:
            bias = self._norm.bias
            self._norm_weight = self._norm.weight.tensor.float()
            self._norm_bias = None if bias is None else bias.tensor.float()

    def run(self, features: torch.Tensor) -> torch.Tensor:
        if self._kind:
            features = self._parts["inner"].run(features)
            features = features.tanh() if self._kind == "tanh" else F.gelu(features)
        if self._norm is not None:
            shape = features.shape[1:]
            features = F.layer_norm(features, shape, self._norm_weight, self._norm_bias, self._eps)
        return self._parts["classifier"].run(features)

    def parameters(self) -> dict[str, Parameter]:
        named: dict[str, Parameter] = {}
        for name, part in self._parts.items():
            named |= part.parameters(name)
        return named if self._norm is None else named | self._norm.parameters("inner_norm")
