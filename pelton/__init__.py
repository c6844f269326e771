"""Pelton: an LLM inference and serving engine that is small enough to read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pelton.config.env import let_openmp_threads_sleep

let_openmp_threads_sleep()

__version__ = "0.1.0"

# Loaded on first use, so that `import pelton` and the command line stay free of torch.
_EXPORTS = {
    "LLM": "pelton.engine.llm",
    "RequestOutput": "pelton.engine.outputs",
    "CompletionOutput": "pelton.engine.outputs",
    "SamplingParams": "pelton.config.params",
    "PoolingParams": "pelton.config.pooling",
    "EngineArgs": "pelton.config.engine",
}
__all__ = [
    "CompletionOutput",
    "EngineArgs",
    "LLM",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    CompletionOutput: Any
    EngineArgs: Any
    LLM: Any
    PoolingParams: Any
    RequestOutput: Any
    SamplingParams: Any


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'pelton' has no attribute {name!r}")
