"""The advance of rows whose tokens this rank does not make."""

from __future__ import annotations

import torch

from pelton.batch.input_batch import InputBatch
from pelton.device.protocol import Device
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import RowTensors, StepArrays


class RowAdvance:
    """Every row has computed its query tokens. One that samples has a token more, unknown here: a
    placeholder stands for it until a plan tells (RowState.learn)."""

    def __init__(self, device: Device, rows: RowTensors, *, max_rows: int) -> None:
        self._device = device
        self._rows = rows
        self._advance = step_kernel("advance", device.torch_device.type)
        self._tokens = device.zeros((max_rows, 1), torch.int32)

    def launch(self, batch: InputBatch) -> None:
        self._device.launch(self._run, batch.step)

    def _run(self, step: StepArrays) -> None:
        num_sampled = step.cu_num_logits.diff()
        self._advance(self._rows, step, self._tokens[: len(num_sampled)], num_sampled)
