"""Norms of queries and keys that see more than a head, where heads are cut over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.config.model import ModelConfig
from pelton.layers.context import BuildContext, Communicator
from pelton.layers.parameter import Parameter, shard


class JointQKNorm:
    """An RMS norm over all query heads of a token together, and one over all its key heads, before
    rotation. Source: OLMo 2, arXiv 2501.00656.

    It stands here and not in ops/qkv_attention because ranks add up their squares. Key heads that
    several ranks have count as often, which leaves the mean as it is.
    """

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        self.weights: list[Parameter] = []
        for num_heads, may_replicate in ((config.num_heads, False), (config.num_kv_heads, True)):
            part = shard(
                (num_heads * config.head_dim,),
                build.rank,
                build.size,
                unit=config.head_dim,
                may_replicate=may_replicate,
            )
            self.weights.append(Parameter(build.weight(part.size), {None: part}))
        self._eps = config.rms_norm_eps

    def run(self, qkv: torch.Tensor, communicator: Communicator) -> None:
        """qkv: [T, (Hq + 2 * Hk) * D] of this rank; queries and keys are changed in place."""
        weights = [weight.tensor for weight in self.weights]
        sizes = [len(weight) for weight in weights]
        parts = torch.split(qkv[:, : sum(sizes)], sizes, dim=1)
        if communicator.size == 1:
            for part, weight in zip(parts, weights):
                part.copy_(F.rms_norm(part, weight.shape, weight, self._eps))
            return
        precise = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        squares = torch.stack([part.square().sum(1) for part in precise])
        communicator.all_reduce(squares)
        for index, (part, weight) in enumerate(zip(parts, weights)):
            mean = squares[index] / (len(weight) * communicator.size)
            scale = torch.rsqrt(mean + self._eps)[:, None]
            part.copy_(precise[index] * scale * weight)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        names = (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
        return dict(zip(names, self.weights))
