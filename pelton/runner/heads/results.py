"""How a step's results reach the host: a ring of host buffers, read when their event has passed."""

from __future__ import annotations

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.core.plan import Int32Array, LogprobRows, SlotRef, StepResult
from pelton.device.protocol import Device, Event
from pelton.errors import IntegrityError
from pelton.sampling.prompt_logprobs import PendingPromptLogprobs

_POISON = -7


class HostResults:
    """One ring slot: packed [R, 1 + K + 2] and num_proposed [R] int32, and log-probabilities of up
    to N rows."""

    def __init__(
        self, device: Device, max_rows: int, num_drafts: int, max_logits: int, max_logprobs: int
    ) -> None:
        self.packed = device.host_buffer((max_rows, num_drafts + 3), torch.int32)
        self.packed_np: Int32Array = self.packed.numpy()
        self.num_proposed = device.host_buffer((max_rows,), torch.int32)
        self.token_logprobs = device.host_buffer((max_logits,), torch.float32)
        self.ranks = device.host_buffer((max_logits,), torch.int32)
        self.top_ids = device.host_buffer((max_logits, max_logprobs), torch.int32)
        self.top_logprobs = device.host_buffer((max_logits, max_logprobs), torch.float32)
        self.is_leased = False


class ResultRing:
    """Slots for the steps in flight; a slot is free when its result was collected.

    max_logits: verification rows of a step.
    """

    def __init__(
        self,
        device: Device,
        *,
        depth: int,
        max_rows: int,
        num_drafts: int,
        max_logits: int,
        max_logprobs: int,
    ) -> None:
        self._poisons = device.poisons
        self._slots = [
            HostResults(device, max_rows, num_drafts, max_logits, max_logprobs)
            for _ in range(depth + 1)
        ]
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    def lease(self) -> HostResults:
        slot = self._slots[self._next]
        if slot.is_leased:
            raise IntegrityError("more steps in flight than result slots")
        self._next = (self._next + 1) % len(self._slots)
        slot.is_leased = True
        return slot

    def release(self, slot: HostResults) -> None:
        slot.is_leased = False
        if self._poisons:
            slot.packed_np.fill(_POISON)
            slot.num_proposed.numpy().fill(_POISON)
            slot.ranks.numpy().fill(_POISON)
            slot.top_ids.numpy().fill(_POISON)


class PendingResult:
    """A step's result on its way to the host. `collect` waits for it; only the consumer calls it.

    logprob_width: columns of top log-probabilities, or None if no row asked for any.
    counts_drafts: whether the slot's num_proposed is copied too.
    """

    def __init__(
        self,
        *,
        step_id: int,
        event: Event,
        ring: ResultRing,
        slot: HostResults,
        batch: InputBatch,
        logprob_width: int | None,
        counts_drafts: bool,
        prompt_logprobs: PendingPromptLogprobs,
        failed: dict[SlotRef, Exception],
    ) -> None:
        self._step_id = step_id
        self._event = event
        self._ring = ring
        self._slot = slot
        self._batch = batch
        self._logprob_width = logprob_width
        self._counts_drafts = counts_drafts
        self._prompt_logprobs = prompt_logprobs
        self._failed = failed

    def is_done(self) -> bool:
        return self._event.is_done()

    def collect(self) -> StepResult:
        """Wait, copy out, and give the slot back, whatever happens: a copy that a fault has left in
        the queue comes before those of the slot's next owner."""
        try:
            self._event.wait()
            packed = self._slot.packed_np[: self._batch.num_rows].copy()
            return StepResult(
                step=self._step_id,
                token_ids=packed[:, :-2],
                num_sampled=packed[:, -2],
                status=packed[:, -1],
                logprobs=self._logprobs(),
                num_proposed=self._num_proposed(),
                prompt_logprobs=self._prompt_logprobs.collect(),
                failed=self._failed,
            )
        finally:
            self._ring.release(self._slot)
            self._prompt_logprobs.release()

    def _num_proposed(self) -> Int32Array | None:
        if not self._counts_drafts:
            return None
        counts: Int32Array = self._slot.num_proposed.numpy()[: self._batch.num_rows].copy()
        return counts

    def _logprobs(self) -> LogprobRows | None:
        if self._logprob_width is None:
            return None
        n, width, slot = self._batch.num_logits, self._logprob_width, self._slot
        offsets = np.zeros(self._batch.num_rows + 1, np.int32)
        self._batch.num_logits_np.cumsum(out=offsets[1:])
        return LogprobRows(
            offsets=offsets,
            token_logprobs=slot.token_logprobs.numpy()[:n].copy(),
            ranks=slot.ranks.numpy()[:n].copy(),
            top_ids=slot.top_ids.numpy()[:n, :width].copy(),
            top_logprobs=slot.top_logprobs.numpy()[:n, :width].copy(),
        )


class NoResult:
    """Of a step that yields nothing on this rank."""

    def __init__(self, step_id: int, num_columns: int, failed: dict[SlotRef, Exception]) -> None:
        self._step_id = step_id
        self._num_columns = num_columns
        self._failed = failed

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        empty: Int32Array = np.zeros(0, np.int32)
        return StepResult(
            step=self._step_id,
            token_ids=np.zeros((0, self._num_columns), np.int32),
            num_sampled=empty,
            status=empty,
            failed=self._failed,
        )
