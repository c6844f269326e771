"""An AsyncLLM over a real engine in this process: every message is encoded and decoded, but there
are no sockets and no threads. Steps run on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pelton import LLM
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.facts import facts_of
from pelton.engine.link import Reply, Request
from pelton.engine.served_requests import ServedRequests, read_children
from pelton.errors import EngineDead
from pelton.messages.codec import decode_from_engine, decode_to_engine, encode
from pelton.messages.from_engine import CacheReset
from pelton.messages.to_engine import Abort, AddRequest


class InProcessLink:
    """An EngineLink. What process.py does with threads happens here in turns."""

    is_running = True

    def __init__(self, llm: LLM) -> None:
        self.served = ServedRequests(llm._loop)
        self._llm = llm
        self._is_scheduled = False
        self._on_reply: Callable[[Reply], None]

    def listen(self, on_reply: Any, on_death: Callable[[EngineDead], None]) -> None:
        self._on_reply = on_reply

    def send(self, message: Request) -> None:
        decoded = decode_to_engine(encode(message))
        if isinstance(decoded, AddRequest):
            self.served.add(decoded, read_children(decoded))
        elif isinstance(decoded, Abort):
            self.served.abort(decoded)
        else:
            done = self._llm._loop.scheduler.reset_prefix_cache()
            asyncio.get_running_loop().call_soon(self._reply, CacheReset(done))
        self._schedule()

    async def close(self) -> None:
        pass

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def _reply(self, message: Reply) -> None:
        decoded = decode_from_engine(encode(message))
        self._on_reply(decoded)  # type: ignore[arg-type]

    def _step(self) -> None:
        self._is_scheduled = False
        if (news := self.served.news()) is not None:
            self._reply(news)
        if self.served.has_work():
            for frame in self.served.step():
                self._reply(frame)
            self._schedule()
        else:
            self._reply(self.served.current())


def in_process(llm: LLM, **options: Any) -> AsyncLLM:
    """For use within a running event loop. The LLM itself stays usable in between."""
    facts = facts_of(llm.config, "tiny", dict(llm.start_times))
    return AsyncLLM(InProcessLink(llm), llm.config, facts, llm._tokenizer, llm._template, **options)


def is_clean(llm: AsyncLLM) -> bool:
    """Nothing of any request is left, on either side."""
    link = llm._link
    assert isinstance(link, InProcessLink)
    served, scheduler = link.served, link._llm._loop.scheduler
    scheduler.check_integrity()
    return not (
        llm._streams
        or llm._answers
        or llm._silent
        or llm._backlog
        or served._children
        or served._handles
        or served._arrivals
        or served._ended
        or len(served._siblings)
        or scheduler.has_unfinished()
        or scheduler._by_ref
        or scheduler.stats.kv_usage
        or len(scheduler._free_slots) != llm.config.scheduler.max_num_seqs
    )
