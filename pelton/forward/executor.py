"""What the runner asks of whoever runs a batch's layers."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pelton.batch.input_batch import InputBatch
from pelton.core.descriptor import Descriptor


class Executor(Protocol):
    """Queues a step from its inputs to its last layer, in three verbs.

    passes_on: another stage follows. What `prepare` returns has `is_sampled`: whether `run` also
    draws the tokens and advances the rows.
    """

    passes_on: bool

    def choose(self, live: Descriptor) -> Descriptor:
        """The shape that a step is executed as."""
        ...

    def prepare(self, batch: InputBatch) -> Any: ...

    def run(self, prepared: Any) -> None: ...

    def unrecorded(self) -> list[tuple[Descriptor, bool]]:
        """Shapes that `record` is to be called for before they are replayed; whether with the
        head."""
        ...

    def warm(self, shape: Descriptor, is_sampled: bool) -> None:
        """Queue every kernel that a recording of the shape would hold, if not for every layer."""
        ...

    def record(self, shape: Descriptor, is_sampled: bool) -> object: ...

    def finish(self, prepared: Any) -> torch.Tensor:
        """hidden: [T, H] as executed; valid in queue order."""
        ...
