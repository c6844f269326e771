"""Other ways between host and device, of the sizes of a step, by the harness of staging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pelton.batch.block_tables import BlockTables
from pelton.batch.staged import Staging
from pelton.bench.clock import Clock
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import BlockAppend, SlotRef
from pelton.device.protocol import Device

_ROWS = 256
_BLOCK_SIZE, _BLOCKS = 16, 256
_EMBEDDINGS = (512, 1024)


@dataclass(frozen=True, slots=True)
class Path:
    """A function of the clock, which ends one lap for each phase that it has."""

    name: str
    run: Callable[[Clock], None]

    def prepare(self, num_words: int) -> None:
        return None


def paths(device: Device) -> list[Path]:
    return [
        Path("block tables", _block_tables(device)),
        Path("embeddings", _embeddings(device)),
        Path("result copy", _result_copy(device)),
    ]


def _block_tables(device: Device) -> Callable[[Clock], None]:
    """Each row gets a block."""
    staging = Staging(device, depth=1)
    group = KVGroup(index=0, layers=(0,), block_size=_BLOCK_SIZE)
    tables = BlockTables(staging, [group], max_num_seqs=_ROWS, max_model_len=_BLOCK_SIZE * _BLOCKS)
    staging.allocate()
    appends = [
        BlockAppend(
            ref=SlotRef(row, 0),
            group=0,
            first=row % _BLOCKS,
            block_ids=np.array([row + 1], np.int32),
        )
        for row in range(_ROWS)
    ]

    def run(clock: Clock) -> None:
        step = staging.begin()
        for append in appends:
            tables.append(append)
        clock.lap("convert")
        staging.flush(step)
        step.release()
        clock.lap("launch")

    return run


def _embeddings(device: Device) -> Callable[[Clock], None]:
    """Rows of two prompts, in bfloat16, by a host buffer of their own, as batch/prompt_embeds.py
    has it."""
    target = device.empty(_EMBEDDINGS, torch.bfloat16)
    bits = np.random.default_rng(0).integers(-(2**15), 2**15, _EMBEDDINGS, dtype=np.int16)
    halves = np.split(bits, 2)

    def run(clock: Clock) -> None:
        host = device.host_buffer(_EMBEDDINGS, torch.bfloat16)
        np.concatenate(halves, out=host.view(torch.int16).numpy())
        clock.lap("write")
        device.copy_to_device(target, host)
        clock.lap("launch")

    return run


def _result_copy(device: Device) -> Callable[[Clock], None]:
    """A token of each row, and what was said of it, until the host may read them."""
    source = device.zeros((_ROWS, 3), torch.int32)
    host = device.host_buffer((_ROWS, 3), torch.int32)

    def run(clock: Clock) -> None:
        device.deliver(host, source)
        event = device.record_event()
        clock.lap("launch")
        event.wait()

    return run
