"""What a front end wants to know of an engine that is ready. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.config.engine import EngineConfig
from pelton.setup.resolve import (
    describe,
    full_length_requests,
    kv_tokens,
    prefix_text,
    prefix_warning,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """model: the checkpoint's name. num_replicas: equal engines that stand behind one front end;
    max_num_seqs, num_kv_tokens and full_length_requests are those of all of them together.
    num_kv_tokens: that the KV cache holds; full_length_requests: how many of max_model_len tokens
    fit it at once. prefixes: how prompts that begin alike share
    KV, or why they hardly do. start_times: seconds of each start phase, in
    order. table: all of it for people, one fact a line.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    num_replicas: int
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    vocab_size: int
    scheduling_policy: str
    enable_prefix_caching: bool
    block_size: int
    num_kv_tokens: int
    full_length_requests: int
    prefixes: str
    start_times: dict[str, float]
    table: str


def facts_of(config: EngineConfig, model: str, start_times: dict[str, float]) -> EngineFacts:
    num_replicas = config.parallel.data
    return EngineFacts(
        model=model,
        architecture=config.model.architecture,
        dtype=config.dtype,
        device=config.device if num_replicas == 1 else config.device.partition(":")[0],
        num_replicas=num_replicas,
        max_model_len=config.max_model_len,
        max_num_seqs=num_replicas * config.scheduler.max_num_seqs,
        max_logprobs=config.max_logprobs,
        vocab_size=config.model.vocab_size,
        scheduling_policy=config.scheduler.policy,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        block_size=config.cache.block_size,
        num_kv_tokens=num_replicas * kv_tokens(config),
        full_length_requests=num_replicas * full_length_requests(config),
        prefixes=prefix_warning(config) or prefix_text(config),
        start_times=start_times,
        table=describe(config),
    )
