"""The engine's process: `python -m pelton.engine.process PIPE FOLDER`, started by EngineProcess.

    input thread    reads messages, makes requests of them     -> inbox
    step thread     inbox -> EngineLoop.step -> frames         -> outbox
    output thread   encodes frames and sends them

The step thread is the main thread. It waits for the inbox only when the engine is idle, and wakes
with the message; the other two touch nothing that it works on.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from pelton.errors import EngineDead, PeltonError
from pelton.messages.codec import VERSION, decode_to_engine, encode
from pelton.messages.from_engine import CacheReset, Dead, FromEngine, Hello, Phase, Ready
from pelton.messages.sockets import FROM_ENGINE, TO_ENGINE, Receiver, Sender
from pelton.messages.to_engine import Abort, AddRequest, ResetPrefixCache, Shutdown, Start, ToEngine

if TYPE_CHECKING:
    from pelton.engine.loop import EngineLoop
    from pelton.engine.served_requests import Children, ServedRequests
    from pelton.setup.check import CheckedArgs
    from pelton.worker.protocol import StepWorker

_LINGER = 2.0
"""Seconds for what was said last to reach the parent."""
EXIT_FAULT = 70
"""After a `Dead` message; EX_SOFTWARE of sysexits.h."""
_SWITCH_SECONDS = 0.0005
"""How long the step thread waits at most for another thread that is busy in Python."""

_Input = tuple[AddRequest, "Children"] | Abort | ResetPrefixCache | Shutdown


def main(pipe: int, folder: str) -> int:
    """The whole life of the process; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and says so
    faulthandler.enable()
    threading.Thread(target=_watch_parent, args=(pipe, folder), name="parent", daemon=True).start()
    receiver = Receiver(os.path.join(folder, TO_ENGINE))
    outbox: SimpleQueue[FromEngine | None] = SimpleQueue()
    output = threading.Thread(target=_send_all, args=(outbox, folder), name="output")
    output.start()
    code = 0
    try:
        _run(receiver, outbox)
    except BaseException as error:
        code = EXIT_FAULT
        outbox.put(_last_words(error))
    outbox.put(None)
    output.join()
    return code


def _run(receiver: Receiver, outbox: SimpleQueue[FromEngine | None]) -> None:
    start = decode_to_engine(receiver.wait())
    outbox.put(Hello(VERSION, os.getpid()))
    if not isinstance(start, Start) or start.version != VERSION:
        raise EngineDead(
            f"The engine's process speaks version {VERSION} of the messages, its parent another "
            "one: they are different installations of Pelton."
        )
    checked: CheckedArgs = pickle.loads(start.checked)
    is_one = checked.args.data_parallel_size == 1
    name = "engine" if is_one else f"replica {start.replica}"
    logging.basicConfig(format=f"%(levelname)s {name}: %(message)s")
    logging.getLogger("pelton").setLevel(start.log_level)
    for name, entries in start.tables.items():
        module, _, table = name.partition(":")
        getattr(importlib.import_module(module), table).update(entries)
    worker, loop = _load(start, checked, outbox)
    _serve(worker, loop, receiver, outbox)
    worker.close()


def _load(
    start: Start, checked: CheckedArgs, outbox: SimpleQueue[FromEngine | None]
) -> tuple[StepWorker, EngineLoop]:
    begun = time.perf_counter()
    # Seconds of torch: only now, when the parent knows that this process lives.
    from pelton.engine.loop import EngineLoop
    from pelton.setup.resolve import dtype_warning, resolve
    from pelton.worker.executor import make_worker
    from pelton.worker.facts import device_facts

    imported = time.perf_counter()
    outbox.put(Phase("imports", imported - begun))
    first = start.replica * checked.args.num_ranks
    # The first time ever, kernels are compiled here.
    facts = device_facts(checked.args.device, first)
    known = time.perf_counter()
    outbox.put(Phase("device", known - imported))
    config = resolve(checked, facts, replica=start.replica)
    outbox.put(Phase("configuration", time.perf_counter() - known))
    warning = dtype_warning(config)
    if warning is not None:
        logging.getLogger("pelton").warning("%s", warning)
    worker = make_worker(config, checked.checkpoint, start.tables)
    for name, seconds in worker.phases.items():
        outbox.put(Phase(name, seconds))
    config = worker.config
    loop = EngineLoop(config, worker)
    # What lives now lives for ever: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_SECONDS)
    outbox.put(Ready(pickle.dumps(config)))
    return worker, loop


def _serve(
    worker: StepWorker,
    loop: EngineLoop,
    receiver: Receiver,
    outbox: SimpleQueue[FromEngine | None],
) -> None:
    """Until Shutdown. Passes on what the loop raises: nothing can go on then."""
    from pelton.engine.served_requests import ServedRequests

    inbox: SimpleQueue[_Input | Exception] = SimpleQueue()
    threading.Thread(target=_receive_all, args=(receiver, inbox), name="input", daemon=True).start()
    worker.listen(inbox.put)
    served = ServedRequests(loop)
    while _take_all(inbox, served, loop, outbox):
        for frame in served.step():
            outbox.put(frame)


def _take_all(
    inbox: SimpleQueue[_Input | Exception],
    served: ServedRequests,
    loop: EngineLoop,
    outbox: SimpleQueue[FromEngine | None],
) -> bool:
    """Take what has arrived by now; wait as long as there is nothing to do. False to stop."""
    num_due = inbox.qsize()
    while True:
        if num_due <= 0 and served.has_work():
            return True  # what comes in the meantime must not keep the others waiting
        num_due -= 1
        try:
            message = inbox.get_nowait()
        except Empty:
            # Before the long silence: refusals, and stats that an abort has changed.
            outbox.put(served.current())
            while inbox.empty() and loop.idle():
                pass
            message = inbox.get()
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Abort):
            served.abort(message)
        elif isinstance(message, ResetPrefixCache):
            outbox.put(CacheReset(loop.scheduler.reset_prefix_cache()))
        else:
            served.add(*message)
        if (news := served.news()) is not None:
            outbox.put(news)


def _receive_all(receiver: Receiver, inbox: SimpleQueue[_Input | Exception]) -> None:
    """The input thread."""
    from pelton.engine.served_requests import read_children

    try:
        while True:
            message: ToEngine = decode_to_engine(receiver.wait())
            if isinstance(message, AddRequest):
                inbox.put((message, read_children(message)))
            elif isinstance(message, Start):
                raise EngineDead("The engine's process was told to start twice.")
            else:
                inbox.put(message)
                if isinstance(message, Shutdown):
                    return
    except Exception as error:
        inbox.put(error)


def _send_all(outbox: SimpleQueue[FromEngine | None], folder: str) -> None:
    """The output thread, until None. It ends when everything has been handed over."""
    sender = Sender(os.path.join(folder, FROM_ENGINE))
    while (message := outbox.get()) is not None:
        sender.send(encode(message))
    sender.close(linger=_LINGER)


def _last_words(error: BaseException) -> Dead:
    is_ours = isinstance(error, PeltonError)
    text = str(error) if is_ours else f"The engine failed: {type(error).__name__}: {error}"
    return Dead(type(error).__name__, text, "".join(traceback.format_exception(error)))


def _watch_parent(pipe: int, folder: str) -> None:
    """Nobody writes to the pipe, so reading ends with the parent, however it ends."""
    while os.read(pipe, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # and whatever this process has started
    os._exit(1)


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    # The input thread may still be waiting for messages, and nothing is left to tidy up.
    os._exit(exit_code)
