"""A decoder of attention or recurrent layers and feed-forward ones: what most families are, as
ModelConfig says.

A family is a subclass with its weight names; where its arithmetic is another, it says so in its own
file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from pelton.batch.prompt_embeds import LayOver, nothing_over
from pelton.checkpoint.name_map import NameRules
from pelton.config.model import ModelConfig
from pelton.core.kv.spec import LayerKV
from pelton.layers.attention import SelfAttention
from pelton.layers.bidirectional import BidirectionalAttention
from pelton.layers.context import BuildContext, Communicator, StepContext, Widths
from pelton.layers.embedding import Embedding, Head
from pelton.layers.mamba2 import Mamba2
from pelton.layers.mlp import GatedMLP
from pelton.layers.moe import SparseMLP
from pelton.layers.parameter import Parameter
from pelton.layers.pooled_output import PooledOutput
from pelton.ops import lm_head_sample
from pelton.ops.registry import bind


class DecoderLayer:
    """mixer: where tokens see others; then a feed-forward network."""

    def __init__(self, build: BuildContext, config: ModelConfig, index: int) -> None:
        self.mixer: SelfAttention | BidirectionalAttention | Mamba2
        if config.layer_kind(index) == "recurrent":
            self.mixer = Mamba2(build, config, index)
        elif config.is_bidirectional:
            self.mixer = BidirectionalAttention(build, config, index)
        else:
            self.mixer = SelfAttention(build, config, index)
        self.mlp = SparseMLP(build, config) if config.is_sparse(index) else GatedMLP(build, config)

    def bind(self) -> None:
        self.mixer.bind()
        self.mlp.bind()

    def run(self, ctx: StepContext) -> None:
        self.mixer.run(ctx)
        self.mlp.run(ctx)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {**self.mixer.parameters(prefix), **self.mlp.parameters(prefix)}


class Decoder:
    names: ClassVar[Mapping[str, NameRules]]

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.num_layers = config.num_layers
        before, behind = (build.of_layer(i, config.num_layers) for i in (-1, config.num_layers))
        is_tied = config.has_lm_head and config.tie_word_embeddings
        of_embedding = behind if is_tied and before.is_elsewhere else before
        self._has_embedding = not of_embedding.is_elsewhere
        self._has_end = not behind.is_elsewhere
        self._held = build.layers or range(config.num_layers)
        self.embedding = Embedding(of_embedding, config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(build.of_layer(i, config.num_layers), config, i)
            for i in range(config.num_layers)
        ]
        if not config.has_lm_head:
            self.vocab_shard_size = 0
            self.pooled = PooledOutput(
                behind,
                config.hidden_size,
                norm_eps=config.rms_norm_eps,
                num_labels=config.num_labels,
                has_bias=config.classifier == "token",
            )
        else:
            self._build_head(behind)
        # As the checkpoint's authors have it: rounded to the weights' type first.
        multiplier = torch.tensor(config.embedding_multiplier, dtype=build.dtype)
        self._embedding_multiplier = float(multiplier)

    def _build_head(self, build: BuildContext) -> None:
        config = self.config
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.output = Head(
            build, config.vocab_size, config.hidden_size, norm_eps=config.rms_norm_eps, tied=tied
        )
        self.vocab_shard_size = len(self.output.weight.tensor)
        self._head_signature = lm_head_sample.HeadSignature(
            hidden_size=config.hidden_size,
            vocab_size=self.vocab_shard_size,
            dtype=build.dtype,
            device_type=build.device.type,
            norm_eps=config.rms_norm_eps,
            logits_divisor=config.logits_divisor,
            softcap=config.final_softcap,
            batch_invariant=build.batch_invariant,
        )

    def parameters(self) -> dict[str, Parameter]:
        named = {"embed.weight": self.embedding.weight}
        for index, layer in enumerate(self.layers):
            named.update(layer.parameters(f"layers.{index}"))
        if not self.config.has_lm_head:
            return {**named, **self.pooled.parameters()}
        named["norm.weight"] = self.output.norm
        if not self.output.is_tied:
            named["head.weight"] = self.output.weight
        return named

    def bind(self) -> None:
        if self._has_embedding:
            self.embedding.bind()
        for index in self._held:
            self.layers[index].bind()
        if not self._has_end:
            return
        if not self.config.has_lm_head:
            self.pooled.bind()
            return
        # Before the head, which frees its weight once all have their packed copy.
        self._draw = bind(
            "lm_head_sample",
            lm_head_sample.CANDIDATES,
            replace(self._head_signature, in_blocks=self.output.weight.blocks is not None),
            head=self.head,
            weight=self.output.weight.weight,
            norm_weight=self.output.norm.tensor,
        )
        self.output.bind()
        if self.output.is_tied and not (self._draw.keeps_weight or self.output.keeps_weight):
            self.embedding.share_packed()

    def kv_layers(self, block_size: int) -> list[LayerKV]:
        mixers = [layer.mixer for layer in self.layers]
        return [
            mixer.kv_spec(block_size)
            for mixer in mixers
            if not isinstance(mixer, BidirectionalAttention)
        ]

    def widths(self) -> Widths:
        gate_up = max(layer.mlp.gate_up_width for layer in self.layers)
        widths = Widths(
            hidden=self.config.hidden_size,
            qkv=0,
            attention=0,
            gate_up=gate_up,
            activation=gate_up // 2,
        )
        hidden = self.config.hidden_size
        ends = [end for layer in self.layers for end in (layer.mixer.out, layer.mlp)]
        widths = replace(
            widths,
            partial=hidden * any(end.sums_apart for end in ends),
            normed=hidden * any(end.norms_apart for end in ends),
        )
        # Layers of one kind are alike.
        for mixer in {type(layer.mixer): layer.mixer for layer in self.layers}.values():
            widths = replace(widths, **mixer.widths())
        return widths

    def embed(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        communicator: Communicator,
        lay_over: LayOver = nothing_over,
    ) -> None:
        self.embedding.run(ids, out, communicator)
        if self._embedding_multiplier != 1.0:
            out.mul_(self._embedding_multiplier)
        lay_over(out)

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
        self.output.run(hidden, out)
        if self.config.logits_divisor != 1.0:
            out.div_(self.config.logits_divisor)
        softcap = self.config.final_softcap
        if softcap is not None:
            out.div_(softcap).tanh_().mul_(softcap)

    def draw(
        self,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: lm_head_sample.DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        self._draw(len(indices), hidden, indices, rows, logits, out_ids, out_status)

    def final(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self.pooled.run_norm(hidden, out)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.pooled.classify(features)
