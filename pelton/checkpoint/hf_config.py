"""config.json and generation_config.json, read with types: nothing is guessed or skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.pooled import pooled_family, read_family
from pelton.checkpoint.families.table import ARCHITECTURES
from pelton.checkpoint.gguf_config import gguf_generation_defaults, gguf_model_config
from pelton.checkpoint.gguf_header import read_gguf_header
from pelton.checkpoint.limits import MAX_VOCAB
from pelton.checkpoint.safetensors_header import read_safetensors_header
from pelton.checkpoint.source import Checkpoint
from pelton.config.model import GenerationDefaults, ModelConfig
from pelton.config.names import known_names
from pelton.errors import CheckpointError, ConfigError, UnsupportedError

_DTYPES = ("float32", "bfloat16", "float16")
_HEADER_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object.")
    return value


def _architecture(config: ConfigReader) -> str:
    names = config.get("architectures")
    if names is None:
        raise CheckpointError(f"{config.where}: the required key 'architectures' is missing.")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.wrong("architectures", "a list with one name")
    if names[0] not in ARCHITECTURES and pooled_family(names[0]) is None:
        raise UnsupportedError(
            f"{config.where}: architecture {names[0]!r} is not supported."
            + known_names(names[0], ARCHITECTURES)
        )
    return names[0]


def _checkpoint_dtype(config: ConfigReader, checkpoint: Checkpoint) -> str:
    """config.json's dtype (torch_dtype before transformers 5), or else the largest tensor's."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    dtype = config.text(key, "").removeprefix("torch.")
    if not dtype and checkpoint.files:
        tensors = read_safetensors_header(checkpoint.files[0]).values()
        largest = max(tensors, key=lambda tensor: tensor.end - tensor.start, default=None)
        return _HEADER_DTYPES.get(largest.dtype, "float32") if largest else "float32"
    if not dtype:
        return "float32"
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f'{config.where}: {key}="{dtype}" is not supported; it must be one of '
            f"{', '.join(_DTYPES)}."
        )
    return dtype


def read_model_config(
    checkpoint: Checkpoint, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """What the checkpoint says of its model. overrides replace config.json's top-level keys.

    Raises CheckpointError (missing key, wrong type), UnsupportedError (a value or architecture that
    is not implemented, by name), ConfigError (an override that nothing reads).
    """
    overrides = overrides or {}
    if checkpoint.config_path is None:
        if overrides:
            raise ConfigError(
                f"hf_overrides replaces keys of config.json, and the GGUF file {checkpoint.name!r} "
                f"has none; leave out {', '.join(map(repr, overrides))}."
            )
        return gguf_model_config(read_gguf_header(checkpoint.files[0]))
    where = str(checkpoint.config_path)
    if overrides:
        where += f" with hf_overrides of {', '.join(overrides)}"
    config = ConfigReader({**_load_json(checkpoint.config_path), **overrides}, where)
    architecture = _architecture(config)
    model = read_family(architecture, config, _checkpoint_dtype(config, checkpoint))
    # eos_token_id and its kin are read below, by read_generation_defaults, without overrides.
    for key in overrides:
        if key not in config.read:
            raise ConfigError(
                f"hf_overrides: {key!r} is not a key that {architecture} reads."
                + known_names(key, config.read)
            )
    return replace(model, max_position=model.rope.context(model.max_position))


def _token_id(config: ConfigReader, key: str, vocab_size: int) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    return _checked_id(config, key, value, vocab_size)


def _checked_id(config: ConfigReader, key: str, value: Any, vocab_size: int) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise config.wrong(key, f"made of token ids from 0 to vocab_size - 1 = {vocab_size - 1}")
    return value


def _eos_ids(config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(_checked_id(config, "eos_token_id", one, vocab_size) for one in ids))


def _sampling(config: ConfigReader) -> dict[str, float | int]:
    """The sampling defaults, with the ranges that SamplingParams allows."""
    if not config.boolean("do_sample", True):
        return {}
    result: dict[str, float | int] = {}
    for key, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
        value = config.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high:
            raise config.wrong(key, f"a number from {low:g} to {high:g}")
        if key == "top_p" and value == 0:
            raise config.wrong(key, "above 0")
        result[key] = value
    penalty = config.get("repetition_penalty")
    if penalty is not None:
        if type(penalty) not in (int, float) or not 0 < penalty <= 1e6:
            raise config.wrong("repetition_penalty", "a number above 0")
        result["repetition_penalty"] = penalty
    if config.get("top_k") is not None:
        result["top_k"] = config.integer("top_k", low=-1)
    return result


def read_generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """What the authors say of generation: generation_config.json, and config.json for what that
    file leaves out. Sampling values count unless do_sample is false.

    Raises CheckpointError for wrong types, and for token ids outside the vocabulary.
    """
    if checkpoint.config_path is None:
        return gguf_generation_defaults(read_gguf_header(checkpoint.files[0]))
    config = ConfigReader(_load_json(checkpoint.config_path), str(checkpoint.config_path))
    vocab_size = config.integer("vocab_size", high=MAX_VOCAB)
    path = checkpoint.folder / "generation_config.json"
    generation = ConfigReader(_load_json(path) if path.is_file() else {}, str(path))
    bos = _token_id(generation, "bos_token_id", vocab_size)
    pad = _pad_id(generation, vocab_size)
    return GenerationDefaults(
        eos_token_ids=_eos_ids(generation, vocab_size) or _eos_ids(config, vocab_size),
        bos_token_id=bos if bos is not None else _token_id(config, "bos_token_id", vocab_size),
        pad_token_id=pad if pad is not None else _pad_id(config, vocab_size),
        sampling=_sampling(generation),
    )


def read_generation_config(
    folder: Path, own: GenerationDefaults, *, vocab_size: int
) -> GenerationDefaults:
    """What the generation_config.json of another folder says, and `own` where it is about tokens
    and says nothing.

    Raises ConfigError if there is no such file, CheckpointError as `read_generation_defaults`.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        raise ConfigError(
            f"generation_config={str(folder)!r} must be a folder that holds a "
            'generation_config.json, or "auto", "vllm" or "none".'
        )
    generation = ConfigReader(_load_json(path), str(path))
    bos = _token_id(generation, "bos_token_id", vocab_size)
    pad = _pad_id(generation, vocab_size)
    return GenerationDefaults(
        eos_token_ids=_eos_ids(generation, vocab_size) or own.eos_token_ids,
        bos_token_id=own.bos_token_id if bos is None else bos,
        pad_token_id=own.pad_token_id if pad is None else pad,
        sampling=_sampling(generation),
    )


def _pad_id(config: ConfigReader, vocab_size: int) -> int | None:
    # Early Llama files say -1, or one past the vocabulary, for "none"; generation never pads.
    value = config.get("pad_token_id")
    return value if type(value) is int and 0 <= value < vocab_size else None
