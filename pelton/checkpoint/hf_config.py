"""config.json and generation_config.json, read with types: nothing is guessed or skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from pelton.checkpoint.gguf_config import gguf_generation_defaults, gguf_model_config
from pelton.checkpoint.gguf_header import read_gguf_header
from pelton.checkpoint.safetensors_header import read_safetensors_header
from pelton.checkpoint.source import Checkpoint
from pelton.config.model import GenerationDefaults, ModelConfig, RopeConfig, RopeKind
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


class ConfigReader:
    """A JSON object whose keys are read with a type. null counts as absent, as transformers has it.

    Errors name the file (or `where`, for a nested object), the key and its value. Raises
    CheckpointError for what is missing or has the wrong type, UnsupportedError for `require`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        self.read.add(key)
        return self.values.get(key)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {key} must be {wanted}, got {self.values.get(key)!r}."
        )

    def _given(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.where}: the required key {key!r} is missing.")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer >= low; required unless there is a default."""
        value = self._given(key) if default is None else self.get(key)
        if value is None:
            return cast(int, default)
        if type(value) is not int or not low <= value < 2**31:
            raise self.wrong(key, f"an integer from {low} to 2**31 - 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number > 0; required unless there is a default."""
        value = self._given(key) if default is None else self.get(key)
        if value is None:
            return cast(float, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key) if default is None else self.get(key)
        if value is None:
            return cast(str, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def nested(self, key: str) -> ConfigReader | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse values that change the model in a way that is not implemented. Absent is fine."""
        value = self.get(key)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in allowed
        ):
            wanted = " or ".join(json.dumps(one) for one in (*allowed, None))
            raise UnsupportedError(
                f"{self.where}: {key}={json.dumps(value)} is not supported; it must be {wanted}."
            )


def _rope(config: ConfigReader, rotary_dim: int, max_position: int) -> RopeConfig:
    """From transformers 5's rope_parameters, or rope_theta and rope_scaling of before."""
    theta = config.number("rope_theta", 10000.0)
    parameters, scaling = config.nested("rope_parameters"), config.nested("rope_scaling")
    reader = parameters or scaling
    if reader is None:
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    if parameters is not None and scaling is not None and parameters.values != scaling.values:
        raise CheckpointError(
            f"{config.where}: rope_parameters and rope_scaling contradict each other."
        )
    theta = reader.number("rope_theta", theta)
    reader.require("partial_rotary_factor", 1.0, 1)
    key = (
        "type"
        if reader.get("rope_type") is None and reader.get("type") is not None
        else "rope_type"
    )
    kind = reader.text(key, "default")
    if kind == "default":
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    if kind == "linear":
        return RopeConfig(
            rotary_dim=rotary_dim, theta=theta, kind="linear", factor=reader.number("factor")
        )
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if low >= high:
            raise reader.wrong("low_freq_factor", f"below high_freq_factor={high:g}")
        return RopeConfig(
            rotary_dim=rotary_dim,
            theta=theta,
            kind=cast(RopeKind, kind),
            factor=reader.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=reader.integer("original_max_position_embeddings", max_position),
        )
    raise UnsupportedError(
        f'{reader.where}: {key}="{kind}" is not supported; it must be "default", "linear" or '
        '"llama3".'
    )


def _llama(config: ConfigReader, dtype: str) -> ModelConfig:
    """LlamaForCausalLM: Llama 1 to 3, SmolLM2. Defaults are transformers' LlamaConfig's."""
    config.require("hidden_act", "silu")
    config.require("pretraining_tp", 1)
    config.require("quantization_config")
    config.require("sliding_window")
    config.require("use_sliding_window", False)
    config.require("layer_types")
    config.require("rope_interleaved", False)
    config.require("partial_rotary_factor", 1.0, 1)
    config.require("attn_logit_softcapping")
    config.require("final_logit_softcapping")
    config.require("num_local_experts")
    config.require("num_experts")
    config.require("is_encoder_decoder", False)
    config.require("add_cross_attention", False)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.wrong(
            "num_attention_heads", f"a divisor of hidden_size={hidden_size} (head_dim is absent)"
        )
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{config.where}: head_dim must be even, got {head_dim}.")
    max_position = config.integer("max_position_embeddings")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        hidden_act=config.text("hidden_act"),
        rope=_rope(config, head_dim, max_position),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        max_position=max_position,
        checkpoint_dtype=dtype,
    )


ARCHITECTURES: dict[str, Callable[[ConfigReader, str], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
}


def _architecture(config: ConfigReader) -> str:
    names = config.get("architectures")
    if names is None:
        raise CheckpointError(f"{config.where}: the required key 'architectures' is missing.")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.wrong("architectures", "a list with one name")
    if names[0] not in ARCHITECTURES:
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
    model = ARCHITECTURES[architecture](config, _checkpoint_dtype(config, checkpoint))
    # eos_token_id and its kin are read below, by read_generation_defaults, without overrides.
    for key in overrides:
        if key not in config.read:
            raise ConfigError(
                f"hf_overrides: {key!r} is not a key that {architecture} reads."
                + known_names(key, config.read)
            )
    return model


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
    if not config.boolean("do_sample", False):
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
    if config.get("top_k") is not None:
        result["top_k"] = config.integer("top_k", low=-1)
    return result


def read_generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """What the authors say of generation: generation_config.json, and config.json for what that
    file leaves out. Sampling values count only under do_sample=true, as in transformers.

    Raises CheckpointError for wrong types, and for token ids outside the vocabulary.
    """
    if checkpoint.config_path is None:
        return gguf_generation_defaults(read_gguf_header(checkpoint.files[0]))
    config = ConfigReader(_load_json(checkpoint.config_path), str(checkpoint.config_path))
    vocab_size = config.integer("vocab_size")
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


def _pad_id(config: ConfigReader, vocab_size: int) -> int | None:
    # Early Llama files say -1, or one past the vocabulary, for "none"; generation never pads.
    value = config.get("pad_token_id")
    return value if type(value) is int and 0 <= value < vocab_size else None
