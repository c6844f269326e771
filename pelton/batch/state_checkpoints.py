"""Recurrent state out of checkpoints and into them, around the forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.batch.recurrent_states import RecurrentStates
from pelton.batch.staged import Staging
from pelton.core.kv.groups import state_places
from pelton.core.kv.spec import LayerKV
from pelton.core.plan import Int32Array, NewRow, SlotRef, StepPlan
from pelton.device.protocol import Device
from pelton.ops.copy_states import COLUMNS, StateCopy, load_states, save_states


class StateCheckpoints(StepParticipant):
    """Copies what a plan says: into new rows before anything else of the step runs, out of rows
    when their layers have.

    So a checkpoint's blocks may have a new owner in the step that reads them, and in the one behind
    the step that writes them: no event, and no wait of the host, stands between.

    Args:
        pages: blocks of a checkpoint.
    """

    def __init__(self, device: Device, staging: Staging, *, max_num_seqs: int, pages: int) -> None:
        self._device = device
        self._commands = staging.tensor(
            "state_copies", 2 * max_num_seqs, COLUMNS + pages, torch.int32
        )
        self._loads: list[Int32Array] = []
        self._saves: list[Int32Array] = []
        self._num_loads = self._num_saves = 0
        self._copies: tuple[StateCopy, ...] = ()
        self._ring = 1

    def connect(
        self, layers: Sequence[LayerKV], pools: Sequence[torch.Tensor], states: RecurrentStates
    ) -> None:
        """pools: per layer index, the KV pool that the layer lies in, any layout by blocks."""
        self._ring = states.ring
        self._copies = tuple(
            StateCopy(
                states.tensors(place.layer).raw,
                pools[place.host].flatten(1).view(torch.uint8),
                place.first,
                place.count,
            )
            for place in state_places(layers)
        )

    def begin_step(self, plan: StepPlan) -> None:
        self._loads = []
        self._saves = [
            self._command(save.ref, save.length, save.block_ids) for save in plan.state_saves
        ]

    def add_request(self, row: NewRow) -> None:
        if len(row.state_blocks):
            self._loads.append(self._command(row.ref, row.num_computed_tokens, row.state_blocks))
        else:
            assert row.num_computed_tokens == 0, "a row would begin without its state"

    def _command(self, ref: SlotRef, length: int, blocks: Int32Array) -> Int32Array:
        place = np.array([ref.slot, (length - 1) % self._ring], np.int32)
        return np.concatenate([place, blocks])

    def apply_writes(self) -> None:
        self._num_loads, self._num_saves = len(self._loads), len(self._saves)
        for row, command in enumerate([*self._loads, *self._saves]):
            self._commands.stage(row, 0, command)

    def before_forward(self, batch: InputBatch) -> None:
        if self._num_loads:
            commands = self._commands.tensor[: self._num_loads]
            self._device.launch(load_states, commands, self._copies)

    def after_forward(self, batch: InputBatch) -> None:
        if self._num_saves:
            last = self._num_loads + self._num_saves
            commands = self._commands.tensor[self._num_loads : last]
            self._device.launch(save_states, commands, self._copies)
