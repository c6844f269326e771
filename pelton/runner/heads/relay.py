"""A pipeline stage that is not the last: its rows advance by what it computed, and by what the last
stage sampled."""

from __future__ import annotations

import torch

from pelton.device.protocol import Device
from pelton.forward.in_flight import InFlight, Nothing, Sent
from pelton.forward.stages import Link
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import RowTensors
from pelton.runner.heads.advance import RowAdvance
from pelton.runner.heads.results import NoResult


class RelayHead:
    """Receives the packed results [B, 1 + K + 2] of every step and advances the rows."""

    def __init__(
        self,
        device: Device,
        rows: RowTensors,
        link: Link,
        *,
        max_rows: int,
        num_drafts: int,
    ) -> None:
        self._device = device
        self._advance = step_kernel("advance", device.torch_device.type)
        self._rows = rows
        self._link = link
        self._num_drafts = num_drafts
        self._packed = device.zeros((max_rows, num_drafts + 3), torch.int32)

    def run(self, in_flight: InFlight) -> NoResult:
        if not isinstance(in_flight, Nothing):
            assert isinstance(in_flight, Sent)
            step = in_flight.batch.step
            packed = self._packed[: in_flight.batch.descriptor.num_rows]
            self._link.receive_sampled(packed)
            self._device.launch(self._advance, self._rows, step, packed[:, :-2], packed[:, -2])
        return NoResult(in_flight.step_id, 1 + self._num_drafts, in_flight.failed)


class PoolingRelayHead:
    """Of a pipeline that pools: the last stage's results change no row, so nothing is received."""

    def __init__(self, device: Device, rows: RowTensors, *, max_rows: int) -> None:
        self._advance = RowAdvance(device, rows, max_rows=max_rows)

    def run(self, in_flight: InFlight) -> NoResult:
        if not isinstance(in_flight, Nothing):
            assert isinstance(in_flight, Sent)
            self._advance.launch(in_flight.batch)
        return NoResult(in_flight.step_id, 1, in_flight.failed)
