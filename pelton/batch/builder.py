"""From a plan to an InputBatch: host facts, one header, one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pelton.batch.block_tables import BlockTables
from pelton.batch.input_batch import InputBatch, RowKind
from pelton.batch.input_buffers import InputBuffers
from pelton.batch.row_state import RowState
from pelton.batch.staged import StagedStep
from pelton.core.descriptor import Descriptor
from pelton.core.plan import Int32Array, SlotRef, StepPlan
from pelton.device.protocol import Device
from pelton.ops.step_kernels import step_kernel

# Of steps in which all rows decode, as most do.
_DECODE = np.full(1024, RowKind.DECODE, np.uint8)
_DECODE.flags.writeable = False


@dataclass(frozen=True, slots=True)
class _OneEach:
    """What steps of the same rows with one token each have in common. header: the whole one."""

    refs: tuple[SlotRef, ...]
    slots: Int32Array
    num_logits: Int32Array
    header: Int32Array


_NO_ROWS = _OneEach((), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))


class BatchBuilder:
    """Two calls a step: `describe` before the staged writes are flushed, `launch` after."""

    def __init__(
        self, device: Device, rows: RowState, tables: BlockTables, buffers: InputBuffers
    ) -> None:
        self._device = device
        self._rows = rows
        self._tables = tables
        self._buffers = buffers
        self._build_inputs = step_kernel("build_inputs", device.torch_device.type)
        self._last = _NO_ROWS

    def describe(
        self, plan: StepPlan, staged: StagedStep, choose: Callable[[Descriptor], Descriptor]
    ) -> InputBatch:
        """The batch of `plan`; `choose` maps the live shape to the executed one."""
        refs = tuple(plan.refs)
        query_lens, bound = plan.num_scheduled_tokens, plan.num_computed_bound
        if plan.is_one_each and refs and refs == self._last.refs:
            slots, num_logits_np = self._last.slots, self._last.num_logits
            staged.header[:] = self._last.header
            num_rows = num_tokens = num_logits = len(refs)
        else:
            slots = np.array([ref[0] for ref in refs], np.int32)
            num_logits_np = np.where(plan.samples, 1 + plan.num_drafts, 0).astype(np.int32)
            num_rows, num_tokens, num_logits = self._buffers.fill_header(
                staged,
                slots=slots,
                query_lens=query_lens,
                num_logits=num_logits_np,
                pad_slot=self._rows.reserved_slot,
            )
            if plan.is_one_each:
                self._last = _OneEach(refs, slots, num_logits_np, staged.header.copy())
        seq_len_bound = bound + query_lens
        max_query_len, is_uniform = 1, True
        if not plan.is_one_each:
            max_query_len = int(query_lens.max(initial=0))
            is_uniform = max_query_len == int(query_lens.min(initial=max_query_len))
        descriptor = choose(
            Descriptor(
                num_tokens=num_tokens,
                num_rows=num_rows,
                uniform_query_len=max_query_len if is_uniform else 0,
                max_query_len=max_query_len,
                max_seq_len=int(seq_len_bound.max(initial=0)),
                has_embeds=plan.has_embeds,
            )
        )
        assert descriptor.num_rows >= num_rows, "fewer rows executed than live"
        assert descriptor.num_tokens >= num_tokens, "fewer tokens executed than live"
        row_kind = _DECODE
        is_prefill = bound < self._rows.prefill_len_np[slots]
        if num_logits != num_rows or is_prefill.any():
            decodes = np.where(plan.num_drafts > 0, RowKind.VERIFY, RowKind.DECODE)
            row_kind = np.where(is_prefill, RowKind.PREFILL, decodes).astype(np.uint8)
        elif num_rows > len(row_kind):
            row_kind = np.full(num_rows, RowKind.DECODE, np.uint8)
        step, inputs = self._buffers.views(descriptor, num_logits)
        return InputBatch(
            step_id=plan.step,
            descriptor=descriptor,
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_logits=num_logits,
            refs=refs,
            slots_np=slots,
            query_len_np=query_lens,
            num_logits_np=num_logits_np,
            row_kind_np=row_kind[:num_rows],
            computed_bound_np=bound,
            seq_len_bound_np=seq_len_bound,
            bounds_are_exact=plan.bounds_are_exact,
            num_decode_rows=num_rows
            if max_query_len == 1
            else int(np.searchsorted(query_lens, 1, side="right")),
            step=step,
            inputs=inputs,
        )

    def blank(self, descriptor: Descriptor, rows_per_request: int) -> InputBatch:
        """A batch that stands for all steps of a shape."""
        num_rows, num_tokens = descriptor.num_rows, descriptor.num_tokens
        query_len = descriptor.uniform_query_len or descriptor.max_query_len
        num_logits = min(num_rows * min(query_len, rows_per_request), num_tokens)
        num_logits = min(num_logits, self._buffers.max_logits)
        step, inputs = self._buffers.views(descriptor, num_logits)
        nobody = SlotRef(self._rows.reserved_slot, 0)
        return InputBatch(
            step_id=-1,
            descriptor=descriptor,
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_logits=num_logits,
            refs=(nobody,) * num_rows,
            slots_np=np.full(num_rows, nobody.slot, np.int32),
            query_len_np=np.full(num_rows, query_len, np.int32),
            num_logits_np=np.full(num_rows, min(query_len, rows_per_request), np.int32),
            row_kind_np=np.full(num_rows, RowKind.DECODE, np.uint8),
            computed_bound_np=np.full(num_rows, descriptor.max_seq_len, np.int32),
            seq_len_bound_np=np.full(num_rows, descriptor.max_seq_len, np.int32),
            bounds_are_exact=False,
            num_decode_rows=num_rows if descriptor.uniform_query_len == 1 else 0,
            step=step,
            inputs=inputs,
            is_blank=True,
        )

    def launch(self, batch: InputBatch) -> None:
        tables = self._tables
        rows = self._rows.tensors(tables.tensors, tables.block_sizes, tables.windows)
        self._device.launch(self._build_inputs, rows, batch.step, batch.inputs)
