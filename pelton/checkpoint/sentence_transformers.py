"""The files in which sentence-transformers says how a checkpoint's hidden states are pooled. No
torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.limits import MAX_HIDDEN
from pelton.checkpoint.safetensors_header import read_safetensors_header
from pelton.checkpoint.source import Checkpoint
from pelton.config.pooling import (
    SIMILARITIES,
    Projection,
    ProjectionActivation,
    Similarity,
)
from pelton.errors import CheckpointError, UnsupportedError

# Keys of 1_Pooling/config.json, and the method that each asks for.
_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS: dict[str, ProjectionActivation] = {"Tanh": "tanh", "Identity": "identity"}
_REFUSED = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)

_TRANSFORMER_FILES = (
    "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """method: of pooling. projections: behind it. normalises: whether vectors get length 1 at the
    end. max_prompt_tokens: of a text, special tokens included, or None. dimensions: of vectors,
    unless a request says another number; None: all. similarity: of two vectors."""

    method: str
    normalises: bool
    max_prompt_tokens: int | None = None
    projections: tuple[Projection, ...] = ()
    dimensions: int | None = None
    similarity: Similarity = "cosine"


def read_sentence_modules(checkpoint: Checkpoint) -> SentenceModules | None:
    """What modules.json names behind the transformer; None where the checkpoint has no such file,
    or no pooling in it.

    Raises CheckpointError for files that are not what they should be, UnsupportedError for a module
    or a method that is not implemented.
    """
    path = checkpoint.folder / "modules.json"
    if checkpoint.config_path is None or not path.is_file():
        return None
    method, normalises, most = None, False, None
    projections: list[Projection] = []
    for module in _load(path, list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{path}: must be a list of objects with a 'type' each.")
        kind = module["type"].rpartition(".")[2]
        folder = checkpoint.folder / str(module.get("path", ""))
        if kind == "Pooling":
            method = _method(folder / "config.json")
        elif kind == "Normalize":
            normalises = True
        elif kind == "Dense" and method is not None and not normalises:
            projections.append(_projection(folder))
        elif kind == "Transformer":
            most = _max_prompt_tokens(folder)
        else:
            raise UnsupportedError(
                f"{path}: the module {module['type']!r} is not supported at its place; "
                "Transformer, Pooling, Dense and Normalize are, in this order."
            )
    if method is None:
        return None
    dimensions, similarity = _of_vectors(
        checkpoint.folder / "config_sentence_transformers.json", normalises
    )
    return SentenceModules(
        method=method,
        normalises=normalises,
        max_prompt_tokens=most,
        projections=tuple(projections),
        dimensions=dimensions,
        similarity=similarity,
    )


def _projection(folder: Path) -> Projection:
    path, file = folder / "config.json", folder / "model.safetensors"
    config = ConfigReader(_load(path, dict), str(path))
    name = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    kind = name.rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{path}: activation_function={name!r} is not supported; Tanh and Identity are."
        )
    if not file.is_file():
        raise CheckpointError(f"{file}: there is no such file; weights are read from safetensors.")
    projection = Projection(
        file=str(file),
        in_features=config.integer("in_features", high=MAX_HIDDEN),
        out_features=config.integer("out_features", high=MAX_HIDDEN),
        has_bias=config.boolean("bias", True),
        activation=_ACTIVATIONS[kind],
    )
    _check_tensors(file, projection)
    return projection


def _check_tensors(file: Path, projection: Projection) -> None:
    wanted: dict[str, tuple[int, ...]] = {
        "linear.weight": (projection.out_features, projection.in_features)
    }
    if projection.has_bias:
        wanted["linear.bias"] = (projection.out_features,)
    found = {name: tensor.shape for name, tensor in read_safetensors_header(file).items()}
    if found != wanted:
        raise CheckpointError(f"{file}: must hold {wanted}, and holds {found}.")


def _max_prompt_tokens(folder: Path) -> int | None:
    """What the transformer's own file says; its name has the family's in it."""
    for name in _TRANSFORMER_FILES:
        path = folder / f"sentence_{name}_config.json"
        if path.is_file():
            config = ConfigReader(_load(path, dict), str(path))
            config.require("do_lower_case", False)
            given = config.get("max_seq_length") is not None
            return config.integer("max_seq_length") if given else None
    return None


def _of_vectors(path: Path, normalises: bool) -> tuple[int | None, Similarity]:
    """truncate_dim and similarity_fn_name."""
    if not path.is_file():
        return None, "cosine"
    config = ConfigReader(_load(path, dict), str(path))
    # Texts may be meant to have an instruction before them; whoever asks writes it.
    config.require("default_prompt_name")
    given = config.get("truncate_dim") is not None
    dimensions = config.integer("truncate_dim", high=MAX_HIDDEN) if given else None
    similarity: Similarity = "cosine"
    if config.get("similarity_fn_name") is not None:
        config.require("similarity_fn_name", *SIMILARITIES)
        similarity = config.get("similarity_fn_name")
    if dimensions is not None and normalises and similarity != "cosine":
        # Vectors are cut here before they get length 1, there behind it: only a cosine is the same.
        raise UnsupportedError(
            f"{path}: truncate_dim={dimensions} with similarity_fn_name={similarity!r} is not "
            "supported where modules.json names Normalize; cosine is."
        )
    return dimensions, similarity


def _method(path: Path) -> str:
    config = ConfigReader(_load(path, dict), str(path))
    for key in _REFUSED:
        config.require(key, False)
    # The newer files have a word instead of a key for each method.
    word = config.get("pooling_mode")
    if word is not None:
        config.require("pooling_mode", "cls", "mean", "lasttoken")
        return "last" if word == "lasttoken" else str(word)
    found = [method for key, method in _METHODS.items() if config.boolean(key, False)]
    if len(found) != 1:
        raise UnsupportedError(
            f"{path}: one way of pooling must be chosen, got {', '.join(found) or 'none'}."
        )
    return found[0]


def _load(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}.") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: must hold a JSON {kind.__name__}.")
    return value
