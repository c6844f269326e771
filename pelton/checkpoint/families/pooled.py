"""What a family is called where it ends in hidden states or classes, not in tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.table import ARCHITECTURES, reader_of
from pelton.checkpoint.limits import MAX_INTERMEDIATE
from pelton.config.model import Activation, Classifier, ModelConfig
from pelton.errors import UnsupportedError

# transformers': the ending of the name, and what classifier such a checkpoint has.
_ENDINGS: tuple[tuple[str, Classifier], ...] = (
    ("ForSequenceClassification", "text"),
    ("ForTokenClassification", "token"),
    ("Model", ""),
)
_TOKENS = "ForCausalLM"
# In the name of a decoder whose tokens also see those behind them.
_BOTH_WAYS = "Bidirectional"
# transformers' default, whose labels config.json leaves out.
_DEFAULT_LABELS = 2
# Of decoders that were made encoders: the key "pooling".
_POOLINGS = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# sentence-transformers' word on a cross-encoder's scores: the last part of a name of torch's.
_TORCH_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}


def pooled_family(architecture: str) -> tuple[str, Classifier] | None:
    """The family's own architecture, and the classifier that this one adds; None if it is no such
    name."""
    for ending, classifier in _ENDINGS:
        if not architecture.endswith(ending):
            continue
        family = architecture.removesuffix(ending)
        # Decoders are listed with their head for tokens, encoders without; Gemma 3's layers have a
        # name of their own, Gemma3Text.
        names = family, family.removesuffix(_BOTH_WAYS), family.removesuffix("Text")
        for own in (*(name + _TOKENS for name in names), family + "Model"):
            if own in ARCHITECTURES:
                return own, classifier
    return None


def read_family(architecture: str, config: ConfigReader, dtype: str) -> ModelConfig:
    """The model that config.json describes, with its classifier if it has one."""
    pooled = None if architecture in ARCHITECTURES else pooled_family(architecture)
    if pooled is None:
        return _with_directions(reader_of(architecture)(config, dtype), architecture, config)
    family, classifier = pooled
    model = reader_of(family)(config, dtype)
    model = _with_directions(replace(model, has_lm_head=False), architecture, config)
    return replace(model, classifier=classifier, **labels(config)) if classifier else model


def _with_directions(model: ModelConfig, architecture: str, config: ConfigReader) -> ModelConfig:
    """As is_causal has it, or the name: whether a decoder's tokens see those behind them."""
    config.require("use_bidirectional_attention", False)
    sees_both = not config.boolean("is_causal", _BOTH_WAYS not in architecture)
    if not sees_both or model.encoder is not None:
        return model
    for name, has_it in (
        ("a sliding window", model.window is not None),
        ("recurrent layers", model.is_recurrent),
        ("attention sinks", model.attention_sinks),
        ("a cap on attention scores", model.attention_softcap is not None),
        ("one norm over all query heads", model.joint_qk_norm),
    ):
        if has_it:
            raise UnsupportedError(
                f"{config.where}: is_causal=false is not supported for a model with {name}."
            )
    config.require("pooling", *_POOLINGS)
    method = _POOLINGS[config.text("pooling", "avg")]
    return replace(model, is_bidirectional=True, pooling_method=method)


def labels(config: ConfigReader) -> dict[str, Any]:
    """The fields of ModelConfig that say what a classifier's classes are."""
    names = config.get("id2label")
    if names is not None and (not isinstance(names, dict) or not names):
        raise config.wrong("id2label", "an object with a name for each class")
    default = len(names) if names else _DEFAULT_LABELS
    num_labels = config.integer("num_labels", default, high=MAX_INTERMEDIATE)
    if names and len(names) != num_labels:
        raise config.wrong("num_labels", f"{len(names)}, as many as id2label has")
    config.require("problem_type", *_ACTIVATIONS)
    kind = config.get("problem_type")
    # One class is a probability of its own.
    activation = _ACTIVATIONS[kind] if kind else "softmax" if num_labels > 1 else "sigmoid"
    activation = _cross_encoder_activation(config) or activation
    return {"num_labels": num_labels, "label_activation": activation}


def _cross_encoder_activation(config: ConfigReader) -> Activation | None:
    """Where sentence-transformers has written what it makes of a classifier's scores."""
    nested = config.nested("sentence_transformers")
    for reader, key in (
        (nested, "activation_fn"),
        (config, "sbert_ce_default_activation_function"),
    ):
        if reader is not None and reader.get(key) is not None:
            name = reader.text(key)
            kind = name.rpartition(".")[2]
            if kind not in _TORCH_ACTIVATIONS:
                raise UnsupportedError(
                    f"{reader.where}: {key}={name!r} is not supported; it must be torch's "
                    f"{' or '.join(_TORCH_ACTIVATIONS)}."
                )
            return _TORCH_ACTIVATIONS[kind]
    return None
