"""A headless Chromium, and servers that live in a thread beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted_engine import Script, ScriptedEngine, engine_of, scripted_llm
from support.serving import served

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium_path(otherwise: str) -> str:
    """The system's Chromium, or the one at `otherwise`. Without one the test is skipped, but in CI,
    which brings one along, it fails."""
    for name in _NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    if Path(otherwise).exists():
        return otherwise
    words = "no Chromium here: install one (apt-get install chromium; playwright install chromium)"
    if os.environ.get("CI"):
        pytest.fail(words)
    pytest.skip(words)


class Site:
    """A server over a scripted engine. url: of its page."""

    def __init__(self, url: str, engine: ScriptedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self._engine = engine
        self._loop = loop

    def do(self, action: Callable[[ScriptedEngine], Any]) -> Any:
        """Does it in the server's thread."""

        async def run() -> Any:
            return action(self._engine)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)


@contextlib.contextmanager
def site(
    script: Script, *, delay: float = 0.002, llm: dict[str, Any] | None = None, **options: Any
) -> Iterator[Site]:
    """llm: options of the AsyncLLM; options: of `served`."""
    made: list[Site] = []
    has_begun, is_over = threading.Event(), asyncio.Event()

    async def main() -> None:
        engine = scripted_llm(script, delay=delay, **(llm or {}))
        async with served(engine, **options) as server:
            url = f"http://127.0.0.1:{server.port}/"
            made.append(Site(url, engine_of(engine), asyncio.get_running_loop()))
            has_begun.set()
            await is_over.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            has_begun.set()

    thread = threading.Thread(target=run, name="site")
    thread.start()
    has_begun.wait(30)
    assert made, "the server did not start"
    try:
        yield made[0]
    finally:
        made[0]._loop.call_soon_threadsafe(is_over.set)
        thread.join(10)
        assert not thread.is_alive()
