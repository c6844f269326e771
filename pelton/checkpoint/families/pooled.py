"""What a decoder family is called where it ends in hidden states or classes, not in tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.table import ARCHITECTURES, reader_of
from pelton.checkpoint.limits import MAX_INTERMEDIATE
from pelton.config.model import Activation, Classifier, ModelConfig

# transformers': the ending of the name, and what classifier such a checkpoint has.
_ENDINGS: tuple[tuple[str, Classifier], ...] = (
    ("ForSequenceClassification", "text"),
    ("ForTokenClassification", "token"),
    ("Model", ""),
)
_TOKENS = "ForCausalLM"
# transformers' default, whose labels config.json leaves out.
_DEFAULT_LABELS = 2
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def pooled_family(architecture: str) -> tuple[str, Classifier] | None:
    """The family's own architecture, and the classifier that this one adds; None if it is no such
    name."""
    for ending, classifier in _ENDINGS:
        family = architecture.removesuffix(ending) + _TOKENS
        if architecture.endswith(ending) and family in ARCHITECTURES:
            return family, classifier
    return None


def read_family(architecture: str, config: ConfigReader, dtype: str) -> ModelConfig:
    """The model that config.json describes, with its classifier if it has one."""
    pooled = None if architecture in ARCHITECTURES else pooled_family(architecture)
    if pooled is None:
        return reader_of(architecture)(config, dtype)
    family, classifier = pooled
    model = reader_of(family)(config, dtype)
    model = replace(model, has_lm_head=False)
    return replace(model, classifier=classifier, **labels(config)) if classifier else model


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
    return {"num_labels": num_labels, "label_activation": activation}
