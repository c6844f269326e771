"""Fixed-address device buffers that batches are views of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pelton.batch.staged import HeaderSection, StagedStep, Staging
from pelton.core.descriptor import Descriptor
from pelton.core.plan import Int32Array
from pelton.device.protocol import Device
from pelton.ops.step_tensors import InputTensors, StepArrays

# Steps of decoding have few shapes, those with chunks of prompts many.
_MAX_VIEWS = 32


class InputBuffers:
    """One set of buffers; the global batch has one, every derived batch one of its own.

    Args:
        max_rows, max_tokens: the largest executed sizes. rows_per_request: verification rows of a
            request; a step never has more of them than tokens.
        table_widths: per KV group, columns of its block table.
    """

    def __init__(
        self,
        device: Device,
        staging: Staging,
        name: str,
        *,
        max_rows: int,
        max_tokens: int,
        rows_per_request: int,
        table_widths: Sequence[int],
        block_sizes: Sequence[int],
        num_position_axes: int = 1,
    ) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self._block_sizes = tuple(block_sizes)
        self._live = staging.section(f"{name}.live", 3)
        self._idx_mapping = staging.section(f"{name}.idx_mapping", max_rows)
        self._query_start_loc = staging.section(f"{name}.query_start_loc", max_rows + 1)
        self._cu_num_logits = staging.section(f"{name}.cu_num_logits", max_rows + 1)
        self.max_logits = min(max_rows * rows_per_request, max_tokens)
        self._ids = device.zeros((max_tokens,), torch.int32)
        self._positions = device.zeros((num_position_axes, max_tokens), torch.int64)
        self._seq_lens = device.zeros((max_rows,), torch.int32)
        self._is_padding = device.zeros((max_tokens,), torch.bool)
        self._tables = tuple(device.zeros((max_rows, width), torch.int32) for width in table_widths)
        self._slot_mappings = tuple(device.zeros((max_tokens,), torch.int64) for _ in table_widths)
        self._logits_indices = device.zeros((self.max_logits,), torch.int64)
        self._logits_slots = device.zeros((self.max_logits,), torch.int64)
        self._logits_positions = device.zeros((self.max_logits,), torch.int32)
        self._views: dict[tuple[Any, ...], tuple[StepArrays, InputTensors]] = {}

    def fill_header(
        self,
        step: StagedStep,
        *,
        slots: Int32Array,
        query_lens: Int32Array,
        num_logits: Int32Array,
        pad_slot: int,
    ) -> tuple[int, int, int]:
        """Write the host's arrays of a step into its staging slot, padded to the buffers' end.

        Returns (rows, tokens, verification rows).
        """
        n = len(slots)
        idx_mapping = self._idx_mapping.values(step)
        idx_mapping[:n] = slots
        idx_mapping[n:] = pad_slot
        num_tokens = _fill_cumulative(self._query_start_loc, step, query_lens)
        total_logits = _fill_cumulative(self._cu_num_logits, step, num_logits)
        self._live.values(step)[:] = (n, num_tokens, total_logits)
        return n, num_tokens, total_logits

    def views(self, descriptor: Descriptor, num_logits: int) -> tuple[StepArrays, InputTensors]:
        """Views of the executed sizes."""
        rows, tokens = descriptor.num_rows, descriptor.num_tokens
        assert rows <= self.max_rows, "more rows executed than the buffers hold"
        assert tokens <= self.max_tokens, "more tokens executed than the buffers hold"
        assert num_logits <= self.max_logits, "more verification rows than the buffers hold"
        longest = max(descriptor.max_seq_len, 1)
        widths = tuple([-(-longest // size) for size in self._block_sizes])
        key = rows, tokens, num_logits, widths
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            views = self._views[key] = self._make_views(*key)
        return views

    def _make_views(
        self, rows: int, tokens: int, num_logits: int, widths: tuple[int, ...]
    ) -> tuple[StepArrays, InputTensors]:
        return (
            StepArrays(
                live=self._live.tensor,
                idx_mapping=self._idx_mapping.tensor[:rows],
                query_start_loc=self._query_start_loc.tensor[: rows + 1],
                cu_num_logits=self._cu_num_logits.tensor[: rows + 1],
            ),
            InputTensors(
                input_ids=self._ids[:tokens],
                positions=self._positions[:, :tokens],
                seq_lens=self._seq_lens[:rows],
                is_padding=self._is_padding[:tokens],
                block_tables=tuple(
                    table[:rows, :width] for table, width in zip(self._tables, widths)
                ),
                slot_mappings=tuple(mapping[:tokens] for mapping in self._slot_mappings),
                logits_indices=self._logits_indices[:num_logits],
                logits_slots=self._logits_slots[:num_logits],
                logits_positions=self._logits_positions[:num_logits],
            ),
        )


def _fill_cumulative(section: HeaderSection, step: StagedStep, lengths: Int32Array) -> int:
    values = section.values(step)
    n = len(lengths)
    values[0] = 0
    lengths.cumsum(out=values[1 : n + 1])
    total = int(values[n])
    values[n + 1 :] = total
    return total
