"""The way to an engine, wherever it runs. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pelton.errors import EngineDead
from pelton.messages.from_engine import CacheReset, Outputs
from pelton.messages.to_engine import Abort, AddRequest, ResetPrefixCache

Request = AddRequest | Abort | ResetPrefixCache
Reply = Outputs | CacheReset


class EngineLink(Protocol):
    """To an engine that is ready. All calls, and all callbacks, on one event loop."""

    @property
    def is_running(self) -> bool:
        """Whether the engine is there at this moment. `on_death` may come later: what it sent
        last is read first."""
        ...

    def listen(
        self, on_reply: Callable[[Reply], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        """Call back for every reply from now on, in order, and at most once when the engine has
        died: no reply comes after that. Called once."""
        ...

    def send(self, message: Request) -> None:
        """Never waits. What is sent to a dead engine is lost. Raises TypeError or OverflowError for
        a value that cannot be sent."""
        ...

    async def close(self) -> None:
        """End the engine, and wait until nothing of it is left. May be called again."""
        ...
