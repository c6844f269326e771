"""A GGUF file's metadata as a model configuration.

Sources: ggml's docs/gguf.md, "Standardized key-value pairs", and, for what no key says, what
llama.cpp does with a family's files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from pelton.checkpoint.gguf_header import READABLE_TYPES, GGUFHeader
from pelton.checkpoint.gguf_metadata import Metadata
from pelton.checkpoint.gguf_rope import read_rope
from pelton.checkpoint.limits import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
)
from pelton.config.model import GenerationDefaults, LayerKind, ModelConfig, RopeConfig
from pelton.config.names import known_names
from pelton.errors import UnsupportedError

_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Keys that change nothing in the families below, whatever their value.
_IGNORED = (
    "attention.layer_norm_epsilon",  # all norms are RMS norms
    "expert_used_count",  # expert_count is read
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # kinds that need it read it
    "tensor_data_layout",  # of the file's maker; old, and true of every file
)
# Keys that change nothing when they have this value; another is refused.
_NEUTRAL: dict[str, object] = {
    "attention.causal": True,
    "expert_count": 0,
    "nextn_predict_layers": 0,
    "norm_top_k_prob": True,  # of Ollama's converter, for experts
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "use_parallel_residual": False,
}


def is_quantised(header: GGUFHeader) -> bool:
    """Whether any weight is stored in blocks with a scale."""
    return any(tensor.type.block_size > 1 for tensor in header.tensors.values())


def block_sizes(header: GGUFHeader, forms: Collection[str]) -> tuple[int, int]:
    """(elements, bytes) of the matrices that are stored in types of these names."""
    found = [t for t in header.tensors.values() if t.type.name in forms and len(t.shape) == 2]
    return sum(math.prod(t.shape) for t in found), sum(t.end - t.start for t in found)


def _dtype(header: GGUFHeader) -> str:
    """The matrices' common type; "float32" when they are quantised or differ."""
    types = {t.type.name for t in header.tensors.values() if len(t.shape) > 1}
    return _FLOAT_TYPES.get(types.pop(), "float32") if len(types) == 1 else "float32"


def _vocab_size(meta: Metadata) -> int:
    """The list of tokens decides; without one, the key."""
    tokens = meta.header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        return meta.integer("vocab_size", high=MAX_VOCAB)
    if meta.integer("vocab_size", len(tokens)) != len(tokens):
        raise meta.wrong("vocab_size", f"the number of tokenizer.ggml.tokens, {len(tokens)}")
    return len(tokens)


def _shared(meta: Metadata) -> dict[str, Any]:
    """ModelConfig's fields that all families have alike."""
    hidden_size = meta.integer("embedding_length", high=MAX_HIDDEN)
    num_heads = meta.integer("attention.head_count", high=MAX_HEADS)
    num_kv_heads = meta.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise meta.wrong("attention.head_count_kv", f"a divisor of head_count={num_heads}")
    if meta.get("attention.key_length") is None and hidden_size % num_heads:
        raise meta.wrong("attention.head_count", f"a divisor of {hidden_size}")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads, high=MAX_HEAD_DIM)
    if head_dim % 2:
        raise meta.wrong("attention.key_length", "even")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.refused("attention.value_length", f"the key length, {head_dim}")
    tensors = meta.header.tensors
    qkv_bias = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
    attention_bias = qkv_bias and "blk.0.attn_output.bias" in tensors
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": meta.integer("feed_forward_length", high=MAX_INTERMEDIATE),
        "num_layers": meta.integer("block_count", high=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": _vocab_size(meta),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": attention_bias,
        "qkv_bias": qkv_bias and not attention_bias,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "max_position": meta.integer("context_length"),
        "checkpoint_dtype": _dtype(meta.header),
    }
    if meta.get("attention.scale") is not None:
        fields["attention_scale"] = meta.number("attention.scale")
    return fields


def _window(meta: Metadata, num_layers: int, *, default: int | None = None) -> dict[str, Any]:
    """The fields of a window over all layers; 0 means none. Required unless there is a default."""
    window = meta.integer("attention.sliding_window", default, low=0)
    return {"layer_kinds": ("window",) * num_layers, "window": window} if window else {}


def _llama(meta: Metadata) -> ModelConfig:
    """Llama, and Mistral, which is Llama with a window."""
    fields = _shared(meta)
    window = _window(meta, fields["num_layers"], default=0)
    return ModelConfig(
        architecture="MistralForCausalLM" if window else "LlamaForCausalLM",
        **fields,
        **window,
        rope=read_rope(meta, fields["head_dim"]),
    )


def _granite(meta: Metadata) -> ModelConfig:
    """Granite, dense: Llama with factors."""
    fields = _shared(meta)
    return ModelConfig(
        architecture="GraniteForCausalLM",
        **fields,
        embedding_multiplier=meta.number("embedding_scale", 1.0),
        residual_multiplier=meta.number("residual_scale", 1.0),
        logits_divisor=meta.number("logit_scale", 1.0),
        rope=read_rope(meta, fields["head_dim"]),
    )


def _qwen2(meta: Metadata) -> ModelConfig:
    return _without_window(meta, architecture="Qwen2ForCausalLM")


def _qwen3(meta: Metadata) -> ModelConfig:
    return _without_window(meta, architecture="Qwen3ForCausalLM", qk_norm=True)


def _qwen3moe(meta: Metadata) -> ModelConfig:
    """All layers are sparse."""
    return _without_window(meta, architecture="Qwen3MoeForCausalLM", qk_norm=True, **_experts(meta))


def _without_window(meta: Metadata, **own: Any) -> ModelConfig:
    if meta.integer("attention.sliding_window", 0, low=0):
        # Only some layers have it, and the file may not say which.
        raise meta.refused("attention.sliding_window", "0 or absent")
    fields = _shared(meta)
    return ModelConfig(**fields, **own, rope=read_rope(meta, fields["head_dim"]))


def _phi3(meta: Metadata) -> ModelConfig:
    """The window's key is required: files without it are older than it, and their models have
    one."""
    fields = _shared(meta)
    return ModelConfig(
        architecture="Phi3ForCausalLM",
        **fields,
        **_window(meta, fields["num_layers"]),
        rope=read_rope(meta, fields["head_dim"], allow_partial=True, allow_longrope=True),
    )


def _gpt_oss(meta: Metadata) -> ModelConfig:
    """The activation's numbers stand in no key, since all models of the family have them alike."""
    fields = _shared(meta)
    kinds = _pattern(meta, fields["num_layers"], 2)
    return ModelConfig(
        architecture="GptOssForCausalLM",
        **{**fields, "mlp_bias": False},
        **_experts(meta),
        router_bias=True,
        expert_bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        attention_sinks=True,
        layer_kinds=kinds,
        window=meta.integer("attention.sliding_window") if kinds else None,
        rope=read_rope(meta, fields["head_dim"], truncate=False),
    )


def _experts(meta: Metadata, *, default_width: int | None = None) -> dict[str, Any]:
    """The weights of a token's experts sum to one: no key says else. default_width: of an expert,
    where the file may be silent."""
    count = meta.integer("expert_count", high=MAX_EXPERTS)
    chosen = meta.integer("expert_used_count", high=MAX_EXPERTS)
    if chosen > count:
        raise meta.wrong("expert_used_count", f"at most expert_count={count}")
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "moe_intermediate_size": meta.integer(
            "expert_feed_forward_length", default_width, high=MAX_INTERMEDIATE
        ),
        "norm_topk_prob": True,
    }


def _olmo2(meta: Metadata) -> ModelConfig:
    """OLMo 3's files have the same name, and a window."""
    return _without_window(
        meta, architecture="Olmo2ForCausalLM", joint_qk_norm=True, pre_norms=False, post_norms=True
    )


def _olmoe(meta: Metadata) -> ModelConfig:
    """All layers are sparse. The weights of a token's experts are as the softmax has them."""
    if meta.get("norm_top_k_prob") not in (None, False):
        raise meta.refused("norm_top_k_prob", "False or absent")
    width = meta.integer("feed_forward_length", high=MAX_INTERMEDIATE)
    own = {**_experts(meta, default_width=width), "norm_topk_prob": False}
    return _without_window(meta, architecture="OlmoeForCausalLM", joint_qk_norm=True, **own)


def _gemma2(meta: Metadata) -> ModelConfig:
    fields = _gemma(meta, num_layers_of_27b=46)
    kinds = _pattern(meta, fields["num_layers"], 2)
    return ModelConfig(
        architecture="Gemma2ForCausalLM",
        **fields,
        layer_kinds=kinds,
        window=meta.integer("attention.sliding_window") if kinds else None,
        attention_softcap=meta.number("attn_logit_softcapping", 50.0),
        final_softcap=meta.number("final_logit_softcapping", 30.0),
        rope=read_rope(meta, fields["head_dim"]),
    )


def _gemma3(meta: Metadata) -> ModelConfig:
    fields = _gemma(meta, num_layers_of_27b=62)
    kinds = _pattern(meta, fields["num_layers"], 6)
    window = meta.integer("attention.sliding_window", 0, low=0)
    has_cap = meta.get("final_logit_softcapping") is not None
    # The default of a file without it would be 10,000, and of the family 1,000,000.
    meta.number("rope.freq_base")
    head_dim = fields["head_dim"]
    local = RopeConfig(rotary_dim=head_dim, theta=meta.number("rope.freq_base_swa", 10000.0))
    return ModelConfig(
        architecture="Gemma3ForCausalLM",
        **fields,
        layer_kinds=kinds if window else (),
        window=window if kinds and window else None,
        final_softcap=meta.number("final_logit_softcapping") if has_cap else None,
        rope=read_rope(meta, head_dim),
        local_rope=local,
        qk_norm=True,
    )


def _gemma(meta: Metadata, *, num_layers_of_27b: int) -> dict[str, Any]:
    """What both have alike. The scale of scores stands in no key: it is head_dim ** -0.5, but for
    the 27 B models, which are known by their layers."""
    fields = _shared(meta)
    is_27b = fields["num_layers"] == num_layers_of_27b
    wide = fields["hidden_size"] // fields["num_heads"]
    fields.setdefault("attention_scale", (wide if is_27b else fields["head_dim"]) ** -0.5)
    return {
        **fields,
        "hidden_act": "gelu_pytorch_tanh",
        "post_norms": True,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
    }


def _pattern(meta: Metadata, num_layers: int, period: int) -> tuple[LayerKind, ...]:
    """attention.sliding_window_pattern: every so manieth layer sees all tokens, or per layer
    whether it has a window. period: what its absence means."""
    value = meta.get("attention.sliding_window_pattern")
    if isinstance(value, np.ndarray):
        if value.shape != (num_layers,):
            raise meta.wrong(
                "attention.sliding_window_pattern", f"one flag per layer, {num_layers}"
            )
        flags = [bool(flag) for flag in value]
    else:
        period = meta.integer("attention.sliding_window_pattern", period)
        flags = [(index + 1) % period != 0 for index in range(num_layers)]
    kinds: tuple[LayerKind, ...] = tuple("window" if flag else "full" for flag in flags)
    return kinds if any(flags) else ()


ARCHITECTURES: dict[str, Callable[[Metadata], ModelConfig]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
}


def _architecture(header: GGUFHeader) -> str:
    return Metadata(header, "general").text("architecture")


def gguf_model_config(header: GGUFHeader) -> ModelConfig:
    """What the file says of its model.

    Raises CheckpointError (missing key, wrong type) and UnsupportedError (an architecture, key,
    value or tensor type that is not implemented, by name).
    """
    architecture = _architecture(header)
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
    meta = Metadata(header, architecture)
    model = ARCHITECTURES[architecture](meta)
    _refuse_unread(meta)
    return replace(model, max_position=model.rope.context(model.max_position))


def _refuse_unread(meta: Metadata) -> None:
    """A key that nothing reads may change the arithmetic."""
    for name, neutral in _NEUTRAL.items():
        if meta.key(name) not in meta.read and meta.get(name) not in (None, neutral):
            raise meta.refused(name, f"{neutral!r} or absent")
    known = meta.read | {meta.key(name) for name in _IGNORED}
    for key in meta.header.metadata:
        if key.startswith(f"{meta.prefix}.") and key not in known:
            raise meta.refused(key.removeprefix(f"{meta.prefix}."), "absent")


def _token_id(meta: Metadata, role: str, vocab_size: int) -> int | None:
    name = f"{role}_token_id"
    if meta.get(name) is None:
        return None
    value = meta.integer(name, low=0)
    if value >= vocab_size:
        raise meta.wrong(name, f"a token id from 0 to {vocab_size - 1}")
    return value


def gguf_generation_defaults(header: GGUFHeader) -> GenerationDefaults:
    """End tokens from the tokenizer's metadata: eos, and eot where the file names one besides.

    Raises CheckpointError for token ids outside the vocabulary.
    """
    vocab_size = _vocab_size(Metadata(header, _architecture(header)))
    meta = Metadata(header, "tokenizer.ggml")
    ends = (_token_id(meta, role, vocab_size) for role in ("eos", "eot"))
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=_token_id(meta, "bos", vocab_size),
        pad_token_id=_token_id(meta, "padding", vocab_size),
    )
