"""A batch made of pieces of a batch: microbatches, context-parallel shares, row subsets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pelton.batch.input_batch import InputBatch, PartOf
from pelton.batch.input_buffers import InputBuffers
from pelton.batch.staged import HeaderSection, StagedStep, Staging
from pelton.core.plan import Int32Array
from pelton.device.protocol import Device
from pelton.ops.derive_inputs import derive_inputs


@dataclass(frozen=True, slots=True)
class RowMap:
    """Derived row i is query tokens first[i] : first[i] + length[i] of parent row row[i].

    [B'] each.
    """

    row: Int32Array
    first: Int32Array
    length: Int32Array


def token_range(parent: InputBatch, start: int, end: int) -> RowMap:
    """The map that cuts tokens [start, end) out of `parent`; a straddling row is cut in two."""
    ends = np.cumsum(parent.query_len_np, dtype=np.int32)
    starts = ends - parent.query_len_np
    first = np.maximum(start - starts, 0)
    length = np.minimum(end - starts, parent.query_len_np) - first
    row = np.flatnonzero(length > 0)
    return RowMap(*(a.astype(np.int32) for a in (row, first[row], length[row])))


class DerivedBatches:
    """Makes derived batches in a buffer set of its own."""

    def __init__(
        self, device: Device, staging: Staging, name: str, buffers: InputBuffers, pad_slot: int
    ) -> None:
        self._device = device
        self._buffers = buffers
        self._pad_slot = pad_slot
        self._map: HeaderSection = staging.section(f"{name}.row_map", 3 * buffers.max_rows)

    def describe(
        self, parent: InputBatch, row_map: RowMap, staged: StagedStep, part: PartOf
    ) -> InputBatch:
        """The derived batch; call before the step's header is flushed, `launch` after the parent's
        inputs are built. Derived batches have no verification rows."""
        target = self._map.values(staged).reshape(3, -1)
        target[:, len(row_map.row) :] = 0
        target[:, : len(row_map.row)] = (row_map.row, row_map.first, row_map.length)
        num_rows, num_tokens, _ = self._buffers.fill_header(
            staged,
            slots=parent.slots_np[row_map.row],
            query_lens=row_map.length,
            num_logits=np.zeros(len(row_map.row), np.int32),
            pad_slot=self._pad_slot,
        )
        computed_bound = parent.computed_bound_np[row_map.row] + row_map.first
        seq_len_bound = computed_bound + row_map.length
        max_query_len = int(row_map.length.max(initial=0))
        is_uniform = max_query_len == int(row_map.length.min(initial=max_query_len))
        descriptor = replace(
            parent.descriptor,
            num_tokens=num_tokens,
            num_rows=num_rows,
            uniform_query_len=max_query_len if is_uniform else 0,
            max_query_len=max_query_len,
            max_seq_len=int(seq_len_bound.max(initial=0)),
        )
        step, inputs = self._buffers.views(descriptor, 0)
        # Parent rows need not be sorted by query length after a cut.
        is_single = row_map.length == 1
        num_decode_rows = int(np.argmin(is_single)) if not is_single.all() else num_rows
        return replace(
            parent,
            descriptor=descriptor,
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_logits=0,
            refs=tuple(parent.refs[i] for i in row_map.row),
            slots_np=parent.slots_np[row_map.row],
            query_len_np=row_map.length,
            num_logits_np=np.zeros(num_rows, np.int32),
            row_kind_np=parent.row_kind_np[row_map.row],
            computed_bound_np=computed_bound,
            seq_len_bound_np=seq_len_bound,
            num_decode_rows=num_decode_rows,
            step=step,
            inputs=inputs,
            layout=part,
            parent=parent,
        )

    def launch(self, batch: InputBatch) -> None:
        assert batch.parent is not None
        row_map = self._map.tensor.view(3, -1)[:, : batch.descriptor.num_rows]
        self._device.launch(
            derive_inputs,
            batch.parent.step,
            batch.parent.inputs,
            row_map,
            batch.step,
            batch.inputs,
        )
