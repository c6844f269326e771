import json

import pytest
from compose.test_families import folder_of
from support.encoders import ARCHITECTURES as ENCODERS
from support.encoders import tiny_encoder
from support.tiny import tiny_llama
from transformers import LlamaConfig

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.table import ARCHITECTURES, reader_of
from pelton.checkpoint.hf_config import read_generation_defaults, read_model_config
from pelton.checkpoint.source import resolve_checkpoint
from pelton.config.model import RopeConfig
from pelton.errors import CheckpointError, ConfigError, UnsupportedError
from pelton.models.table import MODELS

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def read(tmp_path):
    def inner(changes=None, *, without=(), overrides=None, generation=None):
        values = {k: v for k, v in {**BASE, **(changes or {})}.items() if k not in without}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        checkpoint = resolve_checkpoint(str(tmp_path), load_format="dummy")
        return (
            read_generation_defaults(checkpoint)
            if generation is not None
            else read_model_config(checkpoint, overrides)
        )

    return inner


def test_a_plain_llama(read):
    model = read()
    assert model.architecture == "LlamaForCausalLM"
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 16)
    assert model.rope == RopeConfig(rotary_dim=16, theta=10000.0)
    assert model.checkpoint_dtype == "bfloat16"
    assert not model.tie_word_embeddings
    assert not model.attention_bias
    assert model.max_position == 128


def test_optional_keys_and_nulls(read):
    model = read(
        {
            "num_key_value_heads": None,
            "head_dim": 32,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "sliding_window": None,
            "rope_theta": 500000,
        }
    )
    assert (model.num_kv_heads, model.head_dim) == (4, 32)
    assert model.tie_word_embeddings
    assert model.mlp_bias
    assert model.rope.theta == 500000.0


@pytest.mark.parametrize("style", ["old", "old type", "new"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rope(read, style, kind):
    values = {"default": {}, "linear": {"factor": 2}, "llama3": LLAMA3}[kind]
    if style == "new":
        changes = {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}}
    else:
        key = "type" if style == "old type" else "rope_type"
        changes = {"rope_theta": 5000.0, "rope_scaling": {key: kind, **values}}
    rope = read(changes).rope
    assert (rope.kind, rope.theta, rope.rotary_dim) == (kind, 5000.0, 16)
    assert rope.factor == {"default": 1.0, "linear": 2.0, "llama3": 8.0}[kind]
    if kind == "llama3":
        assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
        assert rope.original_max_position == 64


def test_what_transformers_saves(tmp_path):
    LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=100,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e5, **LLAMA3},
        architectures=["LlamaForCausalLM"],
        dtype="float16",
        attention_bias=True,
    ).save_pretrained(tmp_path)
    model = read_model_config(resolve_checkpoint(str(tmp_path), load_format="dummy"))
    assert model.head_dim == model.rope.rotary_dim == 24
    assert (model.rope.kind, model.rope.theta) == ("llama3", 1e5)
    assert model.checkpoint_dtype == "float16"
    assert model.attention_bias


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "hidden_act",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(read, key):
    with pytest.raises(
        CheckpointError, match=rf"config\.json: the required key '{key}' is missing"
    ):
        read(without=[key])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("vocab_size", 2**40),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", 1),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 3),
        ("rope_scaling", "linear"),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", []),
        ("torch_dtype", 16),
    ],
)
def test_a_wrong_value_is_named(read, key, value):
    without = ["num_key_value_heads"] if key == "num_attention_heads" else []
    with pytest.raises(CheckpointError, match=rf"{key} must be .*, got") as error:
        read({key: value}, without=without)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported; it must be "silu"'),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config=.*"gptq"'),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"rope_interleaved": True}, "rope_interleaved=true"),
        ({"torch_dtype": "float8_e4m3fn"}, 'torch_dtype="float8_e4m3fn"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, 'type="ntk"'),
        ({"rope_parameters": {"rope_type": "mrope"}}, 'rope_parameters: rope_type="mrope"'),
        (
            {"architectures": ["LlamaForCasualLM"]},
            "'LlamaForCasualLM' is not supported. Did you mean 'LlamaForCausalLM'",
        ),
        ({"architectures": ["T5Model"]}, "Known: BertModel, .*LlamaForCausalLM"),
    ],
)
def test_refused_by_name(read, changes, says):
    with pytest.raises(UnsupportedError, match=says):
        read(changes)


def test_missing_rope_factor(read):
    with pytest.raises(CheckpointError, match=r"rope_scaling: the required key 'factor'"):
        read({"rope_scaling": {"rope_type": "linear"}})


def test_contradicting_rope(read):
    with pytest.raises(CheckpointError, match="contradict"):
        read(
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
            }
        )


def test_overrides(read):
    assert read(overrides={"max_position_embeddings": 99}).max_position == 99
    with pytest.raises(
        ConfigError, match=r"'max_position' is not a key.*'max_position_embeddings'"
    ):
        read(overrides={"max_position": 99})
    with pytest.raises(CheckpointError, match="with hf_overrides of vocab_size"):
        read(overrides={"vocab_size": "many"})


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_not_json(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    checkpoint = resolve_checkpoint(str(tmp_path), load_format="dummy")
    for function in (read_model_config, read_generation_defaults):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            function(checkpoint)


def test_generation_defaults(read):
    defaults = read(generation={"eos_token_id": [5, 7, 5], "pad_token_id": 0})
    assert defaults.eos_token_ids == (5, 7)
    assert defaults.bos_token_id == 1
    assert defaults.pad_token_id == 0
    assert defaults.sampling == {}
    assert read(generation={}).eos_token_ids == (2,)
    assert read({"eos_token_id": None}, generation={}).eos_token_ids == ()


def test_sampling_counts_unless_do_sample_is_false(read):
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": None}
    values["repetition_penalty"] = 1.2
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}
    assert read(generation={**values, "do_sample": False}).sampling == {}
    assert read(generation=values).sampling == expected
    assert read(generation={**values, "do_sample": True}).sampling == expected


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"eos_token_id": 10**6}, "eos_token_id"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": "yes"}, "do_sample"),
    ],
)
def test_bad_generation_values(read, changes, key):
    """Case 38: an end token outside the vocabulary is refused at load."""
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} must be"):
        read(generation={"do_sample": True, **changes})


def test_every_family_has_a_reader_and_a_model():
    assert ARCHITECTURES.keys() == MODELS.keys()
    for architecture in ARCHITECTURES:
        assert callable(reader_of(architecture))


QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
}


def test_qwen_windows(read):
    model = read(QWEN)
    assert (model.layer_kinds, model.window) == (("full", "window"), 16)
    assert read({**QWEN, "max_window_layers": 2}).window is None
    assert read({**QWEN, "use_sliding_window": False}).window is None
    kinds = ["sliding_attention", "full_attention"]
    assert read({**QWEN, "layer_types": kinds}).layer_kinds == ("window", "full")
    with pytest.raises(CheckpointError, match="layer_types must be a list of num_hidden_layers=2"):
        read({**QWEN, "layer_types": kinds[:1]})
    with pytest.raises(UnsupportedError, match="layer_types has 'linear_attention'"):
        read({**QWEN, "layer_types": ["linear_attention"] * 2})
    with pytest.raises(CheckpointError, match="no sliding_window is in use"):
        read({**QWEN, "use_sliding_window": False, "layer_types": kinds})


def test_a_window_that_covers_every_request_is_none(read):
    model = read(QWEN)
    assert model.for_length(16).window is None
    assert model.for_length(17).window == 16


def test_partial_rotation(read):
    phi = {"architectures": ["Phi3ForCausalLM"]}
    for factor, rotary_dim in ((0.5, 8), (1.0, 16), (0.3, 4)):
        assert read({**phi, "partial_rotary_factor": factor}).rope.rotary_dim == rotary_dim
    for factor, rotary_dim in ((2.0, 32), (0.2, 3), (0.1, 1)):
        with pytest.raises(CheckpointError, match=f"={factor:g} rotates {rotary_dim} of head_dim"):
            read({**phi, "partial_rotary_factor": factor})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_integer_has_a_limit_and_a_type(architecture):
    """A size of 10**9 is refused by its name, its value and a limit, not by the allocator."""
    if architecture in ENCODERS:
        family, options = ENCODERS[architecture]
        folder = tiny_encoder(family, **options)
    else:
        is_llama = architecture == "LlamaForCausalLM"
        folder = tiny_llama() if is_llama else folder_of(architecture)
    values = json.loads((folder / "config.json").read_text())
    reader = ConfigReader(values, "config.json")
    reader_of(architecture)(reader, "float32")
    no_size = ("pretraining_tp", "query_pre_attn_scalar")
    sizes = [
        key
        for key, value in values.items()
        if type(value) is int and key in reader.read and key not in no_size
    ]
    assert len(sizes) >= 7
    for key in sizes:
        for wrong in (10**9, "64", 0.5, [1], True):
            with pytest.raises(ConfigError) as error:
                reader_of(architecture)(ConfigReader({**values, key: wrong}, "config.json"), "x")
            assert key in str(error.value), (key, wrong)
            assert str(wrong) in str(error.value), (key, wrong)
