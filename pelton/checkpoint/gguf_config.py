"""A GGUF file's metadata as a model configuration.

Source of the keys: ggml's docs/gguf.md, "Standardized key-value pairs".
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable

import numpy as np

from pelton.checkpoint.gguf_header import READABLE_TYPES, GGUFHeader
from pelton.config.model import GenerationDefaults, ModelConfig, RopeConfig
from pelton.config.names import known_names
from pelton.errors import CheckpointError, UnsupportedError

_ROPE_FREQS = "rope_freqs.weight"
_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Metadata:
    """The metadata, read with types. Errors name the file, the key and its value."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        # Some values are lists of 100,000 strings.
        value = reprlib.repr(self.header.metadata.get(key))
        return CheckpointError(f"{self.header.path}: {key} must be {wanted}, got {value}.")

    def refused(self, key: str, wanted: str) -> UnsupportedError:
        value = self.header.metadata.get(key)
        return UnsupportedError(
            f"{self.header.path}: {key}={value!r} is not supported; it must be {wanted}."
        )

    def _get(self, key: str, is_required: bool) -> object:
        value = self.header.metadata.get(key)
        if value is None and is_required:
            raise CheckpointError(f"{self.header.path}: the required key {key!r} is missing.")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._get(key, default is None)
        if value is None:
            assert default is not None
            return default
        if type(value) is not int or not low <= value < 2**31:
            raise self.wrong(key, f"an integer from {low} to 2**31 - 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default is None)
        if value is None:
            assert default is not None
            return default
        if type(value) not in (int, float):
            raise self.wrong(key, "a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number) or number <= 0:
            raise self.wrong(key, "a finite number above 0")
        return number

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default is None)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value


def is_quantised(header: GGUFHeader) -> bool:
    """Whether any weight is stored in blocks with a scale."""
    return any(tensor.type.block_size > 1 for tensor in header.tensors.values())


def _dtype(header: GGUFHeader) -> str:
    """The matrices' common type; "float32" when they are quantised or differ."""
    types = {t.type.name for t in header.tensors.values() if len(t.shape) > 1}
    return _FLOAT_TYPES.get(types.pop(), "float32") if len(types) == 1 else "float32"


def _vocab_size(meta: _Metadata, prefix: str) -> int:
    """The list of tokens decides; without one, the key."""
    tokens = meta.header.metadata.get("tokenizer.ggml.tokens")
    key = f"{prefix}.vocab_size"
    if not isinstance(tokens, list) or not tokens:
        return meta.integer(key)
    if meta.integer(key, len(tokens)) != len(tokens):
        raise meta.wrong(key, f"the number of tokenizer.ggml.tokens, {len(tokens)}")
    return len(tokens)


def _llama3_divisors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """[rotary_dim / 2] by how much Llama 3.1 divides each inverse frequency.

    Source: Llama 3.1's reference implementation, `apply_scaling`.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    # 1 where the wavelength is short (kept), 0 where it is long (divided by the factor).
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    result: np.ndarray = 1.0 / ((1 - smooth) / factor + smooth)
    return result


def _llama3_rope(header: GGUFHeader, rotary_dim: int, theta: float) -> RopeConfig:
    """The scaling whose divisors the file stores as a tensor, recovered and checked.

    Files hold the divisors and not their parameters. All Llama 3.1 to 3.3 checkpoints use
    low_freq_factor 1, high_freq_factor 4 and 8192 positions, and the factor is the largest divisor;
    if these do not give the tensor's values, it is refused.
    """
    tensor = header.tensors[_ROPE_FREQS]
    if tensor.type.name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"{header.path}: tensor {_ROPE_FREQS!r} must be F32 of shape ({rotary_dim // 2},), got "
            f"{tensor.type.name} of shape {tensor.shape}."
        )
    divisors = np.fromfile(tensor.path, "<f4", rotary_dim // 2, offset=tensor.start)
    factor = float(divisors.max())
    if math.isfinite(factor) and factor >= 1.0:
        expected = _llama3_divisors(theta, rotary_dim, factor, 1.0, 4.0, 8192)
        if np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
            return RopeConfig(
                rotary_dim=rotary_dim,
                theta=theta,
                kind="llama3",
                factor=factor,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=8192,
            )
    raise UnsupportedError(
        f"{header.path}: tensor {_ROPE_FREQS!r} holds rope factors that are not Llama 3's "
        "(low_freq_factor 1, high_freq_factor 4, 8192 positions) and are not supported."
    )


def _rope(meta: _Metadata, head_dim: int) -> RopeConfig:
    theta = meta.number("llama.rope.freq_base", 10000.0)
    if meta.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise meta.refused("llama.rope.dimension_count", f"the head dimension, {head_dim}")
    key = "llama.rope.scaling.type"
    # Before llama.rope.scaling.* there was one key, for linear scaling only.
    old_factor = meta.number("llama.rope.scale_linear", 1.0)
    kind = meta.text(key, "linear" if old_factor != 1.0 else "none")
    if kind not in ("none", "linear"):
        raise meta.refused(key, "'none' or 'linear'")
    factor = meta.number("llama.rope.scaling.factor", old_factor) if kind == "linear" else 1.0
    if _ROPE_FREQS in meta.header.tensors:
        if factor != 1.0:
            raise UnsupportedError(
                f"{meta.header.path}: {key}='linear' together with the tensor {_ROPE_FREQS!r} is "
                "not supported."
            )
        return _llama3_rope(meta.header, head_dim, theta)
    if factor == 1.0:
        return RopeConfig(rotary_dim=head_dim, theta=theta)
    return RopeConfig(rotary_dim=head_dim, theta=theta, kind="linear", factor=factor)


def _llama(meta: _Metadata) -> ModelConfig:
    for key in ("llama.expert_count", "llama.attention.sliding_window"):
        if meta.integer(key, 0, low=0):
            raise meta.refused(key, "0 or absent")
    hidden_size = meta.integer("llama.embedding_length")
    num_heads = meta.integer("llama.attention.head_count")
    num_kv_heads = meta.integer("llama.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise meta.wrong("llama.attention.head_count_kv", f"a divisor of head_count={num_heads}")
    key = "llama.attention.key_length"
    if meta.header.metadata.get(key) is None and hidden_size % num_heads:
        raise meta.wrong("llama.attention.head_count", f"a divisor of {hidden_size}")
    head_dim = meta.integer(key, hidden_size // num_heads)
    if head_dim % 2:
        raise meta.wrong(key, "even")
    if meta.integer("llama.attention.value_length", head_dim) != head_dim:
        raise meta.refused("llama.attention.value_length", f"the key length, {head_dim}")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=hidden_size,
        intermediate_size=meta.integer("llama.feed_forward_length"),
        num_layers=meta.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(meta, "llama"),
        rms_norm_eps=meta.number("llama.attention.layer_norm_rms_epsilon"),
        hidden_act="silu",
        rope=_rope(meta, head_dim),
        tie_word_embeddings="output.weight" not in meta.header.tensors,
        attention_bias="blk.0.attn_q.bias" in meta.header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in meta.header.tensors,
        max_position=meta.integer("llama.context_length"),
        checkpoint_dtype=_dtype(meta.header),
    )


ARCHITECTURES: dict[str, Callable[[_Metadata], ModelConfig]] = {"llama": _llama}


def gguf_model_config(header: GGUFHeader) -> ModelConfig:
    """What the file says of its model.

    Raises CheckpointError (missing key, wrong type) and UnsupportedError (an architecture, value or
    tensor type that is not implemented, by name).
    """
    meta = _Metadata(header)
    architecture = meta.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{header.path}: general.architecture={architecture!r} is not supported."
            + known_names(architecture, ARCHITECTURES)
        )
    for name, tensor in header.tensors.items():
        if tensor.type.name not in READABLE_TYPES:
            raise UnsupportedError(
                f"{tensor.path}: tensor {name!r} has type {tensor.type.name}, which is not "
                f"supported; supported: {', '.join(READABLE_TYPES)}."
            )
    return ARCHITECTURES[architecture](meta)


def _token_id(meta: _Metadata, key: str, vocab_size: int) -> int | None:
    if key not in meta.header.metadata:
        return None
    value = meta.integer(key, low=0)
    if value >= vocab_size:
        raise meta.wrong(key, f"a token id from 0 to {vocab_size - 1}")
    return value


def gguf_generation_defaults(header: GGUFHeader) -> GenerationDefaults:
    """End tokens from the tokenizer's metadata: eos, and eot where the file names one besides.

    Raises CheckpointError for token ids outside the vocabulary.
    """
    meta = _Metadata(header)
    vocab_size = _vocab_size(meta, meta.text("general.architecture"))
    ends = (
        _token_id(meta, f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("eos", "eot")
    )
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=_token_id(meta, "tokenizer.ggml.bos_token_id", vocab_size),
        pad_token_id=_token_id(meta, "tokenizer.ggml.padding_token_id", vocab_size),
    )
