"""Tiny Hugging Face checkpoints written as GGUF files, as llama.cpp's converter would write them.

Names are those of gguf's tensor tables; keys are written by its writer's own methods.
"""

from __future__ import annotations

import functools
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from support.blocks import random_blocks
from support.folders import new_folder

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
}


# Rows of queries and keys are reordered.
LLAMA_LIKE = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE)


@functools.cache
def as_gguf(
    folder: Path, *, fuse_experts: bool = False, forms: tuple[tuple[str, str], ...] = ()
) -> Path:
    """A folder with one file, in float32, of the checkpoint in `folder`.

    fuse_experts: gate and up of experts in one tensor, as the converter's option of the name does.
    forms: (part of a tensor's name, type) of matrices that are quantised, the first that fits. The
    K types, which the library does not write, get random values instead of the checkpoint's.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    out = new_folder("gguf")
    writer = gguf.GGUFWriter(out / "m.gguf", gguf.MODEL_ARCH_NAMES[arch])
    _write_keys(writer, arch, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = _stacked(load_file(folder / "model.safetensors"))
    if arch == gguf.MODEL_ARCH.GPT_OSS:
        tensors = _apart(tensors)
    for gate in [name for name in tensors if fuse_experts and "experts.gate_proj" in name]:
        up = gate.replace("gate_proj", "up_proj")
        fused = np.concatenate([tensors.pop(gate), tensors.pop(up)], axis=1)
        tensors[gate.replace("gate_proj", "gate_up_proj")] = fused
    for name, tensor in tensors.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if "experts.gate_up_proj" in name:  # of no architecture's table yet
            pattern = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.FFN_GATE_UP_EXP]
            target = f"{pattern.format(bid=name.split('.')[2])}.{name.rpartition('.')[2]}"
        assert target is not None, name
        _add(writer, target, _values(arch, config, name, tensor), forms)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, forms: tuple[tuple[str, str], ...]
) -> None:
    form = next((form for part, form in forms if part in name), None)
    if form is None or values.ndim != 2:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType[form]
    if form.endswith("_K"):
        seed = zlib.crc32(name.encode())
        blocks = random_blocks(form, *values.shape, seed=seed, size=float(2 * values.std()))
        writer.add_tensor(name, blocks.numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts' tensors as one of all, in their order."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            joint = name.replace(f".experts.{expert[1]}.", ".experts.")
            stacks.setdefault(joint, {})[int(expert[1])] = tensor
        else:
            found[name] = tensor
    for name, stack in stacks.items():
        found[name] = np.stack([stack[index] for index in range(len(stack))])
    return found


def _apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of gpt-oss: matrices with their rows first, and gate and up, which take turns, by
    themselves."""
    found = {}
    for name, tensor in tensors.items():
        if not re.search(r"\.experts\.|\.sinks", name):
            found[name] = tensor
            continue
        is_bias = name.endswith("_bias")
        stem = name.removesuffix("_bias") + (".bias" if is_bias else ".weight")
        values = tensor if is_bias or ".sinks" in name else tensor.swapaxes(1, 2)
        if "gate_up_proj" in stem:
            for first, one in enumerate(("gate_proj", "up_proj")):
                part = np.ascontiguousarray(values[:, first::2])
                found[stem.replace("gate_up_proj", one)] = part
        else:
            found[stem] = np.ascontiguousarray(values)
    return found


def _values(arch: Any, config: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    if arch in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
        return tensor + 1
    if arch in LLAMA_LIKE and (".q_proj." in name or ".k_proj." in name):
        heads = len(tensor) // config["head_dim"]
        halves = tensor.reshape(heads, 2, config["head_dim"] // 2, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    return tensor


def _write_keys(writer: gguf.GGUFWriter, arch: Any, config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    rope = config["rope_parameters"]
    if arch == gguf.MODEL_ARCH.GEMMA3:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if arch == gguf.MODEL_ARCH.PHI3:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3):
        if config["attn_logit_softcapping"] is not None:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        if config["final_logit_softcapping"] is not None:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "num_experts_per_tok" in config:
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if arch != gguf.MODEL_ARCH.OLMOE:
            writer.add_expert_feed_forward_length(width)
    if arch == gguf.MODEL_ARCH.GRANITE:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    elif not gguf.MODEL_ARCH_NAMES[arch].startswith("qwen"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if arch == gguf.MODEL_ARCH.GEMMA3:
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(kinds)
