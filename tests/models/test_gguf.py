"""Every family that has GGUF files: the file gives the model that its checkpoint gives.

The checkpoint itself is compared with transformers in the family's own test.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.families import engine_logits, tiny_model
from support.gguf_models import ARCHITECTURES, as_gguf
from support.tiny import TinyEngine, assert_greedy, make_config, oracle, prompts_of

from pelton.checkpoint.gguf_config import ARCHITECTURES as READERS
from pelton.checkpoint.name_map import NameMap
from pelton.config.model import ModelConfig
from pelton.models.table import MODELS

GEMMA = {"initializer_range": 0.2, "sliding_window": 9, "query_pre_attn_scalar": 16}
LAYERS = ("sliding_attention", "full_attention")
HALF = (("rope_type", "default"), ("rope_theta", 500.0), ("partial_rotary_factor", 0.5))
ROPES = (
    ("full_attention", (("rope_type", "linear"), ("factor", 8.0), ("rope_theta", 5000.0))),
    ("sliding_attention", (("rope_type", "default"), ("rope_theta", 100.0))),
)
YARN = (
    ("rope_type", "yarn"),
    ("rope_theta", 10000.0),
    ("factor", 4.0),
    ("original_max_position_embeddings", 64),
)
LONGROPE = (
    ("rope_type", "longrope"),
    ("rope_theta", 10000.0),
    ("original_max_position_embeddings", 64),
    ("short_factor", tuple(1 + 0.1 * i for i in range(8))),
    ("long_factor", tuple(2 + 0.2 * i for i in range(8))),
)
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 64}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"hidden_size": 64, "sliding_window": 9}),
    "qwen2": ("Qwen2", {"hidden_size": 64}),
    "qwen3": ("Qwen3", {"hidden_size": 64}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases": ("Qwen3", {"attention_bias": True}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": ("GptOss", {**EXPERTS, "sliding_window": 9}),
    "gpt-oss yarn": ("GptOss", {**EXPERTS, "rope_parameters": (*YARN, ("truncate", False))}),
    "granite": (
        "Granite",
        {
            "hidden_size": 64,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2", {"hidden_size": 64}),
    "olmoe": (
        "Olmoe",
        {
            "hidden_size": 64,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
        },
    ),
    "olmo2 yarn": ("Olmo2", {"rope_parameters": YARN}),
    "phi3": ("Phi3", {"hidden_size": 64}),
    "phi3 partial": ("Phi3", {"hidden_size": 64, "rope_parameters": HALF, "sliding_window": 9}),
    "phi3 longrope": (
        "Phi3",
        {"hidden_size": 64, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "qwen2 yarn": ("Qwen2", {"hidden_size": 64, "rope_parameters": YARN}),
    "qwen3 yarn": ("Qwen3", {"rope_parameters": (*YARN, ("beta_fast", 8.0), ("beta_slow", 2.0))}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": LAYERS, "tie_word_embeddings": True}),
    "gemma3 rotations": ("Gemma3Text", {**GEMMA, "layer_types": LAYERS, "rope_parameters": ROPES}),
    "gemma3 cap": ("Gemma3Text", {**GEMMA, "layer_types": LAYERS, "final_logit_softcapping": 5.0}),
}


def folders_of(variant: str) -> tuple[Any, Any]:
    """(the checkpoint, the GGUF file)."""
    family, overrides = VARIANTS[variant]
    extra = {"head_dim": 16} if family != "Phi3" else {}
    folder = tiny_model(family, **extra, **overrides)
    return folder, as_gguf(folder)


def in_float32(model: ModelConfig) -> ModelConfig:
    """Numbers of GGUF files are float32."""
    rope = replace(
        model.rope,
        attention_factor=float(np.float32(model.rope.attention_factor)),
        short_factors=tuple(np.float32(model.rope.short_factors).tolist()),
    )
    return replace(
        model,
        rope=rope,
        rms_norm_eps=float(np.float32(model.rms_norm_eps)),
        attention_scale=model.attention_scale and float(np.float32(model.attention_scale)),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_configuration_is_the_checkpoints(variant: str) -> None:
    folder, file = folders_of(variant)
    wanted, read = make_config(folder).model, make_config(file).model
    assert in_float32(read) == in_float32(wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_checkpoints(variant: str) -> None:
    folder, file = folders_of(variant)
    (ids,) = prompts_of([45], seed=3)
    logits = [engine_logits(TinyEngine(one), ids) for one in (folder, file)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("variant", ["qwen3 moe", "gpt-oss"])
def test_experts_with_gate_and_up_in_one_tensor(variant: str) -> None:
    folder, _ = folders_of(variant)
    (ids,) = prompts_of([21], seed=3)
    fused = engine_logits(TinyEngine(as_gguf(folder, fuse_experts=True)), ids)
    assert torch.equal(fused, engine_logits(TinyEngine(as_gguf(folder)), ids))


# transformers reads the head size of Gemma alone, and assumes 128 for Qwen 3.
READ_BY_TRANSFORMERS = ["llama", "mistral", "qwen2", "phi3", "gemma2", "gemma3"]


@pytest.mark.parametrize("variant", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_file_alike(variant: str) -> None:
    """Not our reader but our writer is in question: whether the file is what converters make.

    transformers reads no windows, caps, scales or rotations of GGUF files, so only weights count.
    """
    from transformers import AutoModelForCausalLM

    folder, file = folders_of(variant)
    theirs = AutoModelForCausalLM.from_pretrained(file, gguf_file="m.gguf", dtype=torch.float32)
    wanted, found = oracle(folder).state_dict(), theirs.state_dict()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


# Of each family's files; the others have all tensors of gguf's table.
ABSENT = {
    "llama": {"attn_rot_embd", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
    "qwen2": {"rope_freqs"},
    "qwen3": {"rope_freqs"},
}


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES)))
def test_names_are_those_of_the_librarys_table(architecture: str) -> None:
    arch = ARCHITECTURES[architecture]
    module, name = MODELS[architecture].split(":")
    rules = getattr(importlib.import_module(module), name).names["gguf"]
    found = NameMap(rules)
    tensors = {gguf.TENSOR_NAMES[one].replace("{bid}", "3") for one in gguf.MODEL_TENSORS[arch]}
    absent = ABSENT.get(gguf.MODEL_ARCH_NAMES[arch], set())
    for one in tensors:
        is_known = found.match(f"{one}.weight") is not None
        assert is_known == (one.rpartition(".")[2] not in absent), one


def test_every_architecture_is_here() -> None:
    assert {gguf.MODEL_ARCH_NAMES[arch] for arch in ARCHITECTURES.values()} == set(READERS)


@pytest.mark.parametrize(
    "variant",
    [
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3 moe",
        "gpt-oss yarn",
        "granite",
        "olmo2",
        "olmoe",
        "phi3 partial",
        "phi3 longrope",
        "qwen2 yarn",
        "gemma2",
        "gemma3",
    ],
)
def test_greedy_tokens_equal_transformers(variant: str) -> None:
    folder, file = folders_of(variant)
    prompts = prompts_of([1, 7, 30], seed=5)
    assert_greedy(folder, prompts, TinyEngine(file).generate(prompts), 12)
