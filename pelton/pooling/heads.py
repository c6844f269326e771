"""From pooled features to what a user asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pelton.config.pooling import PoolingConfig, PoolingParams
from pelton.device.protocol import Device
from pelton.models.protocol import Model
from pelton.pooling.projection import load_projections


class HeadKey(NamedTuple):
    """Rows with equal keys go through a head together. columns: of the result, None = all."""

    classifies: bool
    dimensions: int | None
    activates: bool
    columns: tuple[int, ...] | None


def head_key(params: PoolingParams) -> HeadKey:
    """params: completed."""
    columns = params.returned_token_ids
    return HeadKey(
        classifies=params.classifies,
        dimensions=params.dimensions,
        activates=bool(params.use_activation),
        columns=None if columns is None else tuple(columns),
    )


class Heads:
    """Embedding: projection, cut, length 1. Classification: classifier, probabilities."""

    def __init__(
        self, device: Device, model: Model, config: PoolingConfig, *, batch_invariant: bool
    ) -> None:
        self._model = model
        self._config = config
        self._projections = load_projections(
            device, config.projections, batch_invariant=batch_invariant
        )

    def width(self, key: HeadKey) -> int:
        """Numbers in a row of the result."""
        if key.columns is not None:
            return len(key.columns)
        if key.classifies:
            return self._config.num_labels
        return key.dimensions or self._config.embedding_size

    def run(self, key: HeadKey, features: torch.Tensor) -> torch.Tensor:
        """On the device. features: [m, H] float32 -> [m, width(key)] float32."""
        if key.classifies:
            values = self._model.classify(features)
            if key.activates:
                values = self._probabilities(values)
        else:
            values = features
            for projection in self._projections:
                values = projection.run(values)
            values = values[:, : key.dimensions]
            if key.activates:
                values = F.normalize(values, dim=1)
        if key.columns is not None:
            values = torch.stack([values[:, column] for column in key.columns], dim=1)
        return values

    def _probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        activation = self._config.activation
        if activation == "softmax":
            return scores.softmax(dim=1)
        return scores.sigmoid() if activation == "sigmoid" else scores
