"""Hidden states become vectors and scores."""

from __future__ import annotations

import math

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.core.plan import NAN_POOLED, OK, Float32Array, SlotRef, StepResult
from pelton.device.protocol import Device, Event
from pelton.errors import IntegrityError
from pelton.forward.in_flight import Final, InFlight, Nothing
from pelton.ops.step_tensors import RowTensors
from pelton.pooling.pooler import Pooler, PoolingWork
from pelton.runner.heads.advance import RowAdvance
from pelton.runner.heads.results import NoResult


class HostValues:
    """One ring slot: host memory that grows with what steps yield."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._values = device.host_buffer((0,), torch.float32)
        self._is_leased = False

    def lease(self, count: int) -> torch.Tensor:
        """[count] float32."""
        if self._is_leased:
            raise IntegrityError("more steps in flight than result slots")
        if count > len(self._values):
            # To a power of two, so that it grows seldom.
            size = 1 << (count - 1).bit_length()
            self._values = self._device.host_buffer((size,), torch.float32)
        self._is_leased = True
        return self._values[:count]

    def release(self) -> None:
        self._is_leased = False
        if self._device.poisons:
            self._values.numpy().fill(np.nan)


class PendingPooled:
    """A step's values on their way to the host. `collect` waits for them; only the consumer calls
    it. values: the device memory that they come from, kept until then."""

    def __init__(
        self,
        *,
        step_id: int,
        event: Event,
        slot: HostValues,
        host: torch.Tensor,
        values: torch.Tensor,
        work: PoolingWork,
        batch: InputBatch,
        failed: dict[SlotRef, Exception],
    ) -> None:
        self._step_id = step_id
        self._event = event
        self._slot = slot
        self._host = host
        self._values = values
        self._work = work
        self._batch = batch
        self._failed = failed

    def is_done(self) -> bool:
        return self._event.is_done()

    def collect(self) -> StepResult:
        """Wait, copy out, and give the slot back, whatever happens: a copy that a fault has left in
        the queue comes before those of the slot's next owner."""
        try:
            self._event.wait()
            values: Float32Array = self._host.numpy().copy()
        finally:
            self._slot.release()
        num_rows = self._batch.num_rows
        status = np.full(num_rows, OK, np.int32)
        pooled: dict[int, Float32Array] = {}
        for place in self._work.places:
            shape = (place.width,) if place.num_rows is None else (place.num_rows, place.width)
            part = values[place.start : place.start + math.prod(shape)].reshape(shape)
            if not np.isfinite(part).all():
                status[place.row] = NAN_POOLED
            pooled[place.row] = part
        return StepResult(
            step=self._step_id,
            token_ids=np.zeros((num_rows, 1), np.int32),
            num_sampled=np.zeros(num_rows, np.int32),
            status=status,
            pooled=pooled,
            failed=self._failed,
        )


class PoolHead:
    """Pooling, one copy of all values to the host, and the rows' advance."""

    def __init__(
        self, device: Device, pooler: Pooler, rows: RowTensors, *, depth: int, max_rows: int
    ) -> None:
        self._device = device
        self._pooler = pooler
        self._advance = RowAdvance(device, rows, max_rows=max_rows)
        self._slots = [HostValues(device) for _ in range(depth + 1)]
        self._next = 0

    def run(self, in_flight: InFlight) -> PendingPooled | NoResult:
        if isinstance(in_flight, Nothing):
            return NoResult(in_flight.step_id, 1, in_flight.failed)
        assert isinstance(in_flight, Final)
        batch = in_flight.batch
        work = self._pooler.plan(batch)
        values = self._device.empty((work.num_values,), torch.float32)
        slot = self._slots[self._next]
        host = slot.lease(work.num_values)
        self._next = (self._next + 1) % len(self._slots)
        try:
            if work.groups:
                self._device.launch(self._pooler.run, work, in_flight.hidden, values)
            if work.num_values:
                self._device.copy_to_host(host, values)
            event = self._device.record_event()
            self._advance.launch(batch)
        except BaseException:
            slot.release()
            raise
        return PendingPooled(
            step_id=in_flight.step_id,
            event=event,
            slot=slot,
            host=host,
            values=values,
            work=work,
            batch=batch,
            failed=in_flight.failed,
        )
