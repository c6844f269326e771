"""An encoder: embeddings with a norm, layers in which all tokens of a text see each other, and what
its last hidden states are for.

A family is a subclass with its weight names, of the body and of what classifiers add; ModelConfig
says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from pelton.batch.prompt_embeds import LayOver, nothing_over
from pelton.checkpoint.name_map import NameRules, Rule
from pelton.config.model import Classifier, ModelConfig
from pelton.core.kv.spec import LayerKV
from pelton.layers.context import BuildContext, Communicator, StepContext, Widths
from pelton.layers.embedding import Embedding
from pelton.layers.encoder import EncoderLayer, EncoderMetadata, LayerNorm
from pelton.layers.encoder_classifier import EncoderClassifier
from pelton.layers.parameter import Parameter, whole
from pelton.ops.lm_head_sample import DrawRows


class Encoder:
    body: ClassVar[NameRules]
    classifiers: ClassVar[Mapping[Classifier, tuple[Rule, ...]]]

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        encoder = config.encoder
        assert encoder is not None
        self.config = config
        rules = self.names_for(config.classifier)
        self.names: Mapping[str, NameRules] = {"safetensors": rules, "dummy": rules}
        self.num_layers = config.num_layers
        self.vocab_shard_size = 0
        self.embedding = Embedding(build, config.vocab_size, config.hidden_size)
        self._tables = {
            name: _table(build, rows, config.hidden_size)
            for name, rows in (
                ("positions", encoder.num_positions),
                ("token_types", encoder.num_token_types),
            )
            if rows
        }
        self._first_position = encoder.first_position

        def norm() -> LayerNorm:
            return LayerNorm(
                build, config.hidden_size, eps=config.rms_norm_eps, has_bias=encoder.norm_bias
            )

        self.input_norm = norm()
        self.layers = [EncoderLayer(build, config, encoder, i) for i in range(config.num_layers)]
        self.final_norm = norm() if encoder.norms_first else None
        self.classifier = EncoderClassifier(build, config, encoder) if config.classifier else None

    @classmethod
    def names_for(cls, classifier: Classifier) -> NameRules:
        """Some of what is left out of an encoder alone may be its classifier's."""
        added = cls.classifiers.get(classifier, ())
        sources = {rule.source for rule in added}
        return NameRules(
            rules=(*cls.body.rules, *added),
            ignored=tuple(name for name in cls.body.ignored if name not in sources),
        )

    def parameters(self) -> dict[str, Parameter]:
        named = {"embed.weight": self.embedding.weight}
        named.update({f"{name}.weight": table for name, table in self._tables.items()})
        named.update(self.input_norm.parameters("input_norm"))
        for index, layer in enumerate(self.layers):
            named.update(layer.parameters(f"layers.{index}"))
        if self.final_norm is not None:
            named.update(self.final_norm.parameters("final_norm"))
        if self.classifier is not None:
            named.update(self.classifier.parameters())
        return named

    def bind(self) -> None:
        self.embedding.bind()
        for layer in self.layers:
            layer.bind()
        if self.classifier is not None:
            self.classifier.bind()

    def kv_layers(self, block_size: int) -> list[LayerKV]:
        """None: nothing is kept of a text."""
        return []

    def widths(self) -> Widths:
        layer = self.layers[0]
        return Widths(
            hidden=self.config.hidden_size,
            gate_up=2 * layer.mlp.width if layer.mlp.is_gated else 0,
            activation=layer.mlp.width,
            normed=self.config.hidden_size if self.final_norm is not None else 0,
            **layer.attention.widths(),
        )

    def embed(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        communicator: Communicator,
        lay_over: LayOver = nothing_over,
    ) -> None:
        """Of the tokens alone, as transformers takes `inputs_embeds`: the layers add the rest."""
        self.embedding.run(ids, out, communicator)
        lay_over(out)

    def run_layers(
        self,
        lo: int,
        hi: int,
        ctx: StepContext,
        taps: Sequence[int] = (),
        rows: Sequence[int] = (),
    ) -> None:
        assert not taps, "no drafter asks for hidden states of an encoder"
        assert not rows, "no layer shares another's keys and values"
        if lo == 0:
            self._complete_embeddings(ctx)
        for layer in self.layers[lo:hi]:
            layer.run(ctx)

    def _complete_embeddings(self, ctx: StepContext) -> None:
        metadata, hidden = ctx.metadata[0], ctx.buffers.hidden
        assert isinstance(metadata, EncoderMetadata)
        if "token_types" in self._tables:
            table = self._tables["token_types"].tensor
            types = metadata.token_types
            hidden.add_(table[0] if types is None else table.index_select(0, types))
        if "positions" in self._tables:
            table = self._tables["positions"].tensor
            places = metadata.positions
            if self._first_position:
                places = places + self._first_position
            hidden.add_(table.index_select(0, places))
        self.input_norm.run(hidden, hidden)

    def head(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("an encoder has no head for tokens")

    def draw(
        self,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        raise AssertionError("an encoder has no head for tokens")

    def final(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [N, H] behind the last layer -> out: [N, H], what is pooled."""
        if self.final_norm is None:
            out.copy_(hidden)
        else:
            self.final_norm.run(hidden, out)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        assert self.classifier is not None, "without a classifier there are no such tasks"
        return self.classifier.run(features)


def _table(build: BuildContext, rows: int, width: int) -> Parameter:
    return Parameter(build.weight(rows, width), {None: whole((rows, width))})
