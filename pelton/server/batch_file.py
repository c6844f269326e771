"""OpenAI's batch files: one request per line in, one record per line out.

A line in: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
A record: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}; for
a line that is no request, "response" is null, "error" says why, and custom_id is null.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from pelton.errors import ConfigError, EngineError, RequestError
from pelton.server.bodies import parse
from pelton.server.local import PATHS
from pelton.server.request_ids import new_id

_FIRST = b'{"id":"batch_req_'  # how each record begins
_SYNC_SECONDS = 1.0
_BLOCK = 2**20


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line in. body: as it stands there, for the endpoint to read."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of a run. skipped: had their record already. failed: got one that is not a success."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(slots=True)
class Done:
    """What an output file holds: custom_ids, and the numbers of lines that were no requests."""

    custom_ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


Answering = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


async def run_batch(
    source: Path,
    target: Path,
    answer: Answering,
    *,
    max_concurrency: int,
    max_line_bytes: int,
    on_record: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Answers the requests of `source` into `target`, each as soon as it is done.

    answer: HTTP status and JSON of the answer to a body at a path, as `LocalApi.answer`.
    max_concurrency: requests on their way at a time; lines are read as they are needed.

    What `target` has already is not asked again. Raises ConfigError for files that cannot be used,
    EngineError if writing fails, EngineDead; what was written until then is whole, and the same
    call goes on from there.
    """
    with open_source(source, target) as lines, Records(target) as records:
        return await _Batch(lines, records, answer, max_line_bytes, on_record).run(max_concurrency)


class _Batch:
    def __init__(
        self,
        lines: BinaryIO,
        records: Records,
        answer: Answering,
        max_line_bytes: int,
        on_record: Callable[[Counts], None],
    ) -> None:
        self._lines = read_lines(lines, max_line_bytes)
        self._max_line_bytes = max_line_bytes
        self._records = records
        self._answer = answer
        self._on_record = on_record
        self._seen: set[str] = set()
        self._counts = Counts()

    async def run(self, max_concurrency: int) -> Counts:
        workers = [asyncio.create_task(self._work()) for _ in range(max_concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._counts

    async def _work(self) -> None:
        for number, line in self._lines:
            await self._take(number, line)
            await asyncio.sleep(0)

    async def _take(self, number: int, line: bytes | None) -> None:
        try:
            request = self._read(number, line)
        except RequestError as error:
            self._refuse(number, str(error))
            return
        if request is None:
            self._counts.skipped += 1
            return
        status, body = await self._answer(request.url, bytes(request.body))
        response = {
            "status_code": status,
            "request_id": new_id(),
            "body": msgspec.Raw(body),
        }
        self._write(request.custom_id, response, None, is_success=status == 200)

    def _read(self, number: int, line: bytes | None) -> BatchLine | None:
        """None: it has its record. Raises RequestError."""
        if line is None:
            raise RequestError(f"a line may have {self._max_line_bytes} bytes (--max-body-bytes).")
        request = parse(line, BatchLine)
        if not request.custom_id:
            raise RequestError("custom_id must not be empty.", field="custom_id")
        if request.custom_id in self._seen:
            raise RequestError(
                f"custom_id {request.custom_id[:200]!r} stands in an earlier line, too.",
                field="custom_id",
            )
        self._seen.add(request.custom_id)
        if request.custom_id in self._records.done.custom_ids:
            return None
        if request.method != "POST":
            raise RequestError(f"method must be POST, got {request.method[:50]!r}.")
        if request.url not in PATHS:
            raise RequestError(f"url must be {' or '.join(PATHS)}, got {request.url[:200]!r}.")
        return request

    def _refuse(self, number: int, reason: str) -> None:
        if number in self._records.done.lines:
            self._counts.skipped += 1
            return
        error = {"code": "invalid_line", "message": f"Line {number}: {reason}", "line": number}
        self._write(None, None, error, is_success=False)

    def _write(self, custom_id: str | None, response: Any, error: Any, *, is_success: bool) -> None:
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._records.append(msgspec.json.encode(record))
        if is_success:
            self._counts.answered += 1
        else:
            self._counts.failed += 1
        self._on_record(self._counts)


def open_source(source: Path, target: Path) -> BinaryIO:
    """Raises ConfigError for what cannot be read, or is the file that is written."""
    if "://" in str(source) or str(source).startswith(("http:/", "https:/")):
        raise ConfigError(f"input {source} must be a file; download it first.")
    try:
        lines = source.open("rb")
    except OSError as error:
        raise ConfigError(f"input {source} cannot be read: {error.strerror}.") from None
    if target.exists() and os.path.samestat(os.fstat(lines.fileno()), target.stat()):
        lines.close()
        raise ConfigError(f"input and output are the same file, {source}.")
    return lines


def read_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers from 1; None for one of more than `limit` bytes,
    which is not kept in memory."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit and not line.endswith(b"\n"):
            while (rest := file.readline(_BLOCK)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


class Records:
    """An output file: whole records, one per line, appended. done: what it holds on opening.

    A last line without its end, of a run that was killed, is cut off. Raises ConfigError for a file
    that cannot be used, is in use, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"output {path} cannot be written: {error.strerror}.") from None
        try:
            self._lock()
            self.done, self._end = _read_done(self._file, path)
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise
        self._synced_end = self._end
        self._sync_time = time.monotonic()
        self._is_broken = False

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not self._is_broken:
                self._sync()
        finally:
            os.close(self._file)

    def append(self, record: bytes) -> None:
        """Adds a record and its line end; on disk a second later at most, or on leaving. Raises
        EngineError when the disk is full, or fails; the file then ends with a whole record."""
        line = record + b"\n"
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._end + written)
        except OSError as error:
            self._fail(error, self._end)
        self._end += len(line)
        if time.monotonic() - self._sync_time > _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            # Which of the lines since then are on the disk, nobody can say.
            self._fail(error, self._synced_end)
        self._synced_end, self._sync_time = self._end, time.monotonic()

    def _fail(self, error: OSError, end: int) -> None:
        self._is_broken = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, end)
        raise EngineError(
            f"output {self._path} cannot be written: {error.strerror}. Its records so far are "
            "whole; the same command goes on from there."
        ) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output {self._path} is being written by another run.") from None


def _read_done(file: int, path: Path) -> tuple[Done, int]:
    """What is there, and where its last whole line ends."""
    done, end = Done(), 0
    with os.fdopen(os.dup(file), "rb") as lines:
        for number, line in enumerate(lines, start=1):
            is_torn = not line.endswith(b"\n")
            if is_torn and line[: len(_FIRST)] == _FIRST[: len(line)]:
                break
            end += len(line)
            try:
                if is_torn:
                    raise ValueError
                record = json.loads(line)
                custom_id, error = record["custom_id"], record["error"]
            except (ValueError, TypeError, KeyError):
                raise ConfigError(
                    f"output {path}: line {number} is no batch record; name another file."
                ) from None
            if custom_id is not None:
                done.custom_ids.add(custom_id)
            elif isinstance(error, dict):
                done.lines.add(error.get("line", 0))
    return done, end
