"""How many devices share an engine, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """tensor: ranks that share each layer. pipeline: stages, each with a run of the layers.
    data: equal engines, of which this is one.
    step_timeout: seconds after which a step that has not ended ends the engine."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    step_timeout: float = 300.0

    @property
    def num_ranks(self) -> int:
        """Of this engine."""
        return self.tensor * self.pipeline
