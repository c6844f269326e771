"""Blocks are zeroed when a row gets them: what a former owner left cannot reach a new one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.batch import BatchRig, new_row, plan_of
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.attention.zeroing import NewBlockZeroing
from pelton.batch.participant import StepParticipant
from pelton.core.plan import BlockAppend, SlotRef
from pelton.device.fake import FakeDevice
from pelton.device.native.library import library

NUM_BLOCKS = 40


class Zeroed:
    """A rig with NewBlockZeroing as its only participant, pools full of NaN."""

    def __init__(self, block_sizes: tuple[int, ...] = (4,)) -> None:
        self.device = FakeDevice()
        self.rig = BatchRig(
            self.device,
            block_sizes=block_sizes,
            declare=lambda rig: NewBlockZeroing(
                rig.device, rig.staging, NUM_BLOCKS, rig.block_sizes
            ),
        )
        self.zeroing: NewBlockZeroing = self.rig.extra
        self.pools = [self.device.empty((NUM_BLOCKS, 4, 2), torch.float32) for _ in range(2)]
        self.zeroing.pools = self.pools

    def step(self, new_rows: Any = (), appends: Any = ()) -> list[int]:
        """One step's hooks in the runner's order; which blocks are zero after it."""
        for row in new_rows:
            self.zeroing.add_request(row)
        for append in appends:
            self.zeroing.append_blocks(append)
        self.zeroing.apply_writes()
        slots = [row.ref.slot for row in new_rows] or [0]
        plan = plan_of([(s, 1, 0, False, 0) for s in slots], new_rows=new_rows)
        batch, staged = self.rig.start(plan)
        self.zeroing.before_forward(batch)
        staged.release()
        per_pool = []
        for pool in self.pools:
            values = self.rig.read(pool)
            is_zero = (values == 0).all(axis=(1, 2))
            assert np.isnan(values[~is_zero]).all(), "a block is zeroed whole or not at all"
            per_pool.append(np.flatnonzero(is_zero).tolist())
            self.device.launch(torch.Tensor.fill_, pool, math.nan)
        assert per_pool[0] == per_pool[1], "in every pool"
        return per_pool[0]


def append(slot: int, ids: list[int], group: int = 0) -> BlockAppend:
    return BlockAppend(
        ref=SlotRef(slot, 1), group=group, first=8, block_ids=np.array(ids, np.int32)
    )


def test_new_blocks_are_zeroed_and_prefix_hits_are_not():
    case = Zeroed()
    hit = new_row(0, range(14), [[5, 6, 7, 8]], num_computed=8)
    miss = new_row(1, range(6), [[9, 20]])
    assert case.step([hit, miss]) == [7, 8, 9, 20]
    assert case.step() == [], "what an earlier step zeroed is not zeroed again"
    assert case.step(appends=[append(0, [31]), append(1, [30, 11])]) == [11, 30, 31]
    assert case.step([new_row(2, range(4), [[2]])], [append(0, [3])]) == [2, 3]
    assert case.step() == []


def test_each_group_by_its_own_block_size():
    case = Zeroed(block_sizes=(4, 8))
    hit = new_row(0, range(20), [[1, 2, 3, 4, 5], [11, 12, 13]], num_computed=8)
    assert case.step([hit], [append(0, [14], group=1)]) == [3, 4, 5, 12, 13, 14]


def test_hooks_are_those_the_runner_calls():
    for name in ("add_request", "append_blocks", "apply_writes", "before_forward"):
        assert getattr(NewBlockZeroing, name) is not getattr(StepParticipant, name)


def fill_free_blocks(engine: TinyEngine, value: float) -> None:
    """In every block but the null block; NaN is what a broken request would leave there."""
    device = engine.device
    with torch.inference_mode():
        for pool in engine.worker._assembled.runner._executor._kv:
            device.launch(torch.Tensor.fill_, pool[1:], value)


def tokens_after_poison(device: str, backend: str) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of a clean engine, and of one whose rows and blocks belonged to poisoned owners."""
    folder = tiny_llama()
    first, second = prompts_of([50, 30, 41, 9], seed=1), prompts_of([3, 60, 5, 14], seed=2)
    changes = {"attention_backend": backend, "batch_invariant": backend == "invariant"}
    clean = TinyEngine(folder, device=device, **changes)
    fill_free_blocks(clean, 0.0)  # what the allocator gives may hold another test's NaN
    engine = TinyEngine(folder, device=device, enable_prefix_caching=False, **changes)
    for prompt in first:  # without zeroing one may fail here already
        engine.add(prompt)
    engine.run()
    fill_free_blocks(engine, math.nan)
    names = [engine.add(prompt) for prompt in second]
    outcomes = engine.run()
    return clean.generate(second), [outcomes[name].token_ids for name in names]


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        "reference",
        "invariant",
        pytest.param("native", marks=pytest.mark.skipif(library() is None, reason="no library")),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_nan_of_a_former_owner_never_reaches_a_new_one(device, backend):
    """Relative of case 19: neither through reallocated blocks nor through a former owner's blocks
    in the tail of a short row's table (rows of 3 and 60 tokens decode side by side)."""
    clean, poisoned = tokens_after_poison(device, backend)
    assert poisoned == clean


def test_without_zeroing_it_does(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(NewBlockZeroing, "before_forward", lambda self, batch: None)
    clean, poisoned = tokens_after_poison("cpu", "torch")
    assert poisoned != clean
