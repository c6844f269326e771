"""The engine's process, seen from the process that started it. No torch."""

from __future__ import annotations

import asyncio
import importlib
import io
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pelton import errors
from pelton.config.engine import EngineConfig
from pelton.engine.link import Reply, Request
from pelton.errors import ConfigError, EngineDead, PeltonError
from pelton.messages.codec import VERSION, decode_from_engine, encode
from pelton.messages.from_engine import Dead, FromEngine, Hello, Phase, Ready
from pelton.messages.sockets import FROM_ENGINE, TO_ENGINE, Receiver, Sender
from pelton.messages.to_engine import Shutdown, Start, ToEngine
from pelton.setup.check import CheckedArgs

_TABLES = ("pelton.sampling.table:PROCESSORS",)
"""Literal tables that a program may add to, and that the engine's process must know as well."""
_LONGEST_ADDRESS = 90
"""Characters of a folder whose sockets' names still fit the system's limit, about 108."""
_LAST_WORDS = 1.0
"""Seconds that are granted to a `Dead` message which is overtaken by the news of the exit."""
_PATIENCE = 5.0
"""Seconds from asking the process to stop to killing it."""

_log = logging.getLogger("pelton")


class EngineProcess:
    """Spawns a process with an engine, and speaks with it over two sockets.

    What keeps either side from outliving the other: the child reads from a pipe that nobody writes
    to, and whose end is this process's end; here a thread waits for the child's. The sockets have
    names only until both sides are connected, in a folder that only this user may enter.

    start_times: seconds of the phases that have ended, in order.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        life: io.FileIO,
        on_phase: Callable[[str, float], None] | None,
    ) -> None:
        self.start_times: dict[str, float] = {}
        self._process = process
        self._folder = folder
        self._life = life
        self._on_phase = on_phase
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._ready: asyncio.Future[EngineConfig] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._death: EngineDead | None = None
        self._on_reply: Callable[[Reply], None] | None = None
        self._on_death: Callable[[EngineDead], None] | None = None
        self._is_closing = False
        self._receiver = Receiver(str(folder / FROM_ENGINE))
        self._sender = Sender(str(folder / TO_ENGINE))

    @classmethod
    async def spawn(
        cls,
        checked: CheckedArgs,
        *,
        replica: int = 0,
        on_phase: Callable[[str, float], None] | None = None,
    ) -> EngineProcess:
        """Start the process; it loads while this one goes on. `ready` waits for it. replica: which
        one of data_parallel_size equal engines it is."""
        folder = _private_folder()
        its_own, mine = os.pipe()
        life = open(mine, "wb", buffering=0)  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pelton.engine.process", str(its_own), folder],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints is talk; standard output may be somebody's data
                pass_fds=(its_own,),
                process_group=0,  # a terminal's Ctrl-C is for this process alone
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        except BaseException:
            life.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(its_own)
        self = cls(process, folder, life, on_phase)
        try:
            self._loop.add_reader(self._receiver.fileno, self._read)
            self._loop.call_soon(self._read)
            threading.Thread(
                target=_wait,
                args=(process, self._loop, weakref.WeakMethod(self._note_exit)),
                name="pelton-engine-exit",
                daemon=True,
            ).start()
            self._post(
                Start(
                    version=VERSION,
                    checked=pickle.dumps(checked),
                    log_level=_log.getEffectiveLevel(),
                    tables=dict(_added_tables()),
                    replica=replica,
                )
            )
        except BaseException:
            self.kill()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """See EngineLink. Set by the thread that waits for its end."""
        return self._process.returncode is None

    async def ready(self) -> EngineConfig:
        """Wait until the engine takes requests. Raises what it raised: ConfigError kin as itself,
        everything else as EngineDead."""
        return await asyncio.shield(self._ready)

    def listen(
        self, on_reply: Callable[[Reply], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        """See EngineLink."""
        self._on_reply, self._on_death = on_reply, on_death
        if self._death is not None:
            self._loop.call_soon(on_death, self._death)

    def send(self, message: Request) -> None:
        """See EngineLink."""
        self._post(message)

    def _post(self, message: ToEngine) -> None:
        self._sender.send(encode(message))

    def kill(self) -> None:
        """At once; `close` waits until it is gone."""
        self._is_closing = True
        self._kill_group()

    async def close(self) -> None:
        """See EngineLink. An engine in the midst of a step finishes it, if that takes no more than
        a few seconds."""
        self._is_closing = True
        if not self._gone.done():
            self._post(Shutdown())
            await asyncio.wait([self._gone], timeout=_PATIENCE)
        if not self._gone.done():
            self._kill_group()
            await asyncio.shield(self._gone)

    def _kill_group(self) -> None:
        """The process, and whatever it has started: a compiler, perhaps."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        """All that has arrived: the socket tells of it only once."""
        while (frame := self._receiver.take()) is not None:
            try:
                self._take(decode_from_engine(frame))
            except Exception as error:
                # What this process does wrong ends the engine, too: nobody would read on.
                _log.exception("A message of the engine's process was not understood")
                self._die(EngineDead(f"The engine's process sent a wrong message: {error}."))
                self.kill()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Dead):
            self._die(_told(message))
        elif isinstance(message, Hello):
            # It has read a message and sent one: both sockets are connected.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._note_phase("process", time.monotonic() - self._started)
        elif isinstance(message, Phase):
            self._note_phase(message.name, message.seconds)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(pickle.loads(message.config))
        elif self._on_reply is not None and self._death is None:
            self._on_reply(message)

    def _note_phase(self, name: str, seconds: float) -> None:
        self.start_times[name] = seconds
        if self._on_phase is not None:
            self._on_phase(name, seconds)

    def _note_exit(self, code: int) -> None:
        """The process is gone; what it has sent may still be on its way."""
        self._read()
        if self._death is not None or self._is_closing:
            self._finish(code)
        else:
            self._loop.call_later(_LAST_WORDS if code > 0 else 0.05, self._finish, code)

    def _finish(self, code: int) -> None:
        self._read()
        self._kill_group()
        self._die(EngineDead(_describe_exit(code, is_asked=self._is_closing)))
        self._loop.remove_reader(self._receiver.fileno)
        self._receiver.close()
        self._sender.close(linger=0)
        self._life.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._gone.set_result(None)

    def _die(self, error: PeltonError) -> None:
        if self._death is not None:
            return
        death = error if isinstance(error, EngineDead) else EngineDead(str(error))
        self._death = death
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # read, so that nobody is told that it was not
        if self._on_death is not None:
            self._on_death(death)


def _wait(
    process: subprocess.Popen[bytes],
    loop: asyncio.AbstractEventLoop,
    note_exit: weakref.WeakMethod[Callable[[int], None]],
) -> None:
    """A thread of its own: neither signals nor what kind of loop it is matter."""
    code = process.wait()
    found = note_exit()
    if found is not None:
        with suppress(RuntimeError):  # the event loop may be closed
            loop.call_soon_threadsafe(found, code)


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="pelton-ipc-")
    if len(folder) > _LONGEST_ADDRESS:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="pelton-ipc-", dir="/tmp")
    return Path(folder)


def _python_path() -> str:
    """The child finds every module where this process does."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _added_tables() -> Iterator[tuple[str, dict[str, str]]]:
    for name in _TABLES:
        module, _, table = name.partition(":")
        yield name, dict(getattr(importlib.import_module(module), table))


def _told(message: Dead) -> PeltonError:
    """What the process said of itself. Users' faults come as what they are."""
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, ConfigError):
        return kind(message.message)
    return EngineDead(message.message, child_traceback=message.traceback)


def _describe_exit(code: int, *, is_asked: bool) -> str:
    if is_asked:
        return "The engine was shut down."
    if code >= 0:
        return f"The engine's process ended with exit code {code} and did not say why."
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    hint = ": out of memory, or somebody killed it" if code == -signal.SIGKILL else ""
    return f"The engine's process was killed by signal {-code}{name}{hint}."
