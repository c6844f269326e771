import json
from dataclasses import replace
from pathlib import Path

import pytest
from compose.test_families import GRANITE
from support.encoders import tiny_encoder
from support.families import tiny_model

from pelton.config.engine import EngineArgs
from pelton.config.quant import QuantConfig
from pelton.errors import CheckpointError, ConfigError, UnsupportedError
from pelton.setup.check import check
from pelton.setup.refusals import REFUSALS
from pelton.speculation.table import SPECULATORS


@pytest.fixture
def folder(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def args(folder):
    return EngineArgs(model=folder, load_format="dummy", max_logprobs=5)


def test_defaults_with_the_embedded_model():
    checked = check(EngineArgs())
    assert checked.is_quantised
    assert checked.model.num_layers == 30
    assert checked.generation.eos_token_ids == (2,)
    assert checked.checkpoint.load_format == "gguf"


def test_what_of_the_embedded_model_can_stay_in_blocks():
    quantised = check(EngineArgs()).quantised
    assert quantised.scheme == "gguf"
    assert quantised.num_elements == 134_479_872
    assert quantised.num_bytes == 96_436_224
    assert check(EngineArgs(load_format="dummy")).quantised == QuantConfig()


def test_an_unknown_quantization_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"quantization='awq' is not known.*dequantise, gguf"):
        check(EngineArgs(quantization="awq"))


def test_a_folder(args):
    checked = check(args)
    assert not checked.is_quantised
    assert checked.model.vocab_size == 100
    assert checked.checkpoint.load_format == "dummy"


def test_where_defaults_of_sampling_come_from(args, folder, tmp_path):
    own = {"temperature": 0.5, "eos_token_id": [2, 3]}
    (Path(folder) / "generation_config.json").write_text(json.dumps(own))
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"top_p": 0.25, "eos_token_id": 7}))

    def found(value):
        generation = check(replace(args, generation_config=value)).generation
        return generation.sampling, generation.eos_token_ids

    assert found("auto") == ({"temperature": 0.5}, (2, 3))
    # Where an answer ends is no matter of taste.
    assert found("vllm") == found("none") == ({}, (2, 3))
    assert found(str(other)) == ({"top_p": 0.25}, (7,))
    (other / "generation_config.json").write_text("{}")
    assert found(str(other)) == ({}, (2, 3))
    (other / "generation_config.json").write_text('{"eos_token_id": 100}')
    with pytest.raises(CheckpointError, match="eos_token_id"):
        found(str(other))


def test_defaults_of_sampling_beside_a_gguf_file(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    generation = check(EngineArgs(generation_config=str(tmp_path))).generation
    assert generation.sampling == {"top_k": 7}
    assert generation.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_lora", True),
    ],
)
def test_refusals(args, field, value):
    assert field in {refusal.field for refusal in REFUSALS}
    with pytest.raises(UnsupportedError) as error:
        check(replace(args, **{field: value}))
    assert f"{field}={value!r} is not supported" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "cannot deal out 4 heads and 4 key"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, ConfigError, "'cuda:1' is one GPU"),
        ({"pipeline_parallel_size": 2, "device": "fake"}, ConfigError, "is one device"),
        ({"pipeline_parallel_size": 9}, ConfigError, "above the model's"),
        ({"data_parallel_size": 2, "device": "cuda:1"}, ConfigError, "data_parallel_size=2 asks"),
        ({"data_parallel_size": 2, "device": "fake"}, ConfigError, "leave data_parallel_size=2"),
        ({"data_parallel_size": 0}, ConfigError, "from 1 to 256"),
        ({"tensor_parallel_size": 2, "step_timeout": 0}, ConfigError, "step_timeout must be in"),
        (
            {
                "pipeline_parallel_size": 2,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            },
            UnsupportedError,
            "not supported with pipeline_parallel_size=2",
        ),
    ],
)
def test_several_devices(args, changes, kind, says):
    with pytest.raises(kind, match=says):
        check(replace(args, **changes))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_model_len", 1, "from 2 to"),
        ("max_model_len", 128.0, "must be an integer"),
        ("max_model_len", True, "must be an integer"),
        ("max_num_seqs", 1.5, "must be an integer"),
        ("block_size", None, "must be an integer"),
        ("block_size", 2000, "from 1 to 1024"),
        ("num_gpu_blocks_override", 1, "from 2 to"),
        ("max_steps_in_flight", 0, "from 1 to 8"),
        ("seed", 2**63, "must be an integer"),
        ("num_threads", 0, "from 1"),
        ("gpu_memory_utilization", 0, r"\(0, 1\]"),
        ("gpu_memory_utilization", 1.1, r"\(0, 1\]"),
        ("gpu_memory_utilization", float("nan"), r"\(0, 1\]"),
        ("enable_prefix_caching", 1, "True or False"),
        ("batch_invariant", "yes", "True or False"),
        ("chat_template", "", "non-empty string"),
        ("hf_overrides", [1], "dict with string keys"),
        ("generation_config", "/no/such", "must be a folder that holds a generation_config.json"),
        ("generation_config", "", '"auto", "vllm", "none" or a folder'),
        ("generation_config", None, '"auto", "vllm", "none" or a folder'),
        ("hf_overrides", {"vocab": 1}, "Did you mean 'vocab_size'"),
        ("dtype", "bfloat", "Did you mean 'bfloat16'"),
        ("dtype", 16, "is not known"),
        ("dtype", ["float32"], "is not known"),
        ("load_format", "safetensor", "Did you mean 'safetensors'"),
        ("kv_cache_dtype", "fp4", "Known: auto, fp8, fp8_e4m3, fp8_e5m2, int8"),
        ("kv_cache_dtype", "int", "Did you mean 'int8'"),
        ("kv_cache_dtype", None, "is not known"),
        ("attention_backend", "tourch", "Did you mean 'torch'"),
        ("scheduling_policy", "fcsf", "Did you mean 'fcfs'"),
        ("staging_mode", "pined", "Did you mean 'pinned'"),
        ("device", "cuda:", "Did you mean 'cuda:N'"),
        ("device", "cuda:01", "is not known"),
        ("device", "cpu:0", "is not known"),
        ("device", 0, "is not known"),
        ("device", "mps", "runs on cpu and cuda"),
        ("device", "xpu:1", "runs on cpu and cuda"),
        ("max_logprobs", 101, "above the vocabulary's 100"),
        ("mamba_block_size", 0, "from 1 to"),
        ("enforce_eager", 1, "True or False"),
        ("cudagraph_capture_sizes", [], "list of numbers of tokens"),
        ("cudagraph_capture_sizes", [4, 0], "at least 1 each"),
        ("cudagraph_capture_sizes", "8", "list of numbers of tokens"),
        ("max_cudagraph_capture_size", 0, "from 1 to"),
        ("mamba_block_size", 32, "has none; leave it out"),
    ],
)
def test_wrong_values_name_field_and_limit(args, field, value, says):
    with pytest.raises(ConfigError, match=says) as error:
        check(replace(args, **{field: value}))
    assert field in str(error.value)


def ngram(**changes):
    return {"method": "ngram", "num_speculative_tokens": 4, **changes}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("ngram", "must be a dict such as"),
        ([], "must be a dict such as"),
        ({}, "must have a 'method'"),
        ({"method": "ngram"}, "must have a 'num_speculative_tokens'"),
        (ngram(method="ngrams"), "Did you mean 'ngram'"),
        (ngram(method="eagle"), "is not known. Known: ngram"),
        (ngram(method=None), "is not known"),
        (ngram(prompt_lookup=3), "Did you mean 'prompt_lookup_m"),
        (ngram(num_speculative_tokens=0), "from 1 to 64, got 0"),
        (ngram(num_speculative_tokens=65), "from 1 to 64, got 65"),
        (ngram(num_speculative_tokens=True), "got True"),
        (ngram(num_speculative_tokens="4"), "got '4'"),
        (ngram(prompt_lookup_min=0), r"\['prompt_lookup_min'\] must be an integer from 1"),
        (ngram(prompt_lookup_max=2.0), "got 2.0"),
        (ngram(prompt_lookup_min=4, prompt_lookup_max=3), "is above prompt_lookup_max=3"),
    ],
)
def test_wrong_speculation(args, value, says):
    with pytest.raises(ConfigError, match=says) as error:
        check(replace(args, speculative_config=value))
    assert "speculative_config" in str(error.value)


def test_lookups_are_ngrams_alone(args, monkeypatch):
    monkeypatch.setitem(SPECULATORS, "other", "nowhere:Other")
    check(replace(args, speculative_config=ngram(method="other")))
    with pytest.raises(ConfigError, match="read by method='ngram' alone"):
        check(replace(args, speculative_config=ngram(method="other", prompt_lookup_max=3)))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:7", "fake"])
def test_devices(args, device):
    assert check(replace(args, device=device)).args.device == device


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32")])
def test_dtypes_by_their_names_in_vllm(args, given, meant):
    assert check(replace(args, dtype=given)).args.dtype == meant


def test_above_the_checkpoints_context(args):
    with pytest.raises(ConfigError, match=r"max_model_len=129 .* context of 128 tokens"):
        check(replace(args, max_model_len=129))
    check(replace(args, max_model_len=128))


def test_combinations(args):
    with pytest.raises(ConfigError, match="max_num_batched_tokens=7 is below max_num_seqs=8"):
        check(replace(args, max_num_seqs=8, max_num_batched_tokens=7))
    with pytest.raises(ConfigError, match="num_gpu_blocks_override and kv_cache_memory_bytes"):
        check(replace(args, num_gpu_blocks_override=8, kv_cache_memory_bytes=10**6))
    with pytest.raises(ConfigError, match="batch_invariant=True needs attention_backend"):
        check(replace(args, batch_invariant=True, attention_backend="torch"))
    check(replace(args, batch_invariant=True))
    for sizes in ({"cudagraph_capture_sizes": [8]}, {"max_cudagraph_capture_size": 8}):
        check(replace(args, **sizes))
        with pytest.raises(ConfigError, match="enforce_eager=True that none is; leave one"):
            check(replace(args, enforce_eager=True, **sizes))


def test_the_token_is_never_shown(args):
    with pytest.raises(ConfigError, match="hf_token") as error:
        check(replace(args, hf_token=12345))
    assert "12345" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_block_size": 24}, "multiple of block_size=16, got 24"),
        ({"mamba_block_size": 32, "enable_prefix_caching": False}, "leave one of them out"),
    ],
)
def test_how_often_state_is_kept(changes, says):
    folder = str(tiny_model("GraniteMoeHybrid", **GRANITE))
    with pytest.raises(ConfigError, match=says):
        check(EngineArgs(model=folder, **changes))
    assert check(EngineArgs(model=folder, mamba_block_size=32)).model.is_recurrent


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), "4", True])
def test_offloading_sizes(args, value):
    with pytest.raises(ConfigError, match="kv_offloading_size must be a number of GiB"):
        check(replace(args, kv_offloading_size=value))


def test_offloading_is_refused_with_recurrent_layers(args):
    """Their state does not lie in blocks. 0 is off."""
    check(replace(args, kv_offloading_size=0.5))
    folder = str(tiny_model("GraniteMoeHybrid", **GRANITE))
    with pytest.raises(UnsupportedError, match="is not supported for a model with recurrent"):
        check(EngineArgs(model=folder, kv_offloading_size=0.5))
    check(EngineArgs(model=folder, kv_offloading_size=0))


def test_a_context_of_one_token_has_no_room_for_an_answer(args, folder):
    path = Path(folder, "config.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "max_position_embeddings": 1}))
    with pytest.raises(ConfigError, match="max_position_embeddings is 1"):
        check(args)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 32),
        ("kv_cache_memory_bytes", 2**20),
        ("gpu_memory_utilization", 0.5),
        ("kv_offloading_size", 1.0),
        ("long_prefill_token_threshold", 64),
        ("attention_backend", "torch"),
        ("tensor_parallel_size", 3),
    ],
)
def test_whatever_is_of_a_kv_cache_is_refused_for_encoders(field, value):
    folder = str(tiny_encoder("Bert"))
    check(EngineArgs(model=folder))
    with pytest.raises(UnsupportedError, match=field):
        check(EngineArgs(model=folder, **{field: value}))
