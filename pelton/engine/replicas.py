"""Several engines, each in processes of its own, as one. No torch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import zip_longest

from msgspec import structs

from pelton.config.engine import EngineConfig
from pelton.core.scheduler import SchedulerStats
from pelton.engine.client import EngineProcess
from pelton.engine.coordinator import Coordinator
from pelton.engine.link import EngineLink, Reply, Request
from pelton.errors import ConfigError, EngineDead
from pelton.messages.from_engine import CacheReset
from pelton.messages.to_engine import Abort, AddRequest
from pelton.setup.check import CheckedArgs
from pelton.setup.resolve import reusable_prefix


class Replicas:
    """An EngineLink to several equal engines, behind a Coordinator.

    Their counts are added up. When one of them dies the others are ended, too, and the death that
    is told is that one's, by name: half an engine would go on with half of the room for ever, and
    whoever starts it again after its end could not know.

    Args:
        links: to engines that are ready.
        names: of each, for messages.
        config: that holds for all of them.
    """

    def __init__(
        self, links: Sequence[EngineLink], names: Sequence[str], config: EngineConfig
    ) -> None:
        self._links = list(links)
        self._names = list(names)
        self._coordinator = Coordinator(
            len(self._links),
            max_num_seqs=config.scheduler.max_num_seqs,
            run_length=reusable_prefix(config),
            max_kept=config.cache.num_blocks,
        )
        self._stats: list[SchedulerStats | None] = [None] * len(self._links)
        self._resets: list[deque[bool]] = [deque() for _ in self._links]
        self._on_reply: Callable[[Reply], None] | None = None
        self._on_death: Callable[[EngineDead], None] | None = None
        self._is_dead = False
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """See EngineLink: all of them."""
        return all(link.is_running for link in self._links)

    def listen(
        self, on_reply: Callable[[Reply], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        """See EngineLink."""
        self._on_reply, self._on_death = on_reply, on_death
        for index, link in enumerate(self._links):
            link.listen(
                lambda reply, index=index: self._take(index, reply),  # type: ignore[misc]
                lambda error, index=index: self._die(index, error),  # type: ignore[misc]
            )

    def send(self, message: Request) -> None:
        """See EngineLink."""
        if isinstance(message, AddRequest):
            self._links[self._coordinator.choose(message)].send(message)
        elif isinstance(message, Abort):
            self._abort(message)
        else:
            for link in self._links:
                link.send(message)

    def _abort(self, message: Abort) -> None:
        """The answers are of one request, so those that have not ended are in one place."""
        handles = range(message.first, message.first + message.count)
        places = {self._coordinator.place(handle) for handle in handles}
        for handle in handles:
            self._coordinator.end(handle)
        for index in places:
            if index is not None:
                self._links[index].send(message)

    async def close(self) -> None:
        """See EngineLink."""
        self._is_dead = True
        await asyncio.gather(*(link.close() for link in self._links))

    def _take(self, index: int, reply: Reply) -> None:
        if self._is_dead or self._on_reply is None:
            return
        if isinstance(reply, CacheReset):
            self._take_reset(index, reply)
            return
        for ended in reply.ended:
            self._coordinator.end(ended.handle)
        self._coordinator.note(index, reply.scheduler)
        self._stats[index] = reply.scheduler
        known = [stats for stats in self._stats if stats is not None]
        self._on_reply(structs.replace(reply, scheduler=added(known, len(self._links))))

    def _take_reset(self, index: int, reply: CacheReset) -> None:
        """Passed on when all have answered."""
        if reply.done:
            self._coordinator.forget_prompts(index)
        self._resets[index].append(reply.done)
        if all(self._resets) and self._on_reply is not None:
            answers = [told.popleft() for told in self._resets]
            self._on_reply(CacheReset(all(answers)))

    def _die(self, index: int, error: EngineDead) -> None:
        if self._is_dead:
            return
        self._is_dead = True
        if self._on_death is not None:
            text = f"{self._names[index]}: {error}"
            self._on_death(EngineDead(text, child_traceback=error.child_traceback))
        self._ending = asyncio.get_running_loop().create_task(self.close())


def added(stats: Sequence[SchedulerStats], num_replicas: int) -> SchedulerStats:
    """Counts of engines as one's. kv_usage: of all of their caches together, which are equal; an
    engine that has said nothing uses none."""
    total: dict[str, object] = {}
    for one in fields(SchedulerStats):
        values = [getattr(each, one.name) for each in stats]
        if isinstance(values[0], tuple):
            total[one.name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            total[one.name] = sum(values)
    summed = SchedulerStats(**total)  # type: ignore[arg-type]
    return replace(summed, kv_usage=summed.kv_usage / num_replicas)


class ReplicaProcesses:
    """The processes of several engines while they start, as EngineProcess is one.

    start_times: of each phase, what the slowest took.
    """

    def __init__(self, num_replicas: int, on_phase: Callable[[str, float], None] | None) -> None:
        self.start_times: dict[str, float] = {}
        self._on_phase = on_phase
        self._num_replicas = num_replicas
        self._processes: list[EngineProcess] = []
        self._phases: dict[str, list[float]] = {}
        self._link: Replicas | None = None

    @classmethod
    async def spawn(
        cls, checked: CheckedArgs, *, on_phase: Callable[[str, float], None] | None = None
    ) -> ReplicaProcesses:
        """Start all processes; they load side by side. `ready` waits for them."""
        self = cls(checked.args.data_parallel_size, on_phase)
        try:
            for index in range(self._num_replicas):
                self._processes.append(
                    await EngineProcess.spawn(checked, replica=index, on_phase=self._note_phase)
                )
        except BaseException:
            self.kill()
            await asyncio.shield(self.close())
            raise
        return self

    async def ready(self) -> EngineConfig:
        """Wait until all of them take requests. Returns what holds for all, where the memory that
        they found differs. Raises what the first one raises that fails."""
        waiting = [asyncio.ensure_future(process.ready()) for process in self._processes]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in waiting:
                task.cancel()
        for index, task in enumerate(waiting):
            if task in done and (error := task.exception()) is not None:
                raise self._named(index, error)
        configs = [task.result() for task in waiting]
        return min(configs, key=lambda config: (config.max_model_len, config.cache.num_blocks))

    def link(self, config: EngineConfig) -> Replicas:
        """To all of them, when they are ready."""
        names = [self._name(index) for index in range(self._num_replicas)]
        return Replicas(self._processes, names, config)

    def kill(self) -> None:
        """At once; `close` waits until they are gone."""
        for process in self._processes:
            process.kill()

    async def close(self) -> None:
        """See EngineLink."""
        await asyncio.gather(*(process.close() for process in self._processes))

    def _name(self, index: int) -> str:
        return f"Replica {index} (process {self._processes[index].pid})"

    def _named(self, index: int, error: BaseException) -> BaseException:
        """What a user can mend is the same for all."""
        if isinstance(error, ConfigError) or not isinstance(error, EngineDead):
            return error
        text = f"{self._name(index)}: {error}"
        return EngineDead(text, child_traceback=error.child_traceback)

    def _note_phase(self, name: str, seconds: float) -> None:
        """A phase has ended when it has for all."""
        times = self._phases.setdefault(name, [])
        times.append(seconds)
        if len(times) == self._num_replicas:
            self.start_times[name] = max(times)
            if self._on_phase is not None:
                self._on_phase(name, max(times))
