"""GPT-OSS against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import TinyEngine, assert_greedy, make_config, prompts_of
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pelton.errors import CheckpointError, UnsupportedError
from pelton.setup.resolve import num_parameters

BASE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64}
LAYERS = ("full_attention", "sliding_attention")
YARN = (
    ("rope_type", "yarn"),
    ("rope_theta", 10000.0),
    ("factor", 4.0),
    ("original_max_position_embeddings", 64),
    ("truncate", False),
)
VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "other layers": {"sliding_window": 9, "layer_types": LAYERS},
    "full": {"layer_types": ("full_attention",) * 2, "sliding_window": 9},
    "limit": {"swiglu_limit": 0.5, "swiglu_alpha": 2.5},
    "yarn": {"rope_parameters": YARN, "sliding_window": 9},
    "no biases": {"attention_bias": False},
    "multi-head": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "many": {"num_local_experts": 32, "num_experts_per_tok": 4},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    if variant == "limit" and not hasattr(GptOssConfig(), "swiglu_limit"):
        pytest.skip("this transformers knows the limit 7 only")
    check_against_transformers(tiny_model("GptOss", **{**BASE, **VARIANTS[variant]}), backend)


@pytest.mark.parametrize("variant", ["plain", "no biases"])
def test_number_of_parameters_equals_transformers(variant):
    folder = tiny_model("GptOss", **{**BASE, **VARIANTS[variant]})
    tensors = load_file(folder / "model.safetensors")
    assert num_parameters(make_config(folder).model) == sum(t.numel() for t in tensors.values())


def test_absent_keys_mean_the_familys_defaults(tmp_path):
    folder = tiny_model("GptOss", **BASE)
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    expected = make_config(folder, max_model_len=200).model
    assert (expected.window, expected.swiglu_limit) == (128, 7.0)
    assert expected.max_position == 131072
    assert (expected.rope.kind, expected.rope.theta) == ("yarn", 150000.0)
    names = "sliding_window rope_parameters layer_types swiglu_limit swiglu_alpha attention_bias"
    for name in names.split():
        values.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert make_config(tmp_path, max_model_len=200).model == expected
    values["sliding_window"] = None
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="layer_types must be all full_attention"):
        make_config(tmp_path)


def mxfp4_pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4 as published, and one with transformers' reading of it."""
    folder = tiny_model("GptOss", **BASE, hidden_size=64)
    tensors, packed = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        count, columns, rows = tensor.shape
        shape = (count, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert tensors[name].shape == tensor.shape
    rest = {k: v for k, v in tensors.items() if not k.endswith(("gate_up_proj", "down_proj"))}
    values = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    folders = tmp_path / "packed", tmp_path / "plain"
    for one, content in zip(folders, ({**rest, **packed}, tensors)):
        one.mkdir()
        save_file(content, one / "model.safetensors", metadata={"format": "pt"})
        (one / "config.json").write_text(json.dumps(values))
        values["quantization_config"] = method
    (folders[0] / "config.json").write_text(json.dumps(values))
    return folders


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_what_transformers_reads(tmp_path, dtype):
    packed, plain = mxfp4_pair(tmp_path)
    engine = TinyEngine(packed, dtype=dtype)
    expected = TinyEngine(plain, dtype=dtype).worker.model.parameters()
    parameters = engine.worker.model.parameters()
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter.tensor, expected[name].tensor), name
    if dtype == "float32":
        prompts = prompts_of([1, 7, 30], seed=5)
        assert_greedy(plain, prompts, engine.generate(prompts), 12)


def test_other_quantisations_are_refused(tmp_path):
    packed, _ = mxfp4_pair(tmp_path)
    path = packed / "config.json"
    path.write_text(path.read_text().replace('"mxfp4"', '"awq"'))
    with pytest.raises(UnsupportedError, match='quant_method="awq" is not supported'):
        make_config(packed)


def test_the_ladder_shows_what_runs():
    """torch's fused attention has no sinks."""
    layers = TinyEngine(tiny_model("GptOss", **BASE)).worker.model.layers
    assert {layer.mixer.attend.names for layer in layers} == {("masked",)}
