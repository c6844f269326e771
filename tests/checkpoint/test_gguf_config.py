import re

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pelton.checkpoint.gguf_config import is_quantised
from pelton.checkpoint.gguf_header import read_gguf_header
from pelton.checkpoint.hf_config import read_generation_defaults, read_model_config
from pelton.checkpoint.source import resolve_checkpoint
from pelton.errors import CheckpointError, ConfigError, UnsupportedError

KEYS = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": 100,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.fixture
def make(tmp_path):
    def inner(changes=None, *, architecture="llama", tensors=None):
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        keys = {key.replace("llama.", f"{architecture}."): value for key, value in KEYS.items()}
        for key, value in {**keys, **(changes or {})}.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for name, tensor in (tensors or {"token_embd.weight": np.zeros((100, 64), "f4")}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return resolve_checkpoint(str(path))

    return inner


def test_the_embedded_model():
    checkpoint = resolve_checkpoint(None)
    model = read_model_config(checkpoint)
    assert (model.hidden_size, model.intermediate_size, model.num_layers) == (576, 1536, 30)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (9, 3, 64)
    assert (model.vocab_size, model.max_position) == (49152, 8192)
    assert model.rope.theta == 100000.0
    assert model.rms_norm_eps == pytest.approx(1e-5)
    assert model.tie_word_embeddings
    assert not model.attention_bias
    assert model.checkpoint_dtype == "float32"
    assert is_quantised(read_gguf_header(checkpoint.files[0]))
    defaults = read_generation_defaults(checkpoint)
    assert (defaults.eos_token_ids, defaults.bos_token_id, defaults.sampling) == ((2,), 1, {})


def test_dtype_ties_and_biases_follow_the_tensors(make):
    half = np.zeros((100, 64), "f2")
    checkpoint = make(
        tensors={
            "token_embd.weight": half,
            "output.weight": half,
            "output_norm.weight": np.zeros(64, "f4"),
            "blk.0.attn_q.bias": np.zeros(64, "f4"),
        }
    )
    model = read_model_config(checkpoint)
    assert model.checkpoint_dtype == "float16"
    assert not model.tie_word_embeddings
    assert (model.attention_bias, model.qkv_bias) == (False, True)
    assert not model.mlp_bias
    assert not is_quantised(read_gguf_header(checkpoint.files[0]))


@pytest.mark.parametrize(
    "key", sorted(set(KEYS) - {"llama.rope.freq_base", "tokenizer.ggml.eos_token_id"})
)
def test_a_missing_key_is_named(make, key):
    checkpoint = make({key: None})
    if key == "llama.attention.head_count_kv":
        assert read_model_config(checkpoint).num_kv_heads == 4
        return
    with pytest.raises(CheckpointError, match=f"the required key '{key}' is missing"):
        read_model_config(checkpoint)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"llama.block_count": "two"}, "llama.block_count must be an integer"),
        (
            {"llama.block_count": 10**9},
            "llama.block_count must be an integer from 1 to 1024, got 1",
        ),
        ({"llama.embedding_length": 10**9}, "embedding_length must be .* to 131072, got 1"),
        ({"llama.context_length": 10**9}, "context_length must be .* to 16777216, got 1"),
        ({"llama.vocab_size": 10**9}, "vocab_size must be .* to 4194304, got 1"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count must be an integer"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv must be a divisor"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base must be a finite"),
        ({"tokenizer.ggml.tokens": ["a"] * 99}, "llama.vocab_size must be .* 99"),
    ],
)
def test_a_wrong_value_is_named(make, changes, says):
    with pytest.raises(CheckpointError, match=says):
        read_model_config(make(changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"llama.rope.scaling.type": "ntk"}, "llama.rope.scaling.type='ntk'"),
        (
            {"llama.rope.scaling.yarn_attn_factor": 0.5},
            "scaling.yarn_attn_factor=0.5.*1.0 or absent",
        ),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8"),
        ({"llama.attention.causal": False}, "llama.attention.causal=False.*True or absent"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5 is not supported; it must be absent"),
        ({"llama.something_new": "x"}, "llama.something_new='x' is not supported"),
    ],
)
def test_refused_by_name(make, changes, says):
    with pytest.raises(UnsupportedError, match=says):
        read_model_config(make(changes))


def test_keys_that_change_nothing(make):
    plain = read_model_config(make())
    changes = {
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "llama.expert_used_count": 0,
        "llama.rope.scaling.finetuned": False,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    assert read_model_config(make(changes)) == plain


@pytest.mark.parametrize(
    ("architecture", "nearest"), [("llama4", "llama"), ("qwen2vl", "qwen2"), ("gemma", "gemma[23]")]
)
def test_unknown_architecture(make, architecture, nearest):
    known = "gemma2, gemma3, gpt-oss, granite, llama, .*phi3, qwen2, qwen3, qwen3moe"
    says = rf"'{architecture}'.*Did you mean '{nearest}'.*Known: {known}"
    with pytest.raises(UnsupportedError, match=says):
        read_model_config(make(architecture=architecture))


def test_llama_with_a_window_is_mistral(make):
    model = read_model_config(make({"llama.attention.sliding_window": 9}))
    assert (model.architecture, model.window) == ("MistralForCausalLM", 9)
    assert model.layer_kinds == ("window", "window")


def test_phi3_must_say_whether_it_has_a_window(make):
    def read(**changes):
        changes = {f"phi3.{key.replace('__', '.')}": value for key, value in changes.items()}
        return read_model_config(make(changes, architecture="phi3"))

    with pytest.raises(CheckpointError, match=r"'phi3\.attention\.sliding_window' is missing"):
        read()
    assert read(attention__sliding_window=0).layer_kinds == ()
    assert read(attention__sliding_window=7).window == 7
    assert read(attention__sliding_window=0, rope__dimension_count=8).rope.rotary_dim == 8
    with pytest.raises(CheckpointError, match="even and at most the head's 16, got 18"):
        read(attention__sliding_window=0, rope__dimension_count=18)


def test_longrope(make):
    """Its context ends where the rotation of tokens in the cache would change."""
    tensors = {"rope_factors_short.weight": np.linspace(1, 2, 8, dtype="f4")}
    changes = {
        "phi3.attention.sliding_window": 0,
        "phi3.rope.scaling.original_context_length": 32,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    model = read_model_config(make(changes, architecture="phi3", tensors=tensors))
    assert (model.rope.kind, model.rope.factor, model.max_position) == ("longrope", 4.0, 32)
    assert model.rope.attention_factor == 1.25
    assert model.rope.short_factors == pytest.approx(np.linspace(1, 2, 8))
    without = {**changes, "phi3.rope.scaling.attn_factor": None}
    with pytest.raises(CheckpointError, match="attn_factor' is missing"):
        read_model_config(make(without, architecture="phi3", tensors=tensors))
    with pytest.raises(UnsupportedError, match=r"rope_factors_short\.weight.*architecture='llama'"):
        read_model_config(make(tensors=tensors))
    for wrong, says in ((np.ones(7, "f4"), "shape"), (np.zeros(8, "f4"), "above 0")):
        tensors = {"rope_factors_short.weight": wrong}
        with pytest.raises(CheckpointError, match=says):
            read_model_config(make(changes, architecture="phi3", tensors=tensors))


def test_yarn(make):
    changes = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    model = read_model_config(make(changes))
    assert (model.rope.kind, model.rope.factor) == ("yarn", 4.0)
    assert model.rope.attention_factor == pytest.approx(1 + 0.1 * np.log(4))
    assert (model.rope.beta_fast, model.rope.beta_slow) == (32.0, 1.0)
    # The file tells the length before it is stretched.
    assert model.max_position == 256
    for key in ("factor", "original_context_length"):
        with pytest.raises(CheckpointError, match=f"{key}' is missing"):
            read_model_config(make({**changes, f"llama.rope.scaling.{key}": None}))


def test_qwens_window_is_refused(make):
    with pytest.raises(UnsupportedError, match=r"qwen2\.attention\.sliding_window=9"):
        read_model_config(make({"qwen2.attention.sliding_window": 9}, architecture="qwen2"))


def test_olmo(make):
    """OLMo 3's files are called OLMo 2's; no key of OLMoE's could say that weights sum to one."""
    with pytest.raises(UnsupportedError, match=r"olmo2\.attention\.sliding_window=9"):
        read_model_config(make({"olmo2.attention.sliding_window": 9}, architecture="olmo2"))
    experts = {"olmoe.expert_count": 8, "olmoe.expert_used_count": 3}
    model = read_model_config(make(experts, architecture="olmoe"))
    assert model.moe_intermediate_size == model.intermediate_size
    assert not model.norm_topk_prob
    with pytest.raises(UnsupportedError, match=r"norm_top_k_prob=True"):
        read_model_config(make({**experts, "olmoe.norm_top_k_prob": True}, architecture="olmoe"))


def test_experts(make):
    experts = {
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 3,
        "qwen3moe.expert_feed_forward_length": 24,
    }
    model = read_model_config(make(experts, architecture="qwen3moe"))
    assert (model.num_experts, model.experts_per_token, model.moe_intermediate_size) == (8, 3, 24)
    assert model.norm_topk_prob
    assert all(model.is_sparse(index) for index in range(model.num_layers))
    for key in experts:
        with pytest.raises(CheckpointError, match=f"'{re.escape(key)}' is missing"):
            read_model_config(make({**experts, key: None}, architecture="qwen3moe"))
    wrong = {**experts, "qwen3moe.expert_used_count": 9}
    with pytest.raises(CheckpointError, match="expert_used_count must be at most expert_count=8"):
        read_model_config(make(wrong, architecture="qwen3moe"))
    wrong = {**experts, "qwen3moe.expert_weights_scale": 2.5}
    with pytest.raises(UnsupportedError, match=r"expert_weights_scale=2\.5 is not supported"):
        read_model_config(make(wrong, architecture="qwen3moe"))


def test_gpt_oss(make):
    changes = {
        "gpt-oss.expert_count": 8,
        "gpt-oss.expert_used_count": 2,
        "gpt-oss.expert_feed_forward_length": 24,
        "gpt-oss.attention.sliding_window": 9,
    }
    model = read_model_config(make(changes, architecture="gpt-oss"))
    assert (model.swiglu_limit, model.swiglu_alpha, model.attention_sinks) == (7.0, 1.702, True)
    assert (model.layer_kinds, model.window) == (("window", "full"), 9)


def test_gemmas_scale_and_caps(make):
    """No key tells them: all models' but the 27 B ones' scale is that of the head."""

    def read(architecture, **changes):
        changes = {f"{architecture}.{key}": value for key, value in changes.items()}
        changes[f"{architecture}.attention.key_length"] = 32
        changes[f"{architecture}.attention.value_length"] = 32
        changes[f"{architecture}.attention.sliding_window"] = 9
        return read_model_config(make(changes, architecture=architecture))

    small = read("gemma2")
    assert small.attention_scale == 32**-0.5
    assert (small.attention_softcap, small.final_softcap) == (50.0, 30.0)
    assert small.embedding_multiplier == 8.0
    assert small.layer_kinds == ("window", "full")
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        assert read(architecture, block_count=layers).attention_scale == 16**-0.5
    assert read("gemma2", **{"attention.scale": 0.25}).attention_scale == 0.25


def test_gemma3_layers(make):
    def read(**changes):
        changes = {f"gemma3.{key.replace('__', '.')}": value for key, value in changes.items()}
        changes = {"gemma3.block_count": 8, "gemma3.attention.sliding_window": 9, **changes}
        return read_model_config(make(changes, architecture="gemma3"))

    assert read().layer_kinds == (*["window"] * 5, "full", "window", "window")
    assert (read().window, read().local_rope.theta) == (9, 10000.0)
    assert read(rope__freq_base_swa=500.0).local_rope.theta == 500.0
    kinds = read(attention__sliding_window_pattern=3).layer_kinds
    assert kinds == ("window", "window", "full", "window", "window", "full", "window", "window")
    flags = [True, False] * 4
    assert read(attention__sliding_window_pattern=flags).layer_kinds == ("window", "full") * 4
    for none in ({"attention__sliding_window": 0}, {"attention__sliding_window_pattern": 1}):
        assert (read(**none).layer_kinds, read(**none).window) == ((), None)
    with pytest.raises(CheckpointError, match="one flag per layer, 8"):
        read(attention__sliding_window_pattern=[True])
    with pytest.raises(CheckpointError, match=r"'gemma3\.rope\.freq_base' is missing"):
        read(rope__freq_base=None)


def test_unreadable_tensor_type(make):
    raw = np.zeros((2, 2 * 40), np.uint8)
    path = make().files[0]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="tensor 'w' has type Q8_1"):
        read_model_config(resolve_checkpoint(str(path)))


def test_linear_scaling(make):
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    for one in (changes, {"llama.rope.scale_linear": 4.0}):
        rope = read_model_config(make(one)).rope
        assert (rope.kind, rope.factor) == ("linear", 4.0)
    assert read_model_config(make({"llama.rope.scaling.type": "none"})).rope.kind == "default"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(make, factor):
    values = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=values)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    changes = {"llama.embedding_length": 512, "llama.rope.freq_base": 500000.0}
    tensors = {"rope_freqs.weight": (plain / scaled).numpy()}
    rope = read_model_config(make(changes, tensors=tensors)).rope
    assert (rope.kind, rope.factor) == ("llama3", pytest.approx(factor))
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_position == 8192
    tensors["rope_freqs.weight"][40] *= 1.01
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        read_model_config(make(changes, tensors=tensors))


def test_an_end_token_outside_the_vocabulary(make):
    """Case 38: a file with eos id 10**6 is refused at load."""
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id from 0 to 99"):
        read_generation_defaults(make({"tokenizer.ggml.eos_token_id": 10**6}))


def test_overrides_are_not_ignored(make):
    with pytest.raises(ConfigError, match="leave out 'vocab_size'"):
        read_model_config(make(), {"vocab_size": 3})
