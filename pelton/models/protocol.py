"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from pelton.batch.prompt_embeds import LayOver, nothing_over
from pelton.checkpoint.name_map import NameRules
from pelton.config.model import ModelConfig
from pelton.core.kv.spec import LayerKV
from pelton.layers.context import BuildContext, Communicator, StepContext, Widths
from pelton.layers.parameter import Parameter
from pelton.ops.lm_head_sample import DrawRows


class Model(Protocol):
    """A decoder. `embed`, `run_layers`, `head` and their kin run inside launches, and write into
    given memory where they are given some.

    A pipeline stage runs a range of layers; `taps` are layer indices whose input hidden states a
    drafter wants; `rows` restricts the work to a row subset. Both are empty in plain generation.
    """

    config: ModelConfig
    num_layers: int
    vocab_shard_size: int
    names: Mapping[str, NameRules]
    """Weight-name rules by checkpoint format ("safetensors", "gguf")."""

    def __init__(self, build: BuildContext, config: ModelConfig) -> None: ...

    def parameters(self) -> dict[str, Parameter]: ...

    def bind(self) -> None:
        """Choose every layer's kernels; call when the weights are loaded."""
        ...

    def kv_layers(self, block_size: int) -> list[LayerKV]: ...

    def widths(self) -> Widths: ...

    def embed(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        communicator: Communicator,
        lay_over: LayOver = nothing_over,
    ) -> None:
        """ids: [T] int32 -> out: [T, H]. lay_over: called with `out` when it holds what the
        family's authors take as `inputs_embeds`."""
        ...

    def run_layers(
        self, lo: int, hi: int, ctx: StepContext, taps: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Layers lo..hi (half-open) on ctx.buffers.hidden, in place."""
        ...

    def head(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [N, H], before the final norm -> out: [N, vocab_shard_size] logits."""
        ...

    def draw(
        self,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        """The head and a draw in one, as ops/lm_head_sample says; for a rank with all logits."""
        ...

    def final(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [N, H] behind the last layer -> out: [N, H], what is pooled. This and `classify`
        are asked of a model that was built to pool."""
        ...

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """features: [N, H] float32, pooled -> [N, num_labels] float32, before any activation."""
        ...
