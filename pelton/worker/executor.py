"""Who runs an engine's steps: this process, or one for each device."""

from __future__ import annotations

from pelton.checkpoint.source import Checkpoint
from pelton.config.engine import EngineConfig
from pelton.worker.group import WorkerGroup
from pelton.worker.protocol import StepWorker
from pelton.worker.worker import Worker


def make_worker(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tables: dict[str, dict[str, str]] | None = None,
) -> StepWorker:
    """tables: module -> what the program has added to its literal table, for other processes."""
    if config.parallel.num_ranks == 1:
        return Worker(config, checkpoint)
    return WorkerGroup(config, checkpoint, tables or {})
