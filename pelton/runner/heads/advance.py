"""The advance of rows that get no tokens."""

from __future__ import annotations

import torch

from pelton.batch.input_batch import InputBatch
from pelton.device.protocol import Device
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import RowTensors


class RowAdvance:
    """Every row has computed its query tokens; nothing else about it changes."""

    def __init__(self, device: Device, rows: RowTensors, *, max_rows: int) -> None:
        self._device = device
        self._rows = rows
        self._advance = step_kernel("advance", device.torch_device.type)
        self._tokens = device.zeros((max_rows, 1), torch.int32)
        self._num_tokens = device.zeros((max_rows,), torch.int32)

    def launch(self, batch: InputBatch) -> None:
        n = batch.descriptor.num_rows
        self._device.launch(
            self._advance, self._rows, batch.step, self._tokens[:n], self._num_tokens[:n]
        )
