"""What a device's memory was found to be used for, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTable:
    """others: what was in use before the model came, the driver's context included. weights: of
    the model. activations: step buffers, workspaces and what the largest step asks for. graphs:
    CUDA graphs and their pool. kv: the KV cache. total: the device's."""

    others: int
    weights: int
    activations: int
    graphs: int
    kv: int
    total: int

    @property
    def free(self) -> int:
        used = self.others + self.weights + self.activations + self.graphs + self.kv
        return self.total - used

    def describe(self) -> str:
        gib = 2**30
        names = ("weights", "activations", "graphs", "kv", "others", "free")
        parts = [f"{name} {getattr(self, name) / gib:.2f}" for name in names]
        return f"{', '.join(parts)} of {self.total / gib:.2f} GiB"
