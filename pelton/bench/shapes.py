"""Shapes of well-known models, for measuring without their files: the weights are random."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from pelton.config.engine import EngineArgs
from pelton.config.names import known_names
from pelton.errors import ConfigError

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# name -> config.json, as the models' authors publish them.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
}


def with_shape(args: EngineArgs, shape: str | None, *, has_tokenizer: bool = False) -> EngineArgs:
    """`args` with a random model of that shape, or as they are without one. has_tokenizer: the
    model gets one, too, for servers.

    Raises ConfigError for a shape that is not known, and for one beside a model.
    """
    if shape is None:
        return args
    if shape not in SHAPES:
        raise ConfigError(f"model_shape={shape!r} is not known." + known_names(shape, SHAPES))
    if args.model is not None or args.load_format not in ("auto", "dummy"):
        raise ConfigError(
            f"model_shape={shape!r} stands for a random model, and model={args.model!r} with "
            f"load_format={args.load_format!r} was given; leave one of them out."
        )
    folder = Path(tempfile.mkdtemp(prefix="pelton-shape-")) / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    if has_tokenizer:
        write_tokenizer(folder, SHAPES[shape]["vocab_size"])
    return dataclasses.replace(args, model=str(folder), load_format="dummy")


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose tokens are some letters each: byte-level, without merges."""
    # GPT-2's names of the bytes: those that print stand for themselves, the others follow.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [0x100 + place for place in range(256 - len(printable))]
    names = [chr(code) for code in [*printable, *others]]
    names += [f"Ġ{number:x}" for number in range(vocab_size - len(names))]
    vocab = {name: number for number, name in enumerate(names[:vocab_size])}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    text = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes_,
        "decoder": bytes_,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(text))
