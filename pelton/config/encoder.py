"""What an encoder has that no decoder has, read from its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ClassifierInner = Literal["", "tanh", "gelu_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """Every token sees all others of its text, so a text is computed in one step and nothing of it
    is kept. Norms are LayerNorms, of ModelConfig's rms_norm_eps.

    norms_first: whether norms stand before attention and the feed-forward network (all but the
        first layer's attention) and behind the last layer, or behind what each adds.
    norm_bias: whether norms have one.
    is_gated: whether the feed-forward network has a gate.
    num_positions: learned vectors of positions, of which a text's first token has first_position;
        0: positions are rotations. num_token_types: learned vectors of segments.
    classifier_inner: what stands before a classifier of texts: a product with tanh, or one with
        GELU and a norm, which stands before one of tokens too; classifier_inner_bias: whether the
        product has a bias.
    """

    norms_first: bool
    norm_bias: bool
    is_gated: bool
    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    classifier_inner: ClassifierInner = ""
    classifier_inner_bias: bool = False

    def inner_of(self, classifier: str) -> ClassifierInner:
        """What stands before a classifier of this kind, a ModelConfig's."""
        is_there = classifier == "text" or (classifier and self.classifier_inner == "gelu_norm")
        return self.classifier_inner if is_there else ""
