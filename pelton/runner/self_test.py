"""Whether a replay does what launching does: asked once, before the first request, of the
recordings that will serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pelton.config.params import SamplingParams
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import Int32Array, NewRow, SlotRef, StepPlan
from pelton.device.protocol import Device
from pelton.errors import IntegrityError
from pelton.forward.in_flight import Final
from pelton.forward.recorded import RecordedExecutor
from pelton.runner.model_runner import ModelRunner
from pelton.runner.synthetic import STEP_ID

# Relative error of hidden states: padded and unpadded products may be different kernels.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_CONTEXT = 11
# Query lengths of the steps: alone, padded, and with chunks of a prompt.
_STEPS = ([1], [1, 1, 1], [7], [1, 2, 5])
# Of the row that the test makes: a row, and a step, must hold as many.
TESTED_TOKENS = _CONTEXT + 7


class SelfTest:
    """Steps of lengths that no recording was made with, on the reserved row.

    It borrows the first blocks of the pool, and leaves the row without any.

    Args:
        groups: those with block tables. max_rows: of a step. is_recurrent: a step moves the row's
            state, so that only one batch row at a time may be of it.
    """

    def __init__(
        self,
        device: Device,
        runner: ModelRunner,
        executor: RecordedExecutor,
        groups: Sequence[KVGroup],
        *,
        reserved_slot: int,
        max_rows: int,
        is_recurrent: bool,
    ) -> None:
        self._device = device
        self._runner = runner
        self._executor = executor
        self._ref = SlotRef(reserved_slot, 0)
        self._max_rows = 1 if is_recurrent else max_rows
        counts = [-(-TESTED_TOKENS // group.block_size) for group in groups]
        firsts = 1 + np.cumsum([0, *counts])
        self._blocks = tuple(
            np.arange(first, first + count, dtype=np.int32)
            for first, count in zip(firsts, counts, strict=False)
        )
        self.num_blocks = int(firsts[-1])

    def run(self) -> int:
        """How many steps were compared. Raises IntegrityError where the two ways differ."""
        compared = sum(self._compare(lens) for lens in _STEPS if len(lens) <= self._max_rows)
        nothing = tuple(np.zeros_like(blocks) for blocks in self._blocks)
        self._hidden(self._plan([1], 0, nothing), is_replayed=False)
        return compared

    def _compare(self, query_lens: list[int]) -> bool:
        """Whether there was a recording to compare."""
        plan = self._plan(query_lens, _CONTEXT, self._blocks)
        # What the step changes is as it was, for either.
        context = self._plan([_CONTEXT], 0, self._blocks)
        self._hidden(context, is_replayed=False)
        launched, _ = self._hidden(plan, is_replayed=False)
        self._hidden(context, is_replayed=False)
        replayed, mode = self._hidden(plan, is_replayed=True)
        error = float((replayed - launched).norm() / launched.norm())
        if not error <= _TOLERANCE.get(self._dtype, 5e-2):
            raise IntegrityError(
                f"A replayed step of query lengths {query_lens} differs from the launched one by "
                f"{error:.3g} of its hidden states. enforce_eager=True runs without recordings; "
                "please report this."
            )
        return mode == "full"

    def _plan(
        self, query_lens: list[int], num_computed: int, blocks: tuple[Int32Array, ...]
    ) -> StepPlan:
        num_rows = len(query_lens)
        row = NewRow(
            ref=self._ref,
            request_id="self test",
            token_ids=np.arange(1, TESTED_TOKENS + 1, dtype=np.int32),
            prompt_len=TESTED_TOKENS,
            num_computed_tokens=num_computed,
            block_ids=blocks,
            params=SamplingParams(temperature=0.0),
            seed=0,
        )
        return StepPlan(
            step=STEP_ID,
            refs=[self._ref] * num_rows,
            num_scheduled_tokens=np.array(query_lens, np.int32),
            num_drafts=np.zeros(num_rows, np.int32),
            num_computed_bound=np.full(num_rows, num_computed, np.int32),
            samples=np.ones(num_rows, np.bool_),
            new_rows=[row],
        )

    def _hidden(self, plan: StepPlan, *, is_replayed: bool) -> tuple[torch.Tensor, str]:
        """float32 [T, H] in host memory, and the mode that the step ran in."""
        self._executor.is_paused = not is_replayed
        try:
            in_flight = self._runner.start(plan)
        finally:
            self._executor.is_paused = False
        assert isinstance(in_flight, Final)
        hidden = in_flight.hidden[: in_flight.batch.num_tokens]
        self._dtype = hidden.dtype
        host = self._device.host_buffer(tuple(hidden.shape), hidden.dtype)
        self._device.copy_to_host(host, hidden)
        self._runner.finish(in_flight).collect()
        self._device.synchronize()
        return host.float(), in_flight.batch.descriptor.mode
