"""Checked arguments and facts about the device become the one `EngineConfig`."""

from __future__ import annotations

from dataclasses import replace

from pelton.config.cache import CacheConfig
from pelton.config.encoder import EncoderConfig
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.env import omp_num_threads
from pelton.config.graphs import GraphsConfig
from pelton.config.hardware import DeviceFacts
from pelton.config.model import ModelConfig
from pelton.config.parallel import ParallelConfig
from pelton.config.quant import QuantConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.config.speculation import SpeculationConfig
from pelton.core.kv.groups import block_bytes, group_layers, smallest_reusable_prefix
from pelton.core.kv.spec import KVGroup, LayerKV, mamba2_state, page_bytes_of, scale_dtype_of
from pelton.device.native.forms import FORMS
from pelton.errors import ConfigError
from pelton.quant.table import DEQUANTISE, GGUF
from pelton.setup.check import KV_CODES, CheckedArgs
from pelton.setup.shares import share_of

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEFAULT_SHARE = {"cpu": 0.5, "cuda": 0.9, "fake": 0.5}
_DEFAULT_NUM_SEQS = 256
_DEFAULT_BATCHED_TOKENS = {"cpu": 4096, "cuda": 8192, "fake": 4096}
# Tokens of a repeated ending. Two can be chance, and a longer one is preferred where it is.
_DEFAULT_LOOKUP = (2, 5)
# Tokens between checkpoints of recurrent state. Each ends a step of a prompt, and takes as much
# memory as the KV of some thousand tokens.
_DEFAULT_MAMBA_BLOCK = 256
# Of what the weights leave, the share that the states of requests take by default.
_STATES_SHARE = 0.5
# Tokens. Shared system prompts are often no longer than this.
_LONG_PREFIX = 512
_RESERVED_ROWS = 1
# Of a pool that nobody uses: the null block and another.
_LEAST_BLOCKS = 2
# Rows of captured decodes, and tokens of other captured steps. Neighbours are so close that padding
# costs little; a step of more tokens is so long that launching it takes no time beside it.
_DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
_MOST_DECODE_ROWS = 512
_TOKEN_SIZES = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
# What the Triton kernels of attention take (ops/qkv_attention).
_MAX_TRITON_HEAD, _MAX_TRITON_GROUP = 256, 64
_MIB = 2**20
_GIB = 2**30


def num_parameters(model: ModelConfig) -> int:
    """Elements of all weights, from the configuration alone."""
    if model.encoder is not None:
        return _encoder_parameters(model, model.encoder)
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden = model.hidden_size
    has_qkv_bias = model.attention_bias or model.qkv_bias
    attention = (
        hidden * (query + 2 * kv)
        + query * hidden
        + has_qkv_bias * (query + 2 * kv)
        + model.attention_bias * hidden
        + 2 * model.qk_norm * model.head_dim
        + model.joint_qk_norm * (query + kv)
        + model.attention_sinks * model.num_heads
    )
    norms = 2 * (model.pre_norms + model.post_norms) * hidden
    has_own_head = model.has_lm_head and not model.tie_word_embeddings
    embeddings = model.vocab_size * hidden * (1 + has_own_head)
    embeddings += model.num_labels * (hidden + (model.classifier == "token"))
    mlps = sum(_mlp_parameters(model, model.is_sparse(i)) for i in range(model.num_layers))
    num_recurrent = model.layer_kinds.count("recurrent")
    mixers = (model.num_layers - num_recurrent) * attention
    mixers += num_recurrent * _recurrent_parameters(model)
    return mixers + mlps + model.num_layers * norms + embeddings + hidden


def _encoder_parameters(model: ModelConfig, encoder: EncoderConfig) -> int:
    hidden, inner = model.hidden_size, model.intermediate_size
    norm = hidden * (1 + encoder.norm_bias)
    embeddings = model.vocab_size + encoder.num_positions + encoder.num_token_types
    attention = 4 * hidden * (hidden + model.attention_bias)
    wide = inner * (1 + encoder.is_gated)
    mlp = hidden * (wide + inner) + model.mlp_bias * (wide + hidden)
    # Norms first: one more behind the last layer, and none before the first one's attention.
    norms = 1 + 2 * model.num_layers
    classifier = model.num_labels * (hidden + 1)
    if encoder.inner_of(model.classifier):
        classifier += hidden * (hidden + encoder.classifier_inner_bias)
        classifier += norm * (encoder.classifier_inner == "gelu_norm")
    layers = model.num_layers * (attention + mlp)
    return hidden * embeddings + norms * norm + layers + classifier


def _recurrent_parameters(model: ModelConfig) -> int:
    """Elements of a recurrent layer, without the norm before it."""
    mamba, hidden = model.mamba2, model.hidden_size
    if mamba is None:
        return 0
    products = hidden * (mamba.projected_size + mamba.inner_size)
    biases = mamba.proj_bias * (mamba.projected_size + hidden)
    convolution = mamba.conv_channels * (mamba.conv_width + mamba.conv_bias)
    return products + biases + convolution + 3 * mamba.num_heads + mamba.inner_size


def _mlp_parameters(model: ModelConfig, is_sparse: bool) -> int:
    """Elements of a feed-forward network, router and experts included."""
    hidden, inner = model.hidden_size, model.intermediate_size
    if not is_sparse:
        return 3 * hidden * inner + model.mlp_bias * (2 * inner + hidden)
    inner = model.moe_intermediate_size
    expert = 3 * hidden * inner + model.expert_bias * (2 * inner + hidden)
    shared = 3 * hidden * model.shared_intermediate_size
    return model.num_experts * (expert + hidden + model.router_bias) + shared


def kv_layers(
    model: ModelConfig, block_size: int, dtype: str, *, state_dtype: str = "float32"
) -> list[LayerKV]:
    """What the model's layers will ask of the KV cache, whose element type is `dtype`.
    state_dtype: the model's own, in which recurrent layers remember their last inputs."""
    if not model.keeps_kv:
        return []
    state = None if model.mamba2 is None else mamba2_state(model.mamba2, state_dtype)
    attention = LayerKV(
        index=0,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        page_bytes=page_bytes_of(
            dtype,
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
        ),
        dtype=dtype,
        scale_dtype=scale_dtype_of(dtype),
    )
    layers = {
        "full": attention,
        "window": attention
        if model.window is None
        else replace(attention, kind="window", window=model.window),
        "recurrent": LayerKV(
            index=0,
            num_kv_heads=0,
            head_dim=0,
            block_size=block_size,
            page_bytes=0,
            dtype=state_dtype,
            kind="recurrent",
            recurrent=state,
        ),
    }
    return [replace(layers[model.layer_kind(i)], index=i) for i in range(model.num_layers)]


def kv_block_bytes(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in the layers of one KV group."""
    return block_bytes(kv_layers(model, block_size, dtype))


def num_kv_groups(model: ModelConfig) -> int:
    """Block tables of a request. The prompt needs blocks for all its tokens in each."""
    return len(group_layers(kv_layers(model, 1, "float32")))


def weight_bytes(model: ModelConfig, dtype: str, quantised: QuantConfig) -> int:
    """Of all weights in memory."""
    plain = max(num_parameters(model) - quantised.num_elements, 0)
    return plain * _DTYPE_BYTES[dtype] + quantised.num_bytes


def resolve(checked: CheckedArgs, facts: DeviceFacts, *, replica: int = 0) -> EngineConfig:
    """Decide everything that was left open. replica: which one of data_parallel_size equal engines
    this is. Raises ConfigError, with the numbers that would work,
    when the model or max_model_len does not fit the device."""
    args, model = checked.args, checked.model
    device = args.device if args.device != "auto" else facts.kind
    assert device.partition(":")[0] == facts.kind, "facts of another device"
    if args.data_parallel_size > 1:
        facts = share_of(facts, args)
        if facts.kind == "cuda":
            device = f"cuda:{replica * args.num_ranks}"
    dtype = _dtype(checked, facts)
    checked = replace(checked, quantised=_quantised(checked, facts, dtype))
    max_num_seqs, max_num_batched_tokens = _step_limits(checked, facts, dtype)
    _refuse_large_steps(checked, facts, dtype, max_num_seqs, max_num_batched_tokens)
    model = model.for_length(_wanted_len(checked))
    checked = replace(checked, model=model)
    num_blocks, max_model_len = _kv_cache(checked, facts, dtype, max_num_seqs)
    if model.window is not None and model.window >= max_model_len:
        # The cache ends before the window does: without windows the layers are grouped otherwise.
        window, model = model.window, model.for_length(max_model_len)
        checked = replace(checked, model=model)
        num_blocks, max_model_len = _kv_cache(checked, facts, dtype, max_num_seqs)
        max_model_len = min(max_model_len, window)
    return EngineConfig(
        model=model,
        pooling=checked.pooling,
        generation=checked.generation,
        cache=CacheConfig(
            block_size=args.block_size,
            num_blocks=num_blocks,
            dtype=_kv_dtype(args, dtype),
            enable_prefix_caching=args.enable_prefix_caching and model.keeps_kv,
            checkpoint_interval=_checkpoint_interval(args, model),
            num_host_pages=_num_host_pages(checked, facts, dtype, num_blocks),
            memory_share=_memory_share(args, facts) if model.keeps_kv else None,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            policy=args.scheduling_policy,
            # Fewer would leave stages idle.
            max_steps_in_flight=max(args.max_steps_in_flight, args.pipeline_parallel_size),
            num_stages=args.pipeline_parallel_size,
            chunks_prompts=model.keeps_kv,
        ),
        dtype=dtype,
        device=device,
        seed=args.seed,
        max_model_len=max_model_len,
        attention_backend=_attention_backend(checked, facts, dtype),
        batch_invariant=args.batch_invariant,
        staging_mode=args.staging_mode,
        num_threads=_num_threads(args, facts),
        max_logprobs=args.max_logprobs,
        speculation=_speculation(args),
        graphs=_graphs(checked, facts, max_num_seqs, max_num_batched_tokens),
        quantization=checked.quantised,
        enable_prompt_embeds=args.enable_prompt_embeds,
        parallel=_parallel(args, facts),
    )


def _parallel(args: EngineArgs, facts: DeviceFacts) -> ParallelConfig:
    """Raises ConfigError where there are not so many devices."""
    parallel = ParallelConfig(
        tensor=args.tensor_parallel_size,
        pipeline=args.pipeline_parallel_size,
        data=args.data_parallel_size,
        step_timeout=float(args.step_timeout),
    )
    if facts.kind == "cuda" and parallel.num_ranks > facts.num_devices:
        raise ConfigError(
            f"tensor_parallel_size={parallel.tensor} times pipeline_parallel_size="
            f"{parallel.pipeline} needs {parallel.num_ranks} GPUs, and there are "
            f"{facts.num_devices}; lower them."
        )
    return parallel


def _quantised(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> QuantConfig:
    """What stays quantised. Raises ConfigError for "gguf" where blocks cannot stay."""
    asked = checked.args.quantization
    if asked not in (None, GGUF):
        return QuantConfig(scheme=asked)
    unfit = _blocks_unfit(checked, facts, dtype)
    if unfit is None:
        return checked.quantised
    if asked == GGUF:
        raise ConfigError(f"quantization='gguf' {unfit}; leave it out or use 'dequantise'.")
    return QuantConfig(scheme=DEQUANTISE)


def _blocks_unfit(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> str | None:
    if checked.args.tensor_parallel_size > 1:
        return "cannot cut blocks for tensor_parallel_size above 1"
    if not checked.quantised.num_bytes:
        return f"needs a GGUF file with weights in one of {', '.join(FORMS)}"
    if not facts.has_cpu_kernels:
        return f"needs the CPU and its compiled kernels, which device {facts.kind!r} has not here"
    if dtype not in ("float32", "bfloat16"):
        return f"computes in float32 and bfloat16, got dtype={dtype!r}"
    return None


def _speculation(args: EngineArgs) -> SpeculationConfig:
    """One lookup length that is given stands for both."""
    given = args.speculative_config
    if given is None:
        return SpeculationConfig()
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if given["method"] == "ngram" and least is None and most is None:
        least, most = _DEFAULT_LOOKUP
    return SpeculationConfig(
        method=given["method"],
        num_speculative_tokens=given["num_speculative_tokens"],
        prompt_lookup_min=least or most or 0,
        prompt_lookup_max=most or least or 0,
    )


def _graphs(
    checked: CheckedArgs, facts: DeviceFacts, max_num_seqs: int, max_num_batched_tokens: int
) -> GraphsConfig:
    """Raises ConfigError for sizes of CUDA graphs where there are none."""
    args, pools = checked.args, bool(checked.pooling.tasks)
    given = args.cudagraph_capture_sizes
    if facts.kind != "cuda" or pools:
        who = "an engine that pools" if pools else f"device {facts.kind!r}"
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(args, name)!r} is for CUDA graphs, and {who} has none; leave "
                    "it out."
                )
    # What a step pools differs from step to step, and long prompts hide the launching.
    if args.enforce_eager or pools:
        return GraphsConfig()
    if facts.kind != "cuda":
        return GraphsConfig(every_decode_size=True)
    most = args.max_cudagraph_capture_size or max_num_batched_tokens
    num_drafts = _speculation(args).num_speculative_tokens
    if given is None:
        rows = {*_DECODE_SIZES, *range(_DECODE_SIZES[-1], _MOST_DECODE_ROWS + 1, 16)}
        # What is full often is never padded.
        rows |= {min(max_num_seqs, _MOST_DECODE_ROWS)}
        tokens = set(_TOKEN_SIZES)
    else:
        rows = {size // query_len for size in given for query_len in {1, 1 + num_drafts}}
        tokens = set(given)
    return GraphsConfig(
        decode_sizes=tuple(sorted(size for size in rows if 0 < size <= min(max_num_seqs, most))),
        token_sizes=tuple(sorted(size for size in tokens if size <= most)),
    )


def _attention_backend(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> str:
    """Raises ConfigError for kernels that do not serve here."""
    args = checked.args
    native, triton = _native_unfit(facts), _triton_unfit(checked, facts, dtype)
    if args.attention_backend == "auto":
        if args.batch_invariant:
            return "invariant" if triton else "triton_invariant"
        if triton is None:
            return "triton"
        return "torch" if native else "native"
    if args.attention_backend == "native" and native is not None:
        raise ConfigError(f"attention_backend='native' {native}; use 'auto' or 'torch'.")
    if args.attention_backend in ("triton", "triton_invariant") and triton is not None:
        raise ConfigError(f"attention_backend={args.attention_backend!r} {triton}; use 'auto'.")
    return args.attention_backend


def _triton_unfit(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> str | None:
    model = checked.model
    if not facts.has_triton:
        return f"needs an NVIDIA GPU and Triton, which device {facts.kind!r} has not here"
    if model.head_dim > _MAX_TRITON_HEAD:
        return f"takes heads of up to {_MAX_TRITON_HEAD}, got head_dim={model.head_dim}"
    if model.num_heads > _MAX_TRITON_GROUP * model.num_kv_heads:
        return f"takes up to {_MAX_TRITON_GROUP} query heads for each key head"
    return None


def _native_unfit(facts: DeviceFacts) -> str | None:
    if not facts.has_cpu_kernels:
        return f"needs the CPU and its compiled kernels, which device {facts.kind!r} has not here"
    return None


def _num_threads(args: EngineArgs, facts: DeviceFacts) -> int:
    """Raises ConfigError for more than two per core: they would wait for each other's turns."""
    most = 2 * facts.num_cores
    if args.num_threads is not None and args.num_threads > most:
        raise ConfigError(
            f"num_threads={args.num_threads} is above two for each of the {facts.num_cores} "
            f"physical cores that this process may use; lower it to {most} or less."
        )
    alone = args.num_threads or omp_num_threads()
    return alone or max(facts.num_cores // args.num_ranks, 1)


def _dtype(checked: CheckedArgs, facts: DeviceFacts) -> str:
    if checked.args.dtype != "auto":
        return checked.args.dtype
    wanted = "bfloat16" if checked.is_quantised else checked.model.checkpoint_dtype
    is_fast = {"float32": True, "bfloat16": facts.fast_bf16, "float16": facts.fast_fp16}[wanted]
    return wanted if is_fast else "float32"


def _kv_dtype(args: EngineArgs, dtype: str) -> str:
    return KV_CODES.get(args.kv_cache_dtype, dtype)


def _checkpoint_interval(args: EngineArgs, model: ModelConfig) -> int:
    """Tokens; 0 where no state is kept."""
    if not model.is_recurrent or not args.enable_prefix_caching:
        return 0
    return args.mamba_block_size or -(-_DEFAULT_MAMBA_BLOCK // args.block_size) * args.block_size


def _step_limits(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens). What the user gave bounds the other's default, and so
    does the memory that the rows' recurrent states take."""
    tokens = checked.args.max_num_batched_tokens
    rows = checked.args.max_num_seqs
    if rows is None:
        rows = min(_DEFAULT_NUM_SEQS, tokens or _DEFAULT_NUM_SEQS)
        per_row = _state_bytes(checked, dtype, num_rows=1)
        if per_row:
            left = _usable_bytes(checked, facts) - _weight_bytes(checked, dtype)
            rows = min(rows, max(int(_STATES_SHARE * left) // per_row - _RESERVED_ROWS, 1))
    longest = 0 if checked.model.keeps_kv else _wanted_len(checked)
    if tokens is None:
        tokens = max(_DEFAULT_BATCHED_TOKENS[facts.kind], rows, longest)
    if tokens < longest:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is below max_model_len={longest}, and a text whose "
            f"tokens all see each other is computed in one step; raise it to {longest} or lower "
            "max_model_len."
        )
    return rows, tokens


def _wanted_len(checked: CheckedArgs) -> int:
    """Tokens, if the KV cache holds them: as given, or what the checkpoint was made for."""
    most = checked.model.max_position
    if checked.pooling.max_prompt_tokens is not None:
        most = min(most, checked.pooling.max_prompt_tokens)
    return checked.args.max_model_len or most


def _kv_cache(
    checked: CheckedArgs, facts: DeviceFacts, dtype: str, max_num_seqs: int
) -> tuple[int, int]:
    """(num_blocks with the null block, max_model_len)."""
    args, model = checked.args, checked.model
    size, num_groups = args.block_size, num_kv_groups(model)
    wanted_len = _wanted_len(checked)
    if not model.keeps_kv:
        _refuse_more_than_memory(checked, facts, dtype)
        return _LEAST_BLOCKS, wanted_len
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    else:
        # More blocks than every row at full length needs would never be used.
        most = 1 + max_num_seqs * num_groups * -(-wanted_len // size)
        interval = _checkpoint_interval(args, model)
        if interval:
            pages = _groups(model, size, _kv_dtype(args, dtype), interval, dtype)[-1].pages
            most += max_num_seqs * pages * (wanted_len // interval)
        num_blocks = min(most, _affordable_blocks(checked, facts, dtype))
    _refuse_more_than_memory(checked, facts, dtype)
    fits = (num_blocks - 1) // num_groups * size
    if args.max_model_len is not None and args.max_model_len > fits:
        raise ConfigError(
            f"max_model_len={args.max_model_len} is above the {fits} tokens that the KV cache "
            f"holds; lower max_model_len to {fits}, or {_larger_cache(checked, facts, dtype)}."
        )
    return num_blocks, min(wanted_len, fits)


def _refuse_large_steps(
    checked: CheckedArgs, facts: DeviceFacts, dtype: str, max_num_seqs: int, max_tokens: int
) -> None:
    """A step's buffers, by their largest: what passes from layer to layer, and the logits."""
    model, weights = checked.model, _weight_bytes(checked, dtype)
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    num_drafts = (checked.args.speculative_config or {}).get("num_speculative_tokens", 0)
    num_logits = min(max_num_seqs * (1 + num_drafts), max_tokens)
    is_dense = not all(model.is_sparse(index) for index in range(model.num_layers))
    widths = model.hidden_size + attention + 3 * model.intermediate_size * is_dense
    widths += 3 * model.shared_intermediate_size
    if model.mamba2 is not None:
        mamba = model.mamba2
        widths += mamba.projected_size + mamba.conv_channels + mamba.inner_size
    num_logits *= model.has_lm_head
    step = (max_tokens * widths + num_logits * model.vocab_size) * _DTYPE_BYTES[dtype]
    if weights <= facts.total_bytes < step + weights:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens}: a step of so many tokens needs {step} bytes "
            f"beside {weights} of weights (hidden_size={model.hidden_size}, "
            f"intermediate_size={model.intermediate_size}, vocab_size={model.vocab_size}), above "
            f"the {facts.total_bytes} bytes of {facts.name}; lower it."
        )


def _refuse_more_than_memory(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> None:
    """A given size is not measured against what is free, but no device has more than it has. On a
    CPU pages are handed out late, so that the process would be killed in the middle of its work."""
    args = checked.args
    held = _weight_bytes(checked, dtype) + _all_state_bytes(checked, facts, dtype)
    given, asked = "the weights alone", 0
    if args.num_gpu_blocks_override is not None:
        given = f"num_gpu_blocks_override={args.num_gpu_blocks_override}"
        block = kv_block_bytes(checked.model, args.block_size, _kv_dtype(args, dtype))
        asked = args.num_gpu_blocks_override * block
    elif args.kv_cache_memory_bytes is not None:
        given = f"kv_cache_memory_bytes={args.kv_cache_memory_bytes}"
        asked = args.kv_cache_memory_bytes
    if asked + held > facts.total_bytes:
        raise ConfigError(
            f"{given}: {asked} bytes of KV cache and {_beside(checked, facts, dtype)} are above "
            f"the {facts.total_bytes} bytes of {facts.name}"
            + ("; lower it." if asked else "; take a smaller model or dtype.")
        )


def _state_bytes(checked: CheckedArgs, dtype: str, *, num_rows: int) -> int:
    """Of recurrent layers, for 1 + K states in each row."""
    layers = kv_layers(checked.model, 1, "float32", state_dtype=dtype)
    ring = 1 + _speculation(checked.args).num_speculative_tokens
    return num_rows * ring * sum(layer.state_bytes for layer in layers)


def _all_state_bytes(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> int:
    num_rows = _step_limits(checked, facts, dtype)[0] + _RESERVED_ROWS
    return _state_bytes(checked, dtype, num_rows=num_rows)


def _beside(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> str:
    """What else the device holds, for messages."""
    text = f"{_weight_bytes(checked, dtype)} bytes of weights"
    states = _all_state_bytes(checked, facts, dtype)
    if states:
        rows = _step_limits(checked, facts, dtype)[0]
        text += f" and {states} of recurrent state (max_num_seqs={rows})"
    return text


def _num_host_pages(checked: CheckedArgs, facts: DeviceFacts, dtype: str, num_blocks: int) -> int:
    """Blocks that kv_offloading_size holds. Raises ConfigError for less than one, and for more
    than the host has free beside what the engine itself puts there."""
    size = checked.args.kv_offloading_size
    if not size:
        return 0
    kv_dtype = _kv_dtype(checked.args, dtype)
    block = kv_block_bytes(checked.model, checked.args.block_size, kv_dtype)
    free = facts.host_free_bytes
    if free is None:
        free = facts.free_bytes - _weight_bytes(checked, dtype) - num_blocks * block
    if size * _GIB > free:
        most = max(free, 0) * 1000 // _GIB / 1000
        raise ConfigError(
            f"kv_offloading_size={size} GiB is above the {most} GiB of host memory that are free "
            f"beside the engine; lower it to {most} or less, or leave it out."
        )
    if size * _GIB < block:
        raise ConfigError(
            f"kv_offloading_size={size} GiB does not hold one KV block of {block} bytes; raise it, "
            "or leave it out."
        )
    return int(size * _GIB) // block


def _weight_bytes(checked: CheckedArgs, dtype: str) -> int:
    return weight_bytes(checked.model, dtype, checked.quantised)


def _kv_budget(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> int:
    """Bytes for the KV cache; may be negative."""
    if checked.args.kv_cache_memory_bytes is not None:
        return checked.args.kv_cache_memory_bytes
    weights, states = _weight_bytes(checked, dtype), _all_state_bytes(checked, facts, dtype)
    return _usable_bytes(checked, facts) - weights - states


def _memory_share(args: EngineArgs, facts: DeviceFacts) -> float | None:
    """None where the KV cache's size is given, or no worker can measure what is left."""
    is_given = args.num_gpu_blocks_override or args.kv_cache_memory_bytes
    if facts.kind != "cuda" or is_given:
        return None
    return args.gpu_memory_utilization or _DEFAULT_SHARE[facts.kind]


def _usable_bytes(checked: CheckedArgs, facts: DeviceFacts) -> int:
    """Bytes for everything.

    On CPU the share is of the memory that is free at start. On a GPU it is of the whole device, and
    what others hold there counts as used.
    """
    share = checked.args.gpu_memory_utilization or _DEFAULT_SHARE[facts.kind]
    if facts.kind == "cuda":
        usable = share * facts.total_bytes - (facts.total_bytes - facts.free_bytes)
    else:
        usable = share * facts.free_bytes
    return int(usable)


def _affordable_blocks(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> int:
    args = checked.args
    block = kv_block_bytes(checked.model, args.block_size, _kv_dtype(args, dtype))
    budget = _kv_budget(checked, facts, dtype)
    least = 1 + num_kv_groups(checked.model)
    if budget < least * block:
        given = args.kv_cache_memory_bytes
        have = (
            f"kv_cache_memory_bytes={given}"
            if given is not None
            else f"{budget} bytes are left for the KV cache"
        )
        raise ConfigError(
            f"The KV cache needs at least {least * block} bytes ({least} blocks of {block}) beside "
            f"{_beside(checked, facts, dtype)}, but {have}, with "
            f"{facts.free_bytes} bytes free on {facts.name}: "
            f"{_larger_cache(checked, facts, dtype)}."
        )
    return budget // block


def _larger_cache(checked: CheckedArgs, facts: DeviceFacts, dtype: str) -> str:
    """What to change so that max_model_len (or else one block) fits."""
    args = checked.args
    num_groups = num_kv_groups(checked.model)
    num_blocks = 1 + num_groups * -(-(args.max_model_len or 1) // args.block_size)
    if args.num_gpu_blocks_override is not None:
        return f"raise num_gpu_blocks_override to {num_blocks}"
    needed = num_blocks * kv_block_bytes(checked.model, args.block_size, _kv_dtype(args, dtype))
    if args.kv_cache_memory_bytes is not None:
        return f"raise kv_cache_memory_bytes to {needed}"
    needed += _weight_bytes(checked, dtype) + _all_state_bytes(checked, facts, dtype)
    if facts.kind == "cuda":
        share = (needed + facts.total_bytes - facts.free_bytes) / max(facts.total_bytes, 1)
    else:
        share = needed / max(facts.free_bytes, 1)
    # Rounded up to a hundredth, so that the advice works.
    share = -(-(share * 100) // 1) / 100
    if share <= 1:
        return f"raise gpu_memory_utilization to {share:.2f}"
    return (
        f"free memory: {needed} bytes are needed for weights and KV cache, and "
        f"{facts.free_bytes} are free"
    )


def _groups(
    model: ModelConfig, block_size: int, kv_dtype: str, interval: int, dtype: str
) -> tuple[KVGroup, ...]:
    return group_layers(kv_layers(model, block_size, kv_dtype, state_dtype=dtype), interval)


def _all_groups(config: EngineConfig) -> tuple[KVGroup, ...]:
    cache = config.cache
    return _groups(
        config.model, cache.block_size, cache.dtype, cache.checkpoint_interval, config.dtype
    )


def reusable_prefix(config: EngineConfig) -> int:
    """Tokens. A prefix hit is a multiple of this; 0: there can be none."""
    groups = _all_groups(config)
    if not config.cache.enable_prefix_caching:
        return 0
    if max(group.pages for group in groups) >= config.cache.num_blocks:
        return 0
    return smallest_reusable_prefix(groups)


def prefix_text(config: EngineConfig) -> str:
    length = reusable_prefix(config)
    return f"reused in multiples of {length} tokens" if length else "not reused"


def prefix_warning(config: EngineConfig) -> str | None:
    """Why prompts that begin alike may share nothing, or None if all is well."""
    prefix, cache = reusable_prefix(config), config.cache
    is_recurrent = cache.checkpoint_interval > 0
    if cache.enable_prefix_caching and not prefix:
        return (
            f"No prefix is ever reused: a checkpoint of recurrent state takes "
            f"{_all_groups(config)[-1].pages} blocks, and the KV cache has {cache.num_blocks - 1}. "
            "A larger KV cache helps."
        )
    if prefix <= _LONG_PREFIX:
        return None
    name, value = "block_size", cache.block_size
    if is_recurrent:
        name, value = "mamba_block_size", cache.checkpoint_interval
    return (
        f"Prompts that share fewer than {prefix} tokens share no KV: prefixes are reused in "
        f"multiples of that. A smaller {name} (now {value}) helps."
    )


def dtype_warning(config: EngineConfig) -> str | None:
    """What is faster than the dtype, or None if all is well."""
    if config.dtype != "float16" or config.device != "cpu":
        return None
    return (
        "dtype='float16' is slow on a CPU: Pelton's kernels for its products are for bfloat16 and "
        "float32, and torch's are several times slower. dtype='bfloat16' is the fastest, and "
        "'float32' is faster, too."
    )


def _state_rows(config: EngineConfig) -> dict[str, str]:
    """Of the table, for models with recurrent layers."""
    groups = _all_groups(config)
    layers = kv_layers(config.model, 1, "float32", state_dtype=config.dtype)
    num_seqs, num_states = config.scheduler.max_num_seqs, 1 + config.num_speculative_tokens
    per_state = sum(layer.state_bytes for layer in layers)
    if not per_state:
        return {}
    total = (num_seqs + _RESERVED_ROWS) * num_states * per_state
    kept = "none is kept"
    if not groups[-1].has_table:
        kept = f"kept every {groups[-1].block_size} tokens, in {groups[-1].pages} KV blocks each"
    return {"states": f"{total / _MIB:.1f} MiB for {num_seqs} requests; {kept}"}


def kv_tokens(config: EngineConfig) -> int:
    """Tokens that the KV cache holds."""
    cache = config.cache
    if not config.model.keeps_kv:
        return 0
    return (cache.num_blocks - 1) // num_kv_groups(config.model) * cache.block_size


def full_length_requests(config: EngineConfig) -> int:
    """How many requests of max_model_len tokens the KV cache holds at once."""
    cache = config.cache
    if not config.model.keeps_kv:
        return 0
    per_request = num_kv_groups(config.model) * -(-config.max_model_len // cache.block_size)
    return (cache.num_blocks - 1) // per_request


def _offload_row(config: EngineConfig, block_bytes: int) -> dict[str, str]:
    num_pages = config.cache.num_host_pages
    if not num_pages:
        return {}
    num_tokens = num_pages // num_kv_groups(config.model) * config.cache.block_size
    size = num_pages * block_bytes / _MIB
    return {
        "offload": f"{num_tokens} tokens of preempted requests in {size:.0f} MiB of host memory"
    }


def _graphs_row(graphs: GraphsConfig) -> str:
    if graphs.is_eager:
        return "nothing: steps are launched op by op"
    if graphs.every_decode_size:
        return "decode steps of every size, when they first occur"
    words = []
    for what, sizes in (("rows", graphs.decode_sizes), ("tokens", graphs.token_sizes)):
        if sizes:
            words.append(f"steps of up to {sizes[-1]} {what} in {len(sizes)} sizes")
    return ", ".join(words)


def describe(config: EngineConfig) -> str:
    """A short table for the start of an engine."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    block = kv_block_bytes(model, cache.block_size, cache.dtype)
    scale = scale_dtype_of(cache.dtype)
    codes = "" if scale is None else f" of {cache.dtype} with scales in {scale}"
    weights = weight_bytes(model, config.dtype, config.quantization) / _MIB
    kept = ", most in the file's blocks" if config.quantization.num_bytes else ""
    rows = {
        "model": f"{model.architecture}, {num_parameters(model) / 1e6:.1f} M parameters",
        "device": f"{config.device}, {config.num_threads} threads",
        "dtype": f"{config.dtype}, weights {weights:.0f} MiB{kept}",
        "context": f"{config.max_model_len} of the checkpoint's {model.max_position} tokens",
        "KV cache": f"{kv_tokens(config)} tokens in {cache.num_blocks - 1} blocks of "
        f"{cache.block_size}, {cache.num_blocks * block / _MIB:.0f} MiB{codes}; "
        f"{full_length_requests(config)} full-length requests fit"
        if model.keeps_kv
        else "none: a text is computed in one step",
        **_state_rows(config),
        "prefixes": prefix_text(config),
        **_offload_row(config, block),
        "a step": f"{scheduler.max_num_seqs} requests, {scheduler.max_num_batched_tokens} tokens, "
        f"{scheduler.max_steps_in_flight} in flight",
        "attention": config.attention_backend if model.keeps_kv else "among a text's tokens",
    }
    if config.pools:
        rows["pools"] = f"{', '.join(config.pooling.tasks)}; by default {config.pooling.method}"
    rows["recorded"] = _graphs_row(config.graphs)
    if config.memory is not None:
        rows["memory"] = config.memory.describe()
    if config.parallel.data > 1:
        rows["replicas"] = f"{config.parallel.data}, each as above"
    speculation = config.speculation
    if speculation.num_speculative_tokens:
        rows["drafts"] = f"{speculation.method}, up to {speculation.num_speculative_tokens}"
    return "\n".join(f"{name:<10}{value}" for name, value in rows.items())
