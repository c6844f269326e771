"""Llama 1 to 3 and what is built like it (SmolLM2). Paper: arXiv 2302.13971."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from pelton.config.model import ModelConfig
from pelton.core.kv.spec import LayerKV
from pelton.layers.attention import SelfAttention
from pelton.layers.context import BuildContext, Communicator, StepContext, Widths
from pelton.layers.embedding import Embedding, Head
from pelton.layers.linear import vector
from pelton.layers.mlp import GatedMLP
from pelton.layers.parameter import Parameter
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF


class DecoderLayer:
    def __init__(self, build: BuildContext, config: ModelConfig, index: int) -> None:
        self.attention = SelfAttention(build, config, index)
        self.mlp = GatedMLP(build, config)

    def bind(self) -> None:
        self.attention.bind()
        self.mlp.bind()

    def run(self, ctx: StepContext) -> None:
        self.attention.run(ctx)
        self.mlp.run(ctx)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {**self.attention.parameters(prefix), **self.mlp.parameters(prefix)}


class Llama:
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF, "gguf": LLAMA_GGUF}

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.num_layers = config.num_layers
        self.embedding = Embedding(build, config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(build, config, i) for i in range(config.num_layers)]
        self.norm = vector(build, config.hidden_size)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.output = Head(build, config.vocab_size, config.hidden_size, tied)
        self.vocab_shard_size = len(self.output.weight.tensor)

    def parameters(self) -> dict[str, Parameter]:
        named = {"embed.weight": self.embedding.weight, "norm.weight": self.norm}
        for index, layer in enumerate(self.layers):
            named.update(layer.parameters(f"layers.{index}"))
        if not self.output.is_tied:
            named["head.weight"] = self.output.weight
        return named

    def bind(self) -> None:
        for layer in self.layers:
            layer.bind()
        self.output.bind()

    def kv_layers(self, block_size: int) -> list[LayerKV]:
        return [layer.attention.kv_spec(block_size) for layer in self.layers]

    def widths(self) -> Widths:
        layer = self.layers[0]
        return Widths(
            hidden=self.config.hidden_size,
            qkv=layer.attention.qkv.out_features,
            attention=layer.attention.num_heads * self.config.head_dim,
            gate_up=layer.mlp.gate_up.out_features,
            activation=layer.mlp.gate_up.out_features // 2,
        )

    def embed(self, ids: torch.Tensor, out: torch.Tensor, communicator: Communicator) -> None:
        self.embedding.run(ids, out, communicator)

    def run_layers(
        self,
        lo: int,
        hi: int,
        ctx: StepContext,
        taps: Sequence[int] = (),
        rows: Sequence[int] = (),
    ) -> None:
        assert not taps, "no drafter asks for hidden states yet"
        assert not rows, "no layer shares another's keys and values"
        for layer in self.layers[lo:hi]:
            layer.run(ctx)

    def head(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        shape = (self.config.hidden_size,)
        normed = F.rms_norm(hidden, shape, self.norm.tensor, self.config.rms_norm_eps)
        self.output.run(normed, out)
