"""Keeps steps in flight and books what they yield."""

from __future__ import annotations

import time
from collections import deque

from pelton.config.engine import EngineConfig
from pelton.config.pooling import wrong_runner
from pelton.core.plan import LogprobRows, StepPlan
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate, Scheduler
from pelton.errors import DeviceLost, IntegrityError, RequestFailed
from pelton.runner.heads.protocol import StepOutcome
from pelton.sampling.processors import load_processors
from pelton.worker.protocol import StepWorker

Updates = list[tuple[RequestUpdate, LogprobRows | None]]


class EngineLoop:
    """Scheduler and worker, up to `max_steps_in_flight` steps deep.

    A step is launched before the last one's tokens are known, as long as the pipeline is not full;
    then the oldest is waited for. On a device that runs launches inline a step has ended when its
    launch returns, so it is collected at once: its tokens would only wait for the next step.
    """

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            worker.groups,
            max_model_len=config.max_model_len,
            vocab_size=config.model.vocab_size,
            num_speculative_tokens=config.num_speculative_tokens,
            move_costs=worker.move_costs,
        )
        self._pools = config.pools
        self._worker = worker
        self._depth = config.scheduler.max_steps_in_flight
        if worker.runs_inline:
            self._depth = 1
        self._in_flight: deque[tuple[StepPlan, StepOutcome]] = deque()
        self._is_checked = True
        self._next_check = 0.0

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run."""
        if request.yields_tokens == self._pools:
            raise wrong_runner(pools=self._pools)
        load_processors(request.params.processors)  # refused here, not in the midst of a step
        self.scheduler.add(request)
        self._is_checked = False

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_unfinished() or bool(self._in_flight)

    def step(self) -> Updates:
        """Launch a step if there is room, and collect one if there is none.

        A fault ends the requests of the step that it hit; DeviceLost is passed on. So is an
        interrupt (Ctrl-C), but its step is booked as failed first, so that the loop can go on.
        """
        plan = self.scheduler.schedule() if len(self._in_flight) < self._depth else None
        if plan is not None:
            failed = self._launch(plan)
            if failed is not None:
                return failed
            if len(self._in_flight) < self._depth:
                return []
            # The device is busy, and the host would wait for it.
            self._worker.record_next()
        if self._in_flight:
            updates = self._collect()
        elif self.scheduler.has_unfinished():
            raise IntegrityError("requests wait, no step is in flight, and none can be scheduled")
        else:
            updates = []
        if not self.has_work() and not self._is_checked:
            self._check_integrity()
        return updates

    def advance(self) -> Updates:
        """`step`, for whoever has more requests to add: a step is launched only if it would be the
        same with all of them, and collected only if it has ended."""
        if len(self._in_flight) == self._depth:
            return self._collect() if self._in_flight[0][1].is_done() else []
        if not self.scheduler.fills_a_step():
            return []
        plan = self.scheduler.schedule()
        return [] if plan is None else self._launch(plan) or []

    def _launch(self, plan: StepPlan) -> Updates | None:
        """What ends if that fails; None if the step is in flight."""
        try:
            self._in_flight.append((plan, self._worker.execute(plan)))
        except DeviceLost:
            raise
        except Exception as error:
            return self._fail(plan, error)
        except BaseException:
            self._fail(plan, _interrupted(plan))
            raise
        return None

    def idle(self) -> bool:
        """Do a little of what nobody waits for; False if there is nothing."""
        return self._worker.record_next()

    def _check_integrity(self) -> None:
        """The proof reads every block, which takes tens of milliseconds in a large pool; so it is
        left out of an idle moment that follows the last proof too soon for it to cost 0.1 % or
        less."""
        started = time.monotonic()
        if started >= self._next_check:
            self.scheduler.check_integrity()
            ended = time.monotonic()
            self._next_check = ended + 1000 * (ended - started)
            self._is_checked = True

    def drain(self) -> Updates:
        """Collect every step in flight."""
        updates: Updates = []
        while self._in_flight:
            updates += self._collect()
        return updates

    def _collect(self) -> Updates:
        plan, outcome = self._in_flight.popleft()
        try:
            result = outcome.collect()
        except DeviceLost:
            raise
        except Exception as error:
            return self._fail(plan, error)
        except BaseException:
            self._fail(plan, _interrupted(plan))
            raise
        return [(update, result.logprobs) for update in self.scheduler.update(plan, result)]

    def _fail(self, plan: StepPlan, error: Exception) -> Updates:
        # Plans are booked in order: what was launched before the failed one comes first.
        updates = self.drain() if self._in_flight and self._in_flight[0][0].step < plan.step else []
        return updates + [(update, None) for update in self.scheduler.fail_step(plan, error)]


def _interrupted(plan: StepPlan) -> RequestFailed:
    return RequestFailed(f"Step {plan.step} was interrupted.")
