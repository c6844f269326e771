"""OpenAI's batch files: one request per line in, one record per line out.

A line in: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
A record: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}; for
a line that is no request, "response" is null and "error" says why. Its custom_id is the line's, if
one can be read and no earlier line has it, and else null.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
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
_HEAD = 4096  # bytes of a line that is too long
_LEADING_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line in. body: as it stands there, for the endpoint to read."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of a run. failed: got a record that is not a success. skipped: had their record already;
    skipped_failed: of these, how many are not a success."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    skipped_failed: int = 0


@dataclass(slots=True)
class Done:
    """What an output file holds: custom_id -> whether it is a success; and the numbers of lines
    that were no requests and had no custom_id."""

    custom_ids: dict[str, bool] = field(default_factory=dict)
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
    counts: Counts | None = None,
) -> Counts:
    """Answers the requests of `source` into `target`, each as soon as it is done.

    answer: HTTP status and JSON of the answer to a body at a path, as `LocalApi.answer`.
    max_concurrency: requests on their way at a time; lines are read as they are needed.
    counts: is filled, and returned; for who wants to know them if this is cancelled.

    What `target` has already is not asked again. Raises ConfigError for files that cannot be used,
    EngineError if writing fails, EngineDead; what was written until then is whole, and the same
    call goes on from there.
    """
    with open_source(source, target) as lines, Records(target) as records:
        batch = _Batch(lines, records, answer, max_line_bytes, on_record, counts or Counts())
        return await batch.run(max_concurrency)


def nothing_left(source: Path, target: Path, *, max_line_bytes: int) -> Counts | None:
    """The counts of a run that finds the records of all lines there already, or None for one that
    has something to do. Raises ConfigError as `run_batch` does."""
    with open_source(source, target) as lines, Records(target) as records:
        return _Batch(lines, records, _nobody, max_line_bytes, lambda _: None, Counts()).skip_all()


async def _nobody(path: str, body: bytes) -> tuple[int, bytes]:
    raise AssertionError("nobody is to be asked")


class _Batch:
    def __init__(
        self,
        lines: BinaryIO,
        records: Records,
        answer: Answering,
        max_line_bytes: int,
        on_record: Callable[[Counts], None],
        counts: Counts,
    ) -> None:
        self._lines = read_lines(lines, max_line_bytes)
        self._max_line_bytes = max_line_bytes
        self._records = records
        self._answer = answer
        self._on_record = on_record
        self._seen: set[str] = set()
        self._counts = counts

    async def run(self, max_concurrency: int) -> Counts:
        workers = [asyncio.create_task(self._work()) for _ in range(max_concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._counts

    def skip_all(self) -> Counts | None:
        """None at the first line that has no record."""
        for number, line, is_whole in self._lines:
            if not self._has_record(number, self._identify(line, is_whole)[0]):
                return None
        return self._counts

    async def _work(self) -> None:
        for number, line, is_whole in self._lines:
            await self._take(number, line, is_whole)
            await asyncio.sleep(0)

    def _identify(
        self, line: bytes, is_whole: bool
    ) -> tuple[str | None, BatchLine | None, str | None]:
        """The custom_id under which a line gets its record, and what `_read` says of it."""
        request, fault = self._read(line, is_whole)
        custom_id = _readable_id(line) if request is None else request.custom_id
        if custom_id in self._seen:
            earlier = f"custom_id {custom_id[:200]!r} stands in an earlier line, too."
            custom_id, fault = None, fault or earlier
        elif custom_id is not None:
            self._seen.add(custom_id)
        return custom_id, request, fault

    async def _take(self, number: int, line: bytes, is_whole: bool) -> None:
        custom_id, request, fault = self._identify(line, is_whole)
        if self._has_record(number, custom_id):
            return
        if request is None or fault is not None:
            message = f"Line {number}: {fault}"
            error = {"code": "invalid_line", "message": message, "line": number}
            self._write(custom_id, None, error, is_success=False)
            return
        status, body = await self._answer(request.url, bytes(request.body))
        response = {"status_code": status, "request_id": new_id(), "body": msgspec.Raw(body)}
        self._write(custom_id, response, None, is_success=status == 200)

    def _read(self, line: bytes, is_whole: bool) -> tuple[BatchLine | None, str | None]:
        """The request, if it can be read, and what is wrong with it."""
        if not is_whole:
            return None, f"a line may have {self._max_line_bytes} bytes (--max-body-bytes)."
        try:
            request = parse(line, BatchLine)
        except RequestError as error:
            return None, str(error)
        if not request.custom_id:
            return None, "custom_id must not be empty."
        if request.method != "POST":
            return request, f"method must be POST, got {request.method[:50]!r}."
        if request.url not in PATHS:
            return request, f"url must be {' or '.join(PATHS)}, got {request.url[:200]!r}."
        return request, None

    def _has_record(self, number: int, custom_id: str | None) -> bool:
        done = self._records.done
        if number in done.lines if custom_id is None else custom_id in done.custom_ids:
            self._counts.skipped += 1
            self._counts.skipped_failed += custom_id is None or not done.custom_ids[custom_id]
            return True
        return False

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


def _readable_id(line: bytes) -> str | None:
    """The custom_id of a line that is no request: of its object, or at the beginning of what is
    none."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raw = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).get("custom_id")
        return None if raw is None else msgspec.json.decode(raw, type=str) or None
    if (found := _LEADING_ID.match(line)) is not None:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(found[1], type=str) or None
    return None


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


def read_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes, bool]]:
    """Lines that are not blank: their numbers from 1, bytes, and whether these are whole. They are
    the first ones of a line of more than `limit`, which is not kept in memory."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit and not line.endswith(b"\n"):
            while (rest := file.readline(_BLOCK)) and not rest.endswith(b"\n"):
                pass
            yield number, line[:_HEAD], False
        elif line.strip():
            yield number, line, True


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
                is_success = error is None and record["response"]["status_code"] == 200
            except (ValueError, TypeError, KeyError):
                raise ConfigError(
                    f"output {path}: line {number} is no batch record; name another file."
                ) from None
            if custom_id is not None:
                done.custom_ids[custom_id] = is_success
            elif isinstance(error, dict):
                done.lines.add(error.get("line", 0))
    return done, end
