"""What a user may ask of an engine (`EngineArgs`), and what it resolves to (`EngineConfig`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pelton.config.cache import CacheConfig
from pelton.config.graphs import GraphsConfig
from pelton.config.memory import MemoryTable
from pelton.config.model import GenerationDefaults, ModelConfig
from pelton.config.parallel import ParallelConfig
from pelton.config.pooling import PoolingConfig
from pelton.config.quant import QuantConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.config.sizes import Bytes, Tokens, read_sizes
from pelton.config.speculation import SpeculationConfig


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments as users type them; names are vLLM's. None means: decide for me. Numbers of tokens
    and bytes may also be texts such as "32k", "32K", "4GiB" or "auto": see config/sizes.py.

    model: folder, GGUF file, hub id ("org/name"), or None for the embedded model.
    runner: "generate" (tokens) | "pooling" (embeddings, scores) | "auto": what the checkpoint is
        for; one of sentence-transformers, or without a head for tokens, is pooled.
    tokenizer: folder, GGUF file or hub id with another tokenizer than the model's.
    revision: branch, tag or commit of a hub id.
    hf_token: of an account of the hub, for what is not open to all.
    load_format: "auto" | "safetensors" | "gguf" | "dummy" (random weights of the right shapes).
    dtype: "auto" | "float32" | "bfloat16" | "float16".
    device: "auto" | "cpu" | "cuda" | "cuda:N" | "fake" (the testing device).
    seed: of the weights under load_format="dummy". A request's noise has a seed of its own, in its
        SamplingParams; without one it is drawn anew.
    max_model_len: most tokens of a prompt and its answer together; the checkpoint's context, or
        what the KV cache holds, if left out.
    max_num_seqs: most answers that are made at a time.
    max_num_batched_tokens: most tokens in one step.
    long_prefill_token_threshold: most tokens of one prompt in one step; 0 = as many as fit.
    scheduling_policy: "fcfs" | "priority".
    block_size: tokens in a block of the KV cache.
    enable_prefix_caching: prompts that begin alike share the blocks of their beginning.
    gpu_memory_utilization: share of the device's memory that weights and KV may use; on CPU, the
        share of the memory that is free at start (cgroup limits respected).
    kv_cache_memory_bytes / num_gpu_blocks_override: the KV cache's size, given instead of measured.
    kv_cache_dtype: "auto" (the same as dtype) | "fp8" or "fp8_e4m3" | "fp8_e5m2" | "int8": a byte
        for each number, and a scale for each token's head.
    kv_offloading_size: host memory, in GiB, for the KV of preempted requests that costs more to
        compute again than to copy; None or 0 = all is computed again.
    attention_backend: a name from pelton/attention/table.py, or "auto".
    mamba_block_size: for models with recurrent layers: after how many tokens, each time, their
        state is kept, so that a later prompt that begins alike can start there; a multiple of
        block_size.
    num_threads: threads of the CPU's kernels; its cores if left out.
    staging_mode: how the host's small writes reach the device: "auto" (what a probe at start finds
        to work best) | "aliased" (read in place) | "pinned" (copied) | "pageable" (copied from
        memory that is not pinned, as where none can be).
    max_logprobs: most alternatives to a token that a request may ask for.
    enable_prompt_embeds: requests may bring embeddings in place of token ids. Whoever may send
        them can make the model compute on any numbers.
    chat_template: a Jinja template, or a file that holds one, instead of the model's own.
    batch_invariant: select fixed-reduction kernels, so that a request's tokens do not depend on
        its neighbours, chunk sizes or prefix hits, bit for bit.
    max_steps_in_flight: depth of the launch pipeline (1 = wait for each step).
    tensor_parallel_size: devices that share each layer.
    pipeline_parallel_size: stages that the layers are dealt out to, each of tensor_parallel_size
        devices.
    data_parallel_size: equal engines, each with devices of its own, that a server shares its
        requests out to. All other sizes are those of each engine.
    step_timeout: with several devices: seconds after which a step that has not ended ends the
        engine, with where each of them stands.
    enable_lora: vLLM's, for adapters; this version has none.
    quantization: of weights that the file holds quantised: "gguf" (GGUF's blocks stay as they are
        and are multiplied as integers; on the CPU) | "dequantise" (they become numbers of dtype).
        None: "gguf" where that can be done.
    speculative_config: how drafts are made, as a dict: {"method": "ngram",
        "num_speculative_tokens": 4}, and perhaps prompt_lookup_min and prompt_lookup_max.
    generation_config: where the defaults of sampling come from: "auto" (the checkpoint's
        generation_config.json) | "vllm" or "none" (SamplingParams alone) | a folder that holds
        another generation_config.json, whose end tokens count, too.
    enforce_eager: launch every step op by op; nothing is recorded and replayed (CUDA graphs on a
        GPU, lists of calls on a CPU).
    cudagraph_capture_sizes: tokens of the steps that a CUDA graph is captured for; a step is padded
        up to the next one. None: a ladder up to max_num_seqs for decodes, and up to 2048 tokens for
        steps with prompts.
    max_cudagraph_capture_size: no graph is captured for more tokens than this.
    hf_overrides: config.json keys that replace the checkpoint's.
    """

    model: str | None = None
    runner: str = "auto"
    tokenizer: str | None = None
    revision: str | None = None
    hf_token: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: Tokens | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: Tokens | None = None
    long_prefill_token_threshold: Tokens = 0
    scheduling_policy: str = "fcfs"
    max_steps_in_flight: int = 2
    block_size: int = 16
    enable_prefix_caching: bool = True
    mamba_block_size: Tokens | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: Bytes | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    kv_offloading_size: float | None = None
    attention_backend: str = "auto"
    batch_invariant: bool = False
    num_threads: int | None = None
    staging_mode: str = "auto"
    max_logprobs: int = 20
    tensor_parallel_size: int = 1
    step_timeout: float = 300.0
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    quantization: str | None = None
    speculative_config: dict[str, Any] | None = None
    enable_lora: bool = False
    enable_prompt_embeds: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: list[int] | None = None
    max_cudagraph_capture_size: Tokens | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read_sizes(self)

    @property
    def num_ranks(self) -> int:
        """Devices of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine, decided. Made once by `setup/resolve.py`; nothing changes it later.

    max_model_len counts prompt and output together, in tokens. memory: of a device that is measured
    at start, once it is.
    """

    model: ModelConfig
    generation: GenerationDefaults
    cache: CacheConfig
    scheduler: SchedulerConfig
    dtype: str
    device: str
    seed: int
    max_model_len: int
    attention_backend: str
    batch_invariant: bool
    num_threads: int
    max_logprobs: int
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryTable | None = None
    staging_mode: str = "auto"
    quantization: QuantConfig = field(default_factory=QuantConfig)
    enable_prompt_embeds: bool = False
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    @property
    def pools(self) -> bool:
        """Whether requests get vectors and scores, and none gets tokens."""
        return bool(self.pooling.tasks)

    @property
    def num_speculative_tokens(self) -> int:
        """K of the 1 + K verification rows per decoding request; 0 without a speculator."""
        return self.speculation.num_speculative_tokens
