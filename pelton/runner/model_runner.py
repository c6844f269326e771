"""The order of a step, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.batch.block_tables import BlockTables
from pelton.batch.builder import BatchBuilder
from pelton.batch.participant import StepParticipant, overridden
from pelton.batch.row_state import RowState
from pelton.batch.staged import Staging
from pelton.core.plan import EMPTY_PLAN, SlotRef, StepPlan
from pelton.forward.eager import as_live
from pelton.forward.executor import Executor
from pelton.forward.in_flight import Final, InFlight, Nothing, Sent
from pelton.runner.heads.protocol import Head, StepOutcome


class ModelRunner:
    """Launches steps. `start` and `finish` of every step run in order and wait for nothing."""

    def __init__(
        self,
        *,
        staging: Staging,
        rows: RowState,
        tables: BlockTables,
        builder: BatchBuilder,
        executor: Executor,
        head: Head,
        participants: Sequence[StepParticipant],
    ) -> None:
        self._staging = staging
        self._rows = rows
        self._tables = tables
        self._builder = builder
        self._executor = executor
        self._head = head
        self._begin_hooks = overridden(participants, "begin_step")
        self._add_hooks = overridden(participants, "add_request")
        self._append_hooks = overridden(participants, "append_blocks")
        self._remove_hooks = overridden(participants, "remove_request")
        self._apply_hooks = overridden(participants, "apply_writes")
        self._before_hooks = overridden(participants, "before_forward")
        self._after_hooks = overridden(participants, "after_forward")
        self._close_hooks = overridden(participants, "close")

    def start(self, plan: StepPlan) -> InFlight:
        """Queue everything up to the last layer."""
        staged = self._staging.begin()
        try:
            failed = self._change_rows(plan)
            if plan.num_rows == 0:
                self._staging.flush_writes(staged)
                return Nothing(step_id=plan.step, staged=staged, failed=failed)
            batch = self._builder.describe(plan, staged, self._executor.choose)
            self._staging.flush(staged)
            for hook in self._before_hooks:
                hook(batch)
            prepared = self._executor.prepare(batch)
            self._executor.run(prepared)
            hidden = self._executor.finish(prepared)
            for hook in self._after_hooks:
                hook(batch)
        except BaseException:
            self._staging.drop_writes(0)
            staged.release()
            raise
        if self._executor.passes_on:
            return Sent(step_id=plan.step, staged=staged, batch=batch, failed=failed)
        return Final(
            step_id=plan.step,
            staged=staged,
            batch=batch,
            hidden=hidden,
            is_sampled=prepared.is_sampled,
            failed=failed,
        )

    def finish(self, in_flight: InFlight) -> StepOutcome:
        """Queue the head and what follows it; the step's staging slot is free after that."""
        try:
            return self._head.run(in_flight)
        finally:
            in_flight.staged.release()

    def rest(self) -> None:
        """Publish a step without rows: what is launched until the next step is padding alone.
        Whatever was launched before, if only to be compiled, the device's header is the host's."""
        staged = self._staging.begin()
        self._builder.describe(EMPTY_PLAN, staged, as_live)
        self._staging.flush(staged, is_whole=True)
        staged.release()

    def close(self) -> None:
        for hook in self._close_hooks:
            hook()

    def _change_rows(self, plan: StepPlan) -> dict[SlotRef, Exception]:
        """Stage the plan's differences; a row that a participant refuses fails alone."""
        failed: dict[SlotRef, Exception] = {}
        for hook in self._begin_hooks:
            hook(plan)
        for ref in (*plan.finished, *plan.preempted):
            for hook in self._remove_hooks:
                hook(ref)
        for row in plan.new_rows:
            self._rows.add(row)
            self._tables.add(row)
            mark = self._staging.num_writes
            try:
                for hook in self._add_hooks:
                    hook(row)
            except Exception as error:
                self._staging.drop_writes(mark)
                failed[row.ref] = error
        self._rows.learn(plan)
        for append in plan.block_appends:
            self._tables.append(append)
            for hook in self._append_hooks:
                hook(append)
        for hook in self._apply_hooks:
            hook()
        return failed
