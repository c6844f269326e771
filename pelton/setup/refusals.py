"""What is understood and not done yet: one sentence each, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """field of EngineArgs, the only value that works, and the sentence for all others."""

    field: str
    works: Any
    sentence: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "enable_lora",
        False,
        "enable_lora={value!r} is not supported by this version; merge the adapter into the "
        "checkpoint, and leave it at False.",
    ),
)

# Of models with recurrent layers.
RECURRENT_OFFLOADING = (
    "kv_offloading_size={value!r} is not supported for a model with recurrent layers: their state "
    "does not lie in the KV blocks that would be moved; leave it out."
)

PIPELINED_SPECULATION = (
    "speculative_config is not supported with pipeline_parallel_size={value!r}: the first stage "
    "would not learn the last one's drafts; leave one of them out."
)
PIPELINED_RECURRENCE = (
    "pipeline_parallel_size={value!r} is not supported for a model with recurrent layers; leave it "
    "at 1."
)

# By LLM, whose engine is in its own process.
OFFLINE_REPLICAS = (
    "data_parallel_size={value!r} is for a server (`pelton serve`) and AsyncLLM; for offline work "
    "start a process with an LLM for each device, with its part of the prompts."
)

# Devices that others run on and this version does not.
REFUSED_DEVICES = ("mps", "xpu", "rocm", "hip", "npu", "tpu", "hpu", "neuron", "vulkan")
