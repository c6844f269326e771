"""Row state, block tables and input buffers on a device, without a model: for tests of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pelton.batch.block_tables import BlockTables
from pelton.batch.builder import BatchBuilder
from pelton.batch.input_batch import InputBatch
from pelton.batch.input_buffers import InputBuffers
from pelton.batch.row_state import RowState
from pelton.batch.staged import StagedStep, Staging
from pelton.config.params import SamplingParams
from pelton.core.descriptor import Descriptor
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import BlockAppend, NewRow, SlotRef, StepPlan
from pelton.device.protocol import Device
from pelton.ops.step_tensors import RowTensors


def read(device: Device, tensor: torch.Tensor) -> np.ndarray:
    """A device tensor's values, in queue order."""
    host = device.host_buffer(tuple(tensor.shape), tensor.dtype)
    device.copy_to_host(host, tensor)
    device.synchronize()
    return host.numpy()


def new_row(
    slot: int,
    token_ids: Sequence[int],
    blocks: Sequence[Sequence[int]],
    *,
    prompt_len: int | None = None,
    num_computed: int = 0,
) -> NewRow:
    return NewRow(
        ref=SlotRef(slot, 1),
        request_id=f"slot {slot}",
        token_ids=np.array(token_ids, np.int32),
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        num_computed_tokens=num_computed,
        block_ids=tuple(np.array(ids, np.int32) for ids in blocks),
        params=SamplingParams(temperature=0.0),
        seed=0,
    )


def plan_of(
    rows: Sequence[tuple[int, int, int, bool, int]],
    *,
    new_rows: Sequence[NewRow] = (),
    block_appends: Sequence[BlockAppend] = (),
    step: int = 0,
) -> StepPlan:
    """rows: (slot, query length, drafts, samples, computed bound) in batch order."""
    columns = list(zip(*rows)) if rows else [()] * 5
    return StepPlan(
        step=step,
        refs=[SlotRef(slot, 1) for slot in columns[0]],
        num_scheduled_tokens=np.array(columns[1], np.int32),
        num_drafts=np.array(columns[2], np.int32),
        num_computed_bound=np.array(columns[4], np.int32),
        samples=np.array(columns[3], np.bool_),
        is_one_each=all(row[1:4] == (1, 0, True) for row in rows),
        new_rows=list(new_rows),
        block_appends=list(block_appends),
    )


def padded(num_rows: int, num_tokens: int) -> Callable[[Descriptor], Descriptor]:
    """Executed sizes of at least that many rows and tokens."""
    return lambda live: replace(
        live,
        num_rows=max(live.num_rows, num_rows),
        num_tokens=max(live.num_tokens, num_tokens),
    )


class BatchRig:
    """`declare(staging)` runs before the staging area gets its addresses; its result is `extra`."""

    def __init__(
        self,
        device: Device,
        *,
        max_num_seqs: int = 6,
        max_model_len: int = 64,
        max_tokens: int = 64,
        block_sizes: Sequence[int] = (4,),
        windows: Sequence[int | None] = (),
        num_drafts: int = 0,
        depth: int = 2,
        num_position_axes: int = 1,
        declare: Callable[[BatchRig], Any] = lambda rig: None,
    ) -> None:
        self.device = device
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.block_sizes = tuple(block_sizes)
        self.widths = [-(-max_model_len // size) for size in block_sizes]
        self.num_drafts = num_drafts
        self.num_position_axes = num_position_axes
        self.windows = tuple(windows) or (None,) * len(block_sizes)
        groups = [
            KVGroup(index=i, layers=(i,), block_size=size, window=window)
            for i, (size, window) in enumerate(zip(block_sizes, self.windows, strict=True))
        ]
        self.staging = Staging(device, depth)
        self.rows = RowState(
            self.staging,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
        )
        self.tables = BlockTables(
            self.staging, groups, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self.buffers = self.make_buffers("batch")
        self.extra = declare(self)
        self.staging.allocate()
        self.builder = BatchBuilder(device, self.rows, self.tables, self.buffers)

    def make_buffers(self, name: str) -> InputBuffers:
        return InputBuffers(
            self.device,
            self.staging,
            name,
            max_rows=self.max_num_seqs,
            max_tokens=self.max_tokens,
            rows_per_request=1 + self.num_drafts,
            table_widths=self.widths,
            block_sizes=self.block_sizes,
            num_position_axes=self.num_position_axes,
        )

    @property
    def row_tensors(self) -> RowTensors:
        return self.rows.tensors(self.tables.tensors, self.tables.block_sizes, self.tables.windows)

    def start(
        self,
        plan: StepPlan,
        choose: Callable[[Descriptor], Descriptor] = lambda live: live,
        describe: Callable[[InputBatch, StagedStep], None] = lambda batch, staged: None,
    ) -> tuple[InputBatch, StagedStep]:
        """Queue the row changes and the inputs of `plan`; release the step when it is launched.

        describe: fills header sections of its own, before the header is flushed."""
        staged = self.staging.begin()
        for row in plan.new_rows:
            self.rows.add(row)
            self.tables.add(row)
        for append in plan.block_appends:
            self.tables.append(append)
        batch = self.builder.describe(plan, staged, choose)
        describe(batch, staged)
        self.staging.flush(staged)
        self.builder.launch(batch)
        return batch, staged

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        return read(self.device, tensor)
