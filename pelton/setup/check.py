"""Everything about an engine's arguments that needs no device. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pelton.attention.table import BACKENDS
from pelton.checkpoint.gguf_config import block_sizes, is_quantised
from pelton.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from pelton.checkpoint.hf_config import (
    read_generation_config,
    read_generation_defaults,
    read_model_config,
)
from pelton.checkpoint.source import LOAD_FORMATS, Checkpoint, resolve_checkpoint
from pelton.config.engine import EngineArgs
from pelton.config.model import GenerationDefaults, ModelConfig
from pelton.config.names import known_names
from pelton.config.pooling import PoolingConfig
from pelton.config.quant import QuantConfig
from pelton.config.speculation import SpeculationConfig
from pelton.core.policy import POLICIES
from pelton.device.native.forms import FORMS
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError, UnsupportedError
from pelton.quant.table import GGUF, SCHEMES
from pelton.setup.pooling import decide_pooling
from pelton.setup.refusals import (
    PIPELINED_RECURRENCE,
    PIPELINED_SPECULATION,
    RECURRENT_OFFLOADING,
    REFUSALS,
    REFUSED_DEVICES,
)
from pelton.speculation.table import SPECULATORS

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's
RUNNERS = ("auto", "generate", "pooling")
DEVICES = ("auto", "cpu", "cuda", "fake")
# kv_cache_dtype -> the type of the codes.
KV_CODES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedArgs:
    """Arguments that can work on some device, with what the checkpoint says.

    is_quantised: the weights are stored in blocks, so that no dtype is the checkpoint's own.
    quantised: what can stay so, and how. pooling: without tasks the engine generates.
    """

    args: EngineArgs
    checkpoint: Checkpoint
    model: ModelConfig
    generation: GenerationDefaults
    is_quantised: bool
    quantised: QuantConfig = field(default_factory=QuantConfig)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)


_INT32 = 2**31 - 1
_OF_KV = {
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "kv_cache_dtype",
    "kv_offloading_size",
    "attention_backend",
    "long_prefill_token_threshold",
}
# field: (least, most); None is legal where it is the field's default.
_INTEGERS: dict[str, tuple[int, int]] = {
    "seed": (-(2**63), 2**63 - 1),
    "max_model_len": (2, _INT32),  # a token of the prompt, a token of the answer
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, _INT32),
    "long_prefill_token_threshold": (0, _INT32),
    "max_steps_in_flight": (1, 8),
    "block_size": (1, 1024),
    "mamba_block_size": (1, _INT32),
    "kv_cache_memory_bytes": (1, 2**63 - 1),
    "num_gpu_blocks_override": (2, _INT32),
    "num_threads": (1, 4096),
    "max_logprobs": (0, _INT32),
    "max_cudagraph_capture_size": (1, _INT32),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "data_parallel_size": (1, 256),
}
_SPECULATION_KEYS = tuple(field.name for field in fields(SpeculationConfig))
# Verification costs a row per draft, and long runs of right drafts are rare.
_MAX_DRAFTS = 64
_BOOLEANS = (
    "enable_prefix_caching",
    "enable_prompt_embeds",
    "batch_invariant",
    "enforce_eager",
)
_TEXTS = ("model", "tokenizer", "revision", "hf_token", "chat_template")
_OPTIONAL = {
    *_TEXTS,
    "max_model_len",
    "mamba_block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_threads",
    "max_cudagraph_capture_size",
}


def check(args: EngineArgs) -> CheckedArgs:
    """Validate types, ranges, names and combinations, and read the checkpoint's configuration.

    Raises ConfigError naming field, value and limit; UnsupportedError for what is refused by name;
    CheckpointError for the checkpoint's faults.
    """
    _refuse(args)
    _check_types(args)
    if isinstance(args.dtype, str):
        args = replace(args, dtype=_DTYPE_ALIASES.get(args.dtype, args.dtype))
    _check_name("load_format", args.load_format, LOAD_FORMATS)
    _check_name("runner", args.runner, RUNNERS)
    _check_name("dtype", args.dtype, DTYPES)
    _check_name("kv_cache_dtype", args.kv_cache_dtype, {"auto", *KV_CODES})
    if args.quantization is not None:
        _check_name("quantization", args.quantization, SCHEMES)
    _check_name("attention_backend", args.attention_backend, {"auto", *BACKENDS})
    _check_name("scheduling_policy", args.scheduling_policy, POLICIES)
    _check_name("staging_mode", args.staging_mode, ("auto", *STAGING_MODES))
    check_device(args.device)
    _check_speculation(args.speculative_config)
    _check_combinations(args)
    checkpoint = resolve_checkpoint(
        args.model, revision=args.revision, token=args.hf_token, load_format=args.load_format
    )
    model = read_model_config(checkpoint, args.hf_overrides)
    pooling = decide_pooling(args, checkpoint, model)
    model = replace(model, has_lm_head=not pooling.tasks)
    _check_lengths(args, model)
    _check_mamba_block_size(args, model)
    _check_parallel(args, model)
    if not model.keeps_kv:
        _check_no_kv(args)
    if args.kv_offloading_size and model.is_recurrent:
        raise UnsupportedError(RECURRENT_OFFLOADING.format(value=args.kv_offloading_size))
    header = read_gguf_header(checkpoint.files[0]) if checkpoint.format == "gguf" else None
    return CheckedArgs(
        args=args,
        checkpoint=checkpoint,
        model=model,
        generation=_generation(args.generation_config, checkpoint, model),
        is_quantised=header is not None and is_quantised(header),
        quantised=(
            QuantConfig()
            if header is None or checkpoint.load_format == "dummy"
            else _in_blocks(header)
        ),
        pooling=pooling,
    )


def _generation(given: str, checkpoint: Checkpoint, model: ModelConfig) -> GenerationDefaults:
    own = read_generation_defaults(checkpoint)
    if given == "auto":
        return own
    if given in ("vllm", "none"):
        return replace(own, sampling={})
    return read_generation_config(Path(given).expanduser(), own, vocab_size=model.vocab_size)


def _in_blocks(header: GGUFHeader) -> QuantConfig:
    num_elements, num_bytes = block_sizes(header, FORMS)
    return QuantConfig(scheme=GGUF, num_elements=num_elements, num_bytes=num_bytes)


def _refuse(args: EngineArgs) -> None:
    for refusal in REFUSALS:
        value = getattr(args, refusal.field)
        if type(value) is not type(refusal.works) or value != refusal.works:
            raise UnsupportedError(refusal.sentence.format(value=value))


def _check_types(args: EngineArgs) -> None:
    for name, (low, high) in _INTEGERS.items():
        value = getattr(args, name)
        if value is None and name in _OPTIONAL:
            continue
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}.")
    if not isinstance(args.generation_config, str) or not args.generation_config:
        raise ConfigError(
            'generation_config must be "auto", "vllm", "none" or a folder, got '
            f"{args.generation_config!r}."
        )
    for name in _BOOLEANS:
        if type(getattr(args, name)) is not bool:
            raise ConfigError(f"{name} must be True or False, got {getattr(args, name)!r}.")
    for name in _TEXTS:
        value = getattr(args, name)
        if value is not None and (not isinstance(value, str) or not value):
            shown = "a value that is not text" if name == "hf_token" else repr(value)
            raise ConfigError(f"{name} must be a non-empty string or None, got {shown}.")
    share: Any = args.gpu_memory_utilization
    if share is not None and (
        type(share) not in (int, float) or not math.isfinite(share) or not 0 < share <= 1
    ):
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share!r}.")
    offloading: Any = args.kv_offloading_size
    if offloading is not None and (
        type(offloading) not in (int, float) or not math.isfinite(offloading) or offloading < 0
    ):
        raise ConfigError(
            f"kv_offloading_size must be a number of GiB that is at least 0, or None, got "
            f"{offloading!r}."
        )
    sizes: Any = args.cudagraph_capture_sizes
    if sizes is not None and not (
        isinstance(sizes, (list, tuple))
        and sizes
        and all(type(size) is int and 0 < size <= _INT32 for size in sizes)
    ):
        raise ConfigError(
            f"cudagraph_capture_sizes must be a list of numbers of tokens, at least 1 each, or "
            f"None, got {sizes!r}."
        )
    overrides: Any = args.hf_overrides
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(f"hf_overrides must be a dict with string keys, got {overrides!r}.")


def _check_name(field: str, value: object, known: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in set(known):
        raise ConfigError(f"{field}={value!r} is not known." + known_names(str(value), known))


def check_device(device: object) -> None:
    """Raises ConfigError for a name that is not known, UnsupportedError for a known one."""
    if isinstance(device, str):
        if device in DEVICES or re.fullmatch(r"cuda:(0|[1-9][0-9]?)", device):
            return
        if device.partition(":")[0] in REFUSED_DEVICES:
            raise UnsupportedError(
                f"device={device!r} is not supported by this version; it runs on cpu and cuda."
            )
    raise ConfigError(
        f"device={device!r} is not known." + known_names(str(device), (*DEVICES, "cuda:N"))
    )


def _check_combinations(args: EngineArgs) -> None:
    rows, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if rows is not None and tokens is not None and tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={rows}, but every request of a "
            f"step takes a token; raise it to {rows} or lower max_num_seqs."
        )
    if args.batch_invariant and args.attention_backend not in (
        "auto",
        "invariant",
        "triton_invariant",
    ):
        raise ConfigError(
            "batch_invariant=True needs attention_backend='invariant' or 'triton_invariant' (or "
            f"'auto', which takes one of them), got {args.attention_backend!r}."
        )
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if args.enforce_eager and getattr(args, name) is not None:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} says which steps are captured, and "
                "enforce_eager=True that none is; leave one of them out."
            )
    sizes = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
    given = [name for name in sizes if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} each set the size of the KV cache; give one of them."
        )


def _check_speculation(given: Any) -> None:
    """Keys, types and ranges of speculative_config."""
    field = "speculative_config"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{field} must be a dict such as {{"method": "ngram", "num_speculative_tokens": 4}}, '
            f"got {given!r}."
        )
    for name in given:
        if name not in _SPECULATION_KEYS:
            raise ConfigError(
                f"{field} has no key {name!r}." + known_names(str(name), _SPECULATION_KEYS)
            )
    for name in ("method", "num_speculative_tokens"):
        if name not in given:
            raise ConfigError(f"{field} must have a {name!r}, got {dict(given)!r}.")
    _check_name(f"{field}['method']", given["method"], SPECULATORS)
    _check_draft_number("num_speculative_tokens", given["num_speculative_tokens"])
    lookups = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if name in given]
    for name in lookups:
        if given["method"] != "ngram":
            raise ConfigError(
                f"{field}[{name!r}] is read by method='ngram' alone; leave it out of "
                f"method={given['method']!r}."
            )
        _check_draft_number(name, given[name])
    if len(lookups) == 2 and given["prompt_lookup_min"] > given["prompt_lookup_max"]:
        raise ConfigError(
            f"{field}['prompt_lookup_min']={given['prompt_lookup_min']} is above "
            f"prompt_lookup_max={given['prompt_lookup_max']}; lower it."
        )


def _check_draft_number(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= _MAX_DRAFTS:
        raise ConfigError(
            f"speculative_config[{name!r}] must be an integer from 1 to {_MAX_DRAFTS}, "
            f"got {value!r}."
        )


def _check_mamba_block_size(args: EngineArgs, model: ModelConfig) -> None:
    given = args.mamba_block_size
    if given is None:
        return
    if not model.is_recurrent:
        raise ConfigError(
            f"mamba_block_size={given} is for models with recurrent layers, and {args.model!r} has "
            "none; leave it out."
        )
    if not args.enable_prefix_caching:
        raise ConfigError(
            f"mamba_block_size={given} says how often state is kept for prefix hits, and "
            "enable_prefix_caching=False; leave one of them out."
        )
    if given % args.block_size:
        raise ConfigError(
            f"mamba_block_size must be a multiple of block_size={args.block_size}, got {given}."
        )


def _check_parallel(args: EngineArgs, model: ModelConfig) -> None:
    """What can be seen from the model's sizes."""
    size, stages = args.tensor_parallel_size, args.pipeline_parallel_size
    timeout: Any = args.step_timeout
    if type(timeout) not in (int, float) or not 1 <= timeout <= 86400:
        raise ConfigError(f"step_timeout must be in [1, 86400] seconds, got {timeout!r}.")
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    asked = next((f"{name}={getattr(args, name)}" for name in sizes if getattr(args, name) > 1), "")
    if not asked:
        return
    if args.device.startswith("cuda:"):
        raise ConfigError(
            f"device={args.device!r} is one GPU, and {asked} asks for more; use device='cuda' "
            "(CUDA_VISIBLE_DEVICES says which)."
        )
    if args.device == "fake":
        raise ConfigError(f"device='fake' is one device; leave {asked} out.")
    if stages > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is above the model's {model.num_layers} layers; "
            "lower it."
        )
    if stages > 1 and args.speculative_config is not None:
        raise UnsupportedError(PIPELINED_SPECULATION.format(value=stages))
    if stages > 1 and model.is_recurrent:
        raise UnsupportedError(PIPELINED_RECURRENCE.format(value=stages))
    kv = model.num_kv_heads
    if model.num_heads % size or (kv % size and size % kv):
        raise ConfigError(
            f"tensor_parallel_size={size} cannot deal out {model.num_heads} heads and {kv} key and "
            "value heads; take a number that divides the heads, and is a divisor or a multiple of "
            "the key and value heads."
        )


def _check_no_kv(args: EngineArgs) -> None:
    """Whether anything was said of a KV cache, or of chunks, to a model that has none."""
    for argument in fields(EngineArgs):
        given = getattr(args, argument.name)
        if argument.name in _OF_KV and given != argument.default:
            raise UnsupportedError(
                f"{argument.name}={given!r} is for models with a KV cache, whose prompts may be "
                f"computed in pieces; all tokens of a text of {args.model!r} see each other, in "
                "one step, and nothing is kept: leave it out."
            )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(args, name) != 1:
            raise UnsupportedError(
                f"{name}={getattr(args, name)} is not supported for a model whose tokens all see "
                "each other; start one engine per device, and leave it at 1."
            )


def _check_lengths(args: EngineArgs, model: ModelConfig) -> None:
    if model.max_position < 2:
        raise ConfigError(
            f"The checkpoint's context must hold a token of a prompt and one of an answer, 2, and "
            f"max_position_embeddings is {model.max_position}."
        )
    if args.max_model_len is not None and args.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={args.max_model_len} is above the checkpoint's context of "
            f"{model.max_position} tokens; lower it to {model.max_position} or less."
        )
    if args.max_logprobs > model.vocab_size:
        raise ConfigError(
            f"max_logprobs={args.max_logprobs} is above the vocabulary's {model.vocab_size}; lower "
            "it."
        )
