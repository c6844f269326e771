"""The files in which sentence-transformers says how a checkpoint's hidden states are pooled. No
torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.source import Checkpoint
from pelton.errors import CheckpointError, UnsupportedError

# Keys of 1_Pooling/config.json, and the method that each asks for.
_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_REFUSED = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """method: of pooling. normalises: whether vectors get length 1."""

    method: str
    normalises: bool


def read_sentence_modules(checkpoint: Checkpoint) -> SentenceModules | None:
    """What modules.json names behind the transformer; None where the checkpoint has no such file,
    or no pooling in it.

    Raises CheckpointError for files that are not what they should be, UnsupportedError for a module
    or a method that is not implemented.
    """
    path = checkpoint.folder / "modules.json"
    if checkpoint.config_path is None or not path.is_file():
        return None
    method, normalises = None, False
    for module in _load(path, list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{path}: must be a list of objects with a 'type' each.")
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            method = _method(checkpoint.folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalises = True
        elif kind != "Transformer":
            raise UnsupportedError(
                f"{path}: the module {module['type']!r} is not supported; Transformer, Pooling and "
                "Normalize are."
            )
    return None if method is None else SentenceModules(method=method, normalises=normalises)


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
