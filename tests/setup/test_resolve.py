import re
from dataclasses import replace

import pytest
from support.encoders import tiny_encoder

from pelton.checkpoint.source import Checkpoint
from pelton.config.engine import EngineArgs
from pelton.config.graphs import GraphsConfig
from pelton.config.hardware import DeviceFacts
from pelton.config.memory import MemoryTable
from pelton.config.model import GenerationDefaults, Mamba2Config, ModelConfig, RopeConfig
from pelton.config.quant import QuantConfig
from pelton.errors import ConfigError
from pelton.setup.check import CheckedArgs, check
from pelton.setup.resolve import (
    describe,
    kv_block_bytes,
    num_parameters,
    prefix_warning,
    resolve,
    reusable_prefix,
    weight_bytes,
)

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=RopeConfig(rotary_dim=16, theta=1e4),
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    max_position=200,
    checkpoint_dtype="float32",
)
FACTS = DeviceFacts(
    kind="cpu",
    name="a chip",
    total_bytes=2**34,
    free_bytes=2**33,
    num_cores=3,
    fast_bf16=True,
    fast_fp16=False,
)


@pytest.fixture(autouse=True)
def _no_omp(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def checked(tmp_path):
    def inner(*, is_quantised=False, model=MODEL, **args):
        checkpoint = Checkpoint(
            name="m",
            format="safetensors",
            load_format="dummy",
            folder=tmp_path,
            files=(),
            config_path=None,
        )
        return CheckedArgs(
            args=EngineArgs(**args),
            checkpoint=checkpoint,
            model=model,
            generation=GenerationDefaults(),
            is_quantised=is_quantised,
        )

    return inner


BLOCKS = QuantConfig(scheme="gguf", num_elements=1000, num_bytes=600)
KERNELS = replace(FACTS, has_cpu_kernels=True)


def test_blocks_stay_where_kernels_take_them(checked):
    with_blocks = replace(checked(is_quantised=True), quantised=BLOCKS)
    assert resolve(with_blocks, KERNELS).quantization == BLOCKS
    assert "in the file's blocks" in describe(resolve(with_blocks, KERNELS))
    for other, facts in (
        (with_blocks, FACTS),
        (replace(with_blocks, args=EngineArgs(quantization="dequantise")), KERNELS),
        (replace(with_blocks, args=EngineArgs(dtype="float16")), KERNELS),
        (checked(), KERNELS),
    ):
        assert resolve(other, facts).quantization == QuantConfig(scheme="dequantise")
    asked = replace(with_blocks, args=EngineArgs(quantization="gguf"))
    assert resolve(asked, KERNELS).quantization == BLOCKS


def test_blocks_that_are_asked_for_and_cannot_stay(checked):
    for other, facts, says in (
        (checked(quantization="gguf"), KERNELS, "needs a GGUF file with weights in one of Q4_0, "),
        (
            replace(checked(quantization="gguf"), quantised=BLOCKS),
            FACTS,
            "needs the CPU and its compiled kernels",
        ),
        (
            replace(checked(quantization="gguf", dtype="float16"), quantised=BLOCKS),
            KERNELS,
            "computes in float32 and bfloat16, got dtype='float16'",
        ),
    ):
        with pytest.raises(ConfigError, match=f"quantization='gguf' {says}"):
            resolve(other, facts)


def test_blocks_leave_more_memory_to_the_cache():
    size = num_parameters(MODEL)
    kept = QuantConfig(scheme="gguf", num_elements=size - 10, num_bytes=7)
    assert weight_bytes(MODEL, "bfloat16", kept) == 27
    assert weight_bytes(MODEL, "bfloat16", QuantConfig()) == 2 * size


def test_number_of_parameters_equals_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    for tied, bias in ((False, False), (True, True)):
        model = replace(MODEL, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
        theirs = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=100,
                tie_word_embeddings=tied,
                attention_bias=bias,
                mlp_bias=bias,
            )
        )
        assert num_parameters(model) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("dtype", "stored", "is_quantised", "bf16", "fp16", "expected"),
    [
        ("auto", "bfloat16", False, True, True, "bfloat16"),
        ("auto", "bfloat16", False, False, True, "float32"),
        ("auto", "float16", False, True, True, "float16"),
        ("auto", "float16", False, True, False, "float32"),
        ("auto", "float32", False, True, True, "float32"),
        ("auto", "float32", True, True, True, "bfloat16"),
        ("auto", "float32", True, False, True, "float32"),
        ("float16", "bfloat16", False, True, False, "float16"),
    ],
)
def test_dtype(checked, dtype, stored, is_quantised, bf16, fp16, expected):
    model = replace(MODEL, checkpoint_dtype=stored)
    facts = replace(FACTS, fast_bf16=bf16, fast_fp16=fp16)
    config = resolve(checked(dtype=dtype, model=model, is_quantised=is_quantised), facts)
    assert config.dtype == config.cache.dtype == expected


@pytest.mark.parametrize(
    ("kernels", "options", "expected"),
    [
        (True, {}, "native"),
        (True, {"dtype": "bfloat16"}, "native"),
        (False, {}, "torch"),
        (True, {"dtype": "float16"}, "native"),
        (True, {"kv_cache_dtype": "int8"}, "native"),
        (False, {"kv_cache_dtype": "int8"}, "torch"),
        (True, {"batch_invariant": True}, "invariant"),
        (True, {"attention_backend": "torch"}, "torch"),
        (True, {"attention_backend": "native"}, "native"),
    ],
)
def test_attention_backend(checked, kernels, options, expected):
    facts = replace(FACTS, has_cpu_kernels=kernels)
    assert resolve(checked(**options), facts).attention_backend == expected


def test_native_attention_is_refused_where_it_does_not_serve(checked):
    facts = replace(FACTS, has_cpu_kernels=False)
    with pytest.raises(ConfigError, match="needs the CPU and its compiled kernels"):
        resolve(checked(attention_backend="native"), facts)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "triton"),
        ({"dtype": "float16"}, "triton"),
        ({"batch_invariant": True}, "triton_invariant"),
        ({"batch_invariant": True, "attention_backend": "invariant"}, "invariant"),
        ({"kv_cache_dtype": "int8"}, "triton"),
        ({"kv_cache_dtype": "int8", "batch_invariant": True}, "triton_invariant"),
        ({"attention_backend": "torch"}, "torch"),
        ({"model": replace(MODEL, head_dim=320)}, "torch"),
        ({"model": replace(MODEL, head_dim=320), "batch_invariant": True}, "invariant"),
    ],
)
def test_attention_backend_with_triton(checked, options, expected):
    facts = replace(FACTS, has_triton=True)
    assert resolve(checked(**options), facts).attention_backend == expected


@pytest.mark.parametrize("backend", ["triton", "triton_invariant"])
@pytest.mark.parametrize(
    ("has_triton", "options", "reason"),
    [
        (False, {}, "needs an NVIDIA GPU and Triton"),
        (True, {"model": replace(MODEL, head_dim=320)}, "got head_dim=320"),
        (True, {"model": replace(MODEL, num_heads=65, num_kv_heads=1)}, "up to 64 query heads"),
    ],
)
def test_triton_attention_is_refused_where_it_does_not_serve(
    checked, has_triton, options, reason, backend
):
    facts = replace(FACTS, has_triton=has_triton)
    with pytest.raises(ConfigError, match=reason):
        resolve(checked(attention_backend=backend, **options), facts)


def test_defaults(checked):
    config = resolve(checked(), FACTS)
    assert config.scheduler.max_num_seqs == 256
    assert config.scheduler.max_num_batched_tokens == 4096
    assert config.max_model_len == 200
    assert config.device == "cpu"
    assert config.num_threads == 3
    # The pool never exceeds what all rows at full length need, and the null block.
    assert config.cache.num_blocks == 256 * 13 + 1


def test_a_step_has_room_for_every_row(checked):
    scheduler = resolve(checked(max_num_seqs=5000), FACTS).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (5000, 5000)
    scheduler = resolve(checked(max_num_batched_tokens=64), FACTS).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (64, 64)


def test_threads(checked, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    assert resolve(checked(), FACTS).num_threads == 7
    assert resolve(checked(num_threads=5), FACTS).num_threads == 5
    with pytest.raises(ConfigError, match="num_threads=7"):
        resolve(checked(num_threads=7), FACTS)
    for text in ("0", "many", "-1"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS must be"):
            resolve(checked(), FACTS)


def test_the_share_of_free_memory(checked):
    weights = num_parameters(MODEL) * 4
    block = kv_block_bytes(MODEL, 16, "float32")
    assert block == 2 * 16 * 2 * 2 * 16 * 4
    facts = replace(FACTS, free_bytes=2 * (weights + 10 * block))
    assert resolve(checked(), facts).cache.num_blocks == 10
    facts = replace(FACTS, free_bytes=4 * (weights + 20 * block))
    assert resolve(checked(gpu_memory_utilization=0.25), facts).cache.num_blocks == 20


def test_on_a_gpu_what_others_use_counts(checked):
    weights = num_parameters(MODEL) * 4
    block = kv_block_bytes(MODEL, 16, "float32")
    total = 1000 * block
    facts = replace(FACTS, kind="cuda", total_bytes=total, free_bytes=total - 600 * block)
    config = resolve(checked(max_num_batched_tokens=256), facts)
    assert config.cache.num_blocks == int(0.9 * total - 600 * block - weights) // block
    assert config.device == "cuda"


def test_given_sizes_win(checked):
    assert resolve(checked(num_gpu_blocks_override=7), FACTS).cache.num_blocks == 7
    block = kv_block_bytes(MODEL, 16, "float32")
    config = resolve(checked(kv_cache_memory_bytes=9 * block + 5), FACTS)
    assert config.cache.num_blocks == 9


CODES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_quantised_kv_takes_a_byte_for_each_number(checked, dtype, bytes_each, name):
    """And two for the scale of a head of 16: so many times more blocks in the same memory."""
    memory = 2**20
    plain = resolve(checked(dtype=dtype, kv_cache_memory_bytes=memory), FACTS)
    config = resolve(checked(dtype=dtype, kv_cache_dtype=name, kv_cache_memory_bytes=memory), FACTS)
    assert (config.dtype, config.cache.dtype) == (dtype, CODES[name])
    plain_block = kv_block_bytes(MODEL, 16, dtype)
    block = kv_block_bytes(MODEL, 16, CODES[name])
    assert (plain_block, block) == (2 * 16 * 2 * 2 * 16 * bytes_each, 2 * 16 * 2 * 2 * (16 + 2))
    assert plain.cache.num_blocks == memory // plain_block
    assert config.cache.num_blocks == memory // block
    text = describe(config)
    assert f"1 MiB of {CODES[name]} with scales in bfloat16" in text
    assert "scales" not in describe(plain)
    # The bytes that the error asks for are those of quantised blocks.
    with pytest.raises(ConfigError, match=f"raise kv_cache_memory_bytes to {14 * block}"):
        resolve(checked(kv_cache_dtype=name, kv_cache_memory_bytes=1, max_model_len=200), FACTS)


def test_max_model_len_and_the_pool(checked):
    """Case 3: 16 blocks of 4 hold 60 tokens, because the null block is no one's."""
    small = {"num_gpu_blocks_override": 16, "block_size": 4}
    assert resolve(checked(**small), FACTS).max_model_len == 60
    assert resolve(checked(**small, max_model_len=60), FACTS).max_model_len == 60
    with pytest.raises(ConfigError) as error:
        resolve(checked(**small, max_model_len=61), FACTS)
    assert str(error.value) == (
        "max_model_len=61 is above the 60 tokens that the KV cache holds; lower max_model_len to "
        "60, or raise num_gpu_blocks_override to 17."
    )
    small["num_gpu_blocks_override"] = 17
    assert resolve(checked(**small, max_model_len=61), FACTS).max_model_len == 61


@pytest.mark.parametrize("kind", ["cpu", "cuda", "fake"])
def test_a_cache_above_the_devices_memory_is_refused(checked, kind):
    facts = replace(FACTS, kind=kind)
    block, weights = kv_block_bytes(MODEL, 16, "float32"), num_parameters(MODEL) * 4
    most = (facts.total_bytes - weights) // block
    assert resolve(checked(num_gpu_blocks_override=most), facts).cache.num_blocks == most
    resolve(checked(kv_cache_memory_bytes=facts.total_bytes - weights), facts)
    for name, above in (
        ("num_gpu_blocks_override", most + 1),
        ("kv_cache_memory_bytes", facts.total_bytes - weights + 1),
        ("kv_cache_memory_bytes", 2**63 - 1),
    ):
        with pytest.raises(ConfigError, match=f"^{name}={above}: .* above the {2**34} bytes of a"):
            resolve(checked(**{name: above}), facts)


def test_weights_above_the_devices_memory_are_refused(checked):
    model = replace(MODEL, vocab_size=2**22, hidden_size=2**14)
    with pytest.raises(ConfigError, match=f"weights are above the {2**34} bytes of a chip"):
        resolve(checked(model=model, num_gpu_blocks_override=50), FACTS)


@pytest.mark.parametrize(
    ("sizes", "drafts"),
    [
        ({"intermediate_size": 2**20}, None),
        ({"num_heads": 2**12, "num_kv_heads": 2**12, "head_dim": 256}, None),
        (
            {"vocab_size": 2**22, "hidden_size": 16},
            {"method": "ngram", "num_speculative_tokens": 3},
        ),
    ],
)
def test_a_step_above_the_devices_memory_is_refused(checked, sizes, drafts):
    """Weights may fit where what they give for thousands of tokens does not."""
    model = replace(MODEL, **sizes)
    with pytest.raises(ConfigError, match=f"^max_num_batched_tokens=4096: .* above the {2**34} by"):
        resolve(checked(model=model, speculative_config=drafts), FACTS)
    resolve(checked(model=model, speculative_config=drafts, max_num_batched_tokens=256), FACTS)


@pytest.mark.parametrize("field", ["kv_cache_memory_bytes", "gpu_memory_utilization"])
@pytest.mark.parametrize("max_model_len", [None, 200])
def test_the_value_in_the_error_works(checked, field, max_model_len):
    low = {"kv_cache_memory_bytes": 5, "gpu_memory_utilization": 0.0001}[field]
    facts = replace(FACTS, free_bytes=3 * num_parameters(MODEL) * 4)
    with pytest.raises(ConfigError, match="needs at least") as error:
        resolve(checked(max_model_len=max_model_len, **{field: low}), facts)
    found = re.search(rf"raise {field} to ([0-9.]+[0-9])", str(error.value))
    assert found is not None
    value = float(found[1]) if "." in found[1] else int(found[1])
    config = resolve(checked(max_model_len=max_model_len, **{field: value}), facts)
    assert config.max_model_len >= (max_model_len or 16)


def test_too_little_memory_for_any_share(checked):
    with pytest.raises(ConfigError, match=r"free memory: \d+ bytes are needed .* 100 are free"):
        resolve(checked(), replace(FACTS, free_bytes=100))


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 6}, (1, 6)),
    ],
)
def test_speculation(checked, given, lookup):
    config = {"method": "ngram", "num_speculative_tokens": 7, **given}
    resolved = resolve(checked(speculative_config=config), FACTS)
    assert resolved.num_speculative_tokens == 7
    assert resolved.speculation.method == "ngram"
    found = resolved.speculation.prompt_lookup_min, resolved.speculation.prompt_lookup_max
    assert found == lookup
    assert "ngram, up to 7" in describe(resolved)
    plain = resolve(checked(), FACTS)
    assert plain.num_speculative_tokens == 0
    assert "drafts" not in describe(plain)


def test_describe(checked):
    text = describe(resolve(checked(num_gpu_blocks_override=27), FACTS))
    assert "416 tokens in 26 blocks of 16" in text
    assert "2 full-length requests fit" in text
    assert "200 of the checkpoint's 200 tokens" in text
    assert "float32" in text


def test_the_embedded_model():
    config = resolve(check(EngineArgs(max_num_seqs=4, max_model_len=1024)), FACTS)
    assert config.dtype == "bfloat16"
    assert config.cache.num_blocks == 4 * 64 + 1
    assert num_parameters(config.model) == 134_515_008
    assert config.generation.eos_token_ids == (2,)


WINDOWED = replace(MODEL, num_layers=4, layer_kinds=("full", "window", "window", "window"))


def test_a_block_of_a_mixed_model_is_one_groups(checked):
    """One full layer beside three windows: four tables, and a block of one layer's bytes."""
    model = replace(WINDOWED, window=32)
    block = kv_block_bytes(model, 16, "float32")
    assert 4 * block == kv_block_bytes(replace(model, layer_kinds=(), window=None), 16, "float32")
    config = resolve(checked(model=model, kv_cache_memory_bytes=42 * block), FACTS)
    # 41 blocks are 10 for each group, as a prompt needs them.
    assert (config.cache.num_blocks, config.max_model_len) == (42, 160)
    assert config.model.window == 32
    assert "160 tokens in 41 blocks of 16" in describe(config)
    assert "1 full-length requests" in describe(config)
    with pytest.raises(ConfigError, match=f"lower max_model_len to 160.*bytes to {53 * block}"):
        resolve(checked(model=model, kv_cache_memory_bytes=42 * block, max_model_len=200), FACTS)
    most = resolve(checked(model=model, max_num_seqs=3), FACTS)
    assert most.cache.num_blocks == 1 + 3 * 4 * 13


def test_a_window_that_the_cache_cannot_hold_is_none(checked):
    """Then the layers are one group, and a block has the bytes of all: the memory is no more."""
    model = replace(WINDOWED, window=180)
    block = kv_block_bytes(model, 16, "float32")
    budget = 42 * block
    config = resolve(checked(model=model, kv_cache_memory_bytes=budget), FACTS)
    assert config.model.window is None
    assert (config.cache.num_blocks, config.max_model_len) == (10, 144)
    assert config.cache.num_blocks * kv_block_bytes(config.model, 16, "float32") <= budget
    longer = resolve(checked(model=model, kv_cache_memory_bytes=53 * block), FACTS)
    assert (longer.model.window, longer.max_model_len) == (180, 200)


def test_the_smallest_reusable_prefix_is_said(checked):
    """Case 11."""
    assert "reused in multiples of 16 tokens" in describe(resolve(checked(), FACTS))
    assert "not reused" in describe(resolve(checked(enable_prefix_caching=False), FACTS))


MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=16, num_groups=1, conv_width=4)
HYBRID = replace(
    MODEL,
    num_layers=4,
    layer_kinds=("recurrent", "full", "recurrent", "recurrent"),
    mamba2=MAMBA,
    max_position=5000,
)
# float32: 4 * 8 * 16 numbers of state and 3 * (32 + 32) of the convolution's last inputs.
STATE = 3 * (4 * 512 + 4 * 192)
# Blocks of 16 tokens in one attention layer: 4096 bytes. Each state begins a page.
PAGES = 3


def test_the_states_of_all_rows_come_before_the_kv_cache(checked):
    """And of the reserved row; with drafts each row has a ring."""
    block = kv_block_bytes(HYBRID, 16, "float32")
    assert block == 4096
    weights = 4 * num_parameters(HYBRID)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    for changes, ring in (({}, 1), ({"speculative_config": drafts}, 3)):
        free = 2 * (weights + 9 * ring * STATE + 40 * block)
        facts = replace(FACTS, free_bytes=free)
        config = resolve(checked(model=HYBRID, max_num_seqs=8, **changes), facts)
        assert config.cache.num_blocks == 40
        states = f"{9 * ring * STATE / 2**20:.1f} MiB for 8 requests; kept every 256 tokens, in 3"
        assert states in describe(config)
        with pytest.raises(ConfigError, match=rf"{101 * ring * STATE} of .*max_num_seqs=100"):
            resolve(checked(model=HYBRID, max_num_seqs=100, **changes), facts)


def test_by_default_states_leave_half_for_the_kv_cache(checked):
    weights = 4 * num_parameters(HYBRID)
    facts = replace(FACTS, free_bytes=2 * (weights + 100 * STATE))
    assert resolve(checked(model=HYBRID), facts).scheduler.max_num_seqs == 49
    assert resolve(checked(model=HYBRID), FACTS).scheduler.max_num_seqs == 256


def test_states_above_the_devices_memory_are_refused(checked):
    facts = replace(FACTS, total_bytes=4 * num_parameters(HYBRID) + 10**7)
    given = {"model": HYBRID, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 2000}
    resolve(checked(max_num_seqs=10**7 // STATE - 10, **given), facts)
    with pytest.raises(ConfigError, match=f"{2001 * STATE} of recurrent state"):
        resolve(checked(max_num_seqs=2000, **given), facts)


def test_how_often_state_is_kept(checked):
    for args, interval in (
        ({}, 256),
        ({"block_size": 48}, 288),
        ({"mamba_block_size": 64}, 64),
        ({"enable_prefix_caching": False}, 0),
    ):
        config = resolve(checked(model=HYBRID, **args), FACTS)
        assert config.cache.checkpoint_interval == interval == reusable_prefix(config)
        assert config.cache.enable_prefix_caching == (interval > 0)
        said = f"multiples of {interval} tokens" if interval else "not reused"
        assert said in describe(config)
        assert prefix_warning(config) is None
    assert resolve(checked(), FACTS).cache.checkpoint_interval == 0
    assert "states" not in describe(resolve(checked(), FACTS))


def test_a_pool_has_room_for_checkpoints(checked):
    """Beside full-length requests; and none of them counts as needed."""
    config = resolve(checked(model=HYBRID, max_num_seqs=2, max_model_len=1000), FACTS)
    assert config.cache.num_blocks == 1 + 2 * 63 + 2 * PAGES * 3
    small = resolve(checked(model=HYBRID, num_gpu_blocks_override=8, max_num_seqs=2), FACTS)
    assert small.max_model_len == 7 * 16


def test_prefixes_that_are_hardly_ever_shared_are_warned_of(checked):
    """Case 11."""
    far = resolve(checked(model=HYBRID, mamba_block_size=528), FACTS)
    assert "fewer than 528 tokens" in (prefix_warning(far) or "")
    assert "smaller mamba_block_size (now 528)" in (prefix_warning(far) or "")
    near = resolve(checked(model=HYBRID, mamba_block_size=512), FACTS)
    assert prefix_warning(near) is None
    for num_blocks, fits in ((PAGES, False), (PAGES + 1, True)):
        config = resolve(checked(model=HYBRID, num_gpu_blocks_override=num_blocks), FACTS)
        warning = prefix_warning(config)
        assert (warning is None) == fits
        assert ("not reused" in describe(config)) != fits
        if warning is not None:
            assert f"takes {PAGES} blocks, and the KV cache has {PAGES - 1}" in warning


def test_host_pages(checked):
    """GiB of blocks, quantised ones too; more than is free beside the engine is refused."""
    block = kv_block_bytes(MODEL, 16, "float32")
    assert resolve(checked(), FACTS).cache.num_host_pages == 0
    assert resolve(checked(kv_offloading_size=0), FACTS).cache.num_host_pages == 0
    config = resolve(checked(kv_offloading_size=0.25), FACTS)
    assert config.cache.num_host_pages == 2**28 // block
    assert f"{2**28 // block * 16} tokens of preempted requests in 256 MiB" in describe(config)
    assert "offload" not in describe(resolve(checked(), FACTS))
    small = resolve(checked(kv_offloading_size=0.25, kv_cache_dtype="int8"), FACTS)
    assert small.cache.num_host_pages > 2 * config.cache.num_host_pages
    with pytest.raises(ConfigError, match=r"kv_offloading_size=8 GiB is above the 7\.\d+ GiB"):
        resolve(checked(kv_offloading_size=8, num_gpu_blocks_override=20), FACTS)
    with pytest.raises(ConfigError, match=f"does not hold one KV block of {block} bytes"):
        resolve(checked(kv_offloading_size=1e-6), FACTS)


def test_the_advised_size_of_host_memory_works(checked):
    given = {"num_gpu_blocks_override": 20}
    with pytest.raises(ConfigError) as caught:
        resolve(checked(kv_offloading_size=99, **given), FACTS)
    (advised,) = re.findall(r"lower it to ([\d.]+) or less", str(caught.value))
    assert resolve(checked(kv_offloading_size=float(advised), **given), FACTS).cache.num_host_pages


def test_host_memory_beside_a_gpu(checked):
    facts = replace(FACTS, kind="cuda", host_free_bytes=2**30)
    config = resolve(checked(kv_offloading_size=1), facts)
    assert config.cache.num_host_pages == 2**30 // kv_block_bytes(MODEL, 16, config.cache.dtype)
    with pytest.raises(ConfigError, match=r"above the 1\.0 GiB of host memory"):
        resolve(checked(kv_offloading_size=1.1), facts)


GPU = replace(FACTS, kind="cuda", total_bytes=2**37, free_bytes=2**37)


def test_what_is_recorded(checked):
    assert resolve(checked(), FACTS).graphs == GraphsConfig(every_decode_size=True)
    for facts in (FACTS, GPU):
        assert resolve(checked(enforce_eager=True), facts).graphs.is_eager
    graphs = resolve(checked(max_num_seqs=100, max_num_batched_tokens=600), GPU).graphs
    assert graphs.decode_sizes[:5] == (1, 2, 4, 8, 16)
    assert graphs.decode_sizes[-2:] == (96, 100), "a full step is not padded"
    assert graphs.token_sizes == (16, 32, 64, 128, 256, 512)
    assert resolve(checked(max_num_seqs=2000, max_num_batched_tokens=9000), GPU).graphs == (
        GraphsConfig(
            decode_sizes=(1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)),
            token_sizes=(16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048),
        )
    )


def test_given_sizes_of_graphs(checked):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    config = resolve(
        checked(cudagraph_capture_sizes=[64, 8, 1], max_num_seqs=50, speculative_config=drafts), GPU
    )
    # Rows with one token and rows with four.
    assert config.graphs.decode_sizes == (1, 2, 8, 16)
    assert config.graphs.token_sizes == (1, 8, 64)
    graphs = resolve(checked(max_cudagraph_capture_size=16), GPU).graphs
    assert (graphs.decode_sizes, graphs.token_sizes) == ((1, 2, 4, 8, 16), (16,))


@pytest.mark.parametrize(
    "given", [{"cudagraph_capture_sizes": [4]}, {"max_cudagraph_capture_size": 4}]
)
def test_sizes_of_graphs_are_refused_where_there_are_none(checked, given):
    (name,) = given
    with pytest.raises(ConfigError, match=rf"{name}=.*device 'cpu' has none; leave it out"):
        resolve(checked(**given), FACTS)


def test_whether_the_cache_is_measured(checked):
    """Where its size is given, or by the CPU's share of free memory, it is not."""
    assert resolve(checked(), GPU).cache.memory_share == 0.9
    assert resolve(checked(gpu_memory_utilization=0.5), GPU).cache.memory_share == 0.5
    assert resolve(checked(), FACTS).cache.memory_share is None
    for given in ({"num_gpu_blocks_override": 400}, {"kv_cache_memory_bytes": 2**30}):
        assert resolve(checked(**given), GPU).cache.memory_share is None


def test_the_table_says_what_is_recorded_and_measured(checked):
    config = resolve(checked(), GPU)
    assert "steps of up to 256 rows in 35 sizes" in describe(config)
    gib = 2**30
    memory = MemoryTable(
        others=gib, weights=4 * gib, activations=gib, graphs=gib // 2, kv=20 * gib, total=30 * gib
    )
    text = describe(replace(config, memory=memory))
    assert "kv 20.00, others 1.00, free 3.50 of 30.00 GiB" in text
    assert "op by op" in describe(resolve(checked(enforce_eager=True), GPU))


def test_a_step_holds_the_longest_text():
    checked = check(EngineArgs(model=str(tiny_encoder("Bert")), max_num_batched_tokens=129))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=129 is below max_model_len=130"):
        resolve(checked, FACTS)
    fits = check(EngineArgs(model=str(tiny_encoder("Bert")), max_model_len=129))
    config = resolve(fits, FACTS)
    assert not config.scheduler.chunks_prompts
    assert not config.cache.enable_prefix_caching
    assert config.max_model_len == 129
    assert "none: a text is computed in one step" in describe(config)


@pytest.mark.parametrize(
    ("changes", "device"), [({}, "cuda:3"), ({"tensor_parallel_size": 2}, "cuda:6")]
)
def test_each_engine_has_gpus_of_its_own(checked, changes, device):
    gpus = replace(FACTS, kind="cuda", num_devices=8, host_free_bytes=2**33)
    config = resolve(checked(data_parallel_size=4, device="cuda", **changes), gpus, replica=3)
    assert config.device == device
    assert config.parallel.data == 4
    alone = resolve(checked(device="cuda", **changes), gpus)
    assert alone.device == "cuda"
    assert replace(config, device="cuda", num_threads=1, parallel=alone.parallel) == replace(
        alone, num_threads=1
    )


def test_engines_of_a_cpu_have_threads_and_memory_for_all(checked):
    facts = replace(FACTS, num_cores=8, free_bytes=3_000_000)
    one = resolve(checked(), facts)
    config = resolve(checked(data_parallel_size=2), facts, replica=1)
    assert config.device == "cpu"
    assert (one.num_threads, config.num_threads) == (8, 4)
    assert config.cache.num_blocks < one.cache.num_blocks
    assert "2, each as above" in describe(config)
