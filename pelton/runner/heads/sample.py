"""Hidden states become tokens."""

from __future__ import annotations

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.device.protocol import Device
from pelton.forward.in_flight import Final, InFlight, Nothing
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import RowTensors
from pelton.runner.heads.results import HostResults, NoResult, PendingResult, ResultRing
from pelton.sampling.logits_source import HeadLogits, LogitsSource, VocabularyHead
from pelton.sampling.prompt_logprobs import MIN_TILE_ROWS, NOTHING, PromptLogprobRows
from pelton.sampling.sampler import NOTHING_PLANNED, SampleOutput, SamplePlan, Sampler
from pelton.speculation.drafting import Drafting
from pelton.speculation.protocol import SampledStep


class SampleHead:
    """Head product, sampling, verification, the copy to the host, the rows' advance, and drafts.

    max_logits: verification rows of a step.
    """

    def __init__(
        self,
        device: Device,
        vocabulary: VocabularyHead,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobRows,
        rows: RowTensors,
        ring: ResultRing,
        drafting: Drafting,
        *,
        max_rows: int,
        num_drafts: int,
        max_logits: int,
        max_logprobs: int,
        dtype: torch.dtype,
    ) -> None:
        max_logits = max(max_logits, MIN_TILE_ROWS)
        self._device = device
        self._verify = step_kernel("verify", device.torch_device.type)
        self._advance = step_kernel("advance", device.torch_device.type)
        self._vocabulary = vocabulary
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._rows = rows
        self._ring = ring
        self._drafting = drafting
        self._num_drafts = num_drafts
        self._logits = device.empty((max_logits, vocabulary.vocab_shard_size), dtype)
        self._output = SampleOutput.allocate(device, max_logits, max_logprobs)
        self._packed = device.zeros((max_rows, num_drafts + 3), torch.int32)

    def run(self, in_flight: InFlight) -> PendingResult | NoResult:
        if isinstance(in_flight, Nothing):
            return NoResult(in_flight.step_id, 1 + self._num_drafts, in_flight.failed)
        assert isinstance(in_flight, Final)
        batch = in_flight.batch
        rows = self._rows
        packed = self._packed[: batch.descriptor.num_rows]
        plan, prompt_logprobs = NOTHING_PLANNED, NOTHING
        if not in_flight.is_sampled:
            plan = self._plan(batch)
            # Before sampling, whose buffers it borrows.
            prompt_logprobs = self._prompt_logprobs.run(
                batch, in_flight.hidden, self._logits, self._output
            )
            self._launch(plan, batch, in_flight.hidden)
        slot = self._ring.lease()
        try:
            self._copy_out(slot, plan, batch, packed)
            event = self._device.record_event()
            if not in_flight.is_sampled:
                self._launch_advance(batch)
            sampled = SampledStep(
                batch=batch, rows=rows, hidden=in_flight.hidden, num_sampled=packed[:, -2]
            )
            event = self._drafting.run(sampled, event, slot.num_proposed[: batch.num_rows])
        except BaseException:
            self._ring.release(slot)
            raise
        return PendingResult(
            step_id=in_flight.step_id,
            event=event,
            ring=self._ring,
            slot=slot,
            batch=batch,
            logprob_width=plan.logprob_width if plan.logprob_spans else None,
            counts_drafts=self._drafting.counts_drafts,
            prompt_logprobs=prompt_logprobs,
            failed=in_flight.failed,
        )

    def is_plain(self, batch: InputBatch) -> bool:
        """Whether `launch_plain` of the step's shape does for this step."""
        slots = batch.slots_np
        if batch.num_logits < batch.num_rows:
            slots = slots[batch.num_logits_np > 0]
        return not self._prompt_logprobs.is_asked and self._sampler.is_plain(slots)

    def launch_plain(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        """Queue what follows the layers, from the head's product to the rows' advance, for any step
        of plain rows that has the shape of `batch`; what `run` then leaves out."""
        self._launch(self._sampler.plain_plan(), batch, hidden)
        self._launch_advance(batch)

    def _launch(self, plan: SamplePlan, batch: InputBatch, hidden: torch.Tensor) -> None:
        source = HeadLogits(
            hidden,
            batch.inputs.logits_indices,
            self._vocabulary,
            self._logits[: batch.num_logits],
        )
        packed = self._packed[: batch.descriptor.num_rows]
        self._device.launch(self._sample, plan, source, batch, self._rows, packed)

    def _launch_advance(self, batch: InputBatch) -> None:
        packed = self._packed[: batch.descriptor.num_rows]
        self._device.launch(self._advance, self._rows, batch.step, packed[:, :-2], packed[:, -2])

    def _copy_out(
        self, slot: HostResults, plan: SamplePlan, batch: InputBatch, packed: torch.Tensor
    ) -> None:
        n, logits = batch.num_rows, batch.num_logits
        self._device.deliver(slot.packed[:n], packed[:n])
        if not plan.logprob_spans:
            return
        # Whole rows: a copy of a few columns is not one block of memory, and might wait.
        output = self._output
        for target, values in (
            (slot.token_logprobs[:logits], output.token_logprobs[:logits]),
            (slot.ranks[:logits], output.ranks[:logits]),
            (slot.top_ids[:logits], output.top_ids[:logits]),
            (slot.top_logprobs[:logits], output.top_logprobs[:logits]),
        ):
            self._device.deliver(target, values)

    def _plan(self, batch: InputBatch) -> SamplePlan:
        counts = batch.num_logits_np
        slots = np.repeat(batch.slots_np, counts)
        # The first verification row of a request is its first token less its drafts.
        offset = np.arange(len(slots)) - np.repeat(counts.cumsum() - counts, counts)
        first = np.repeat(batch.seq_len_bound_np - counts, counts)
        # Steps in flight may reject every draft that the bound counts as computed.
        num_uncertain = 0 if batch.bounds_are_exact else self._num_drafts * len(self._ring)
        return self._sampler.plan(slots, (first + offset).astype(np.int32), num_uncertain)

    def _sample(
        self,
        plan: SamplePlan,
        source: LogitsSource,
        batch: InputBatch,
        rows: RowTensors,
        packed: torch.Tensor,
    ) -> None:
        inputs, output, n = batch.inputs, self._output, batch.num_logits
        if n:
            self._sampler.run(plan, source, inputs.logits_slots, inputs.logits_positions, output)
        self._verify(batch.step, rows.fields, output.token_ids[:n], output.status[:n], packed)
