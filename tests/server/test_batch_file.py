"""Batch files: one record per line, whatever stands in the line and whenever the run ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripted_engine import scripted_llm, text_script
from support.serving import run

from pelton.config.server import ServerArgs
from pelton.errors import ConfigError, EngineDead, EngineError
from pelton.server.batch_file import Counts, Records, run_batch
from pelton.server.local import LocalApi
from pelton.server.serve import make_state

COMPLETIONS = "/v1/completions"


def line(custom_id: str, body: dict[str, Any], **changes: Any) -> str:
    entry = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
    return json.dumps({**entry, **changes})


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def shout(path: str, body: bytes) -> tuple[int, bytes]:
    """Answers with the prompt in capitals."""
    return 200, json.dumps({"text": json.loads(body)["prompt"].upper()}).encode()


def answer_file(
    source: Path,
    target: Path,
    answer: Callable[[str, bytes], Awaitable[tuple[int, bytes]]] = shout,
    **options: Any,
) -> Counts:
    async def main() -> Counts:
        return await run_batch(
            source, target, answer, **{"max_concurrency": 4, "max_line_bytes": 2000, **options}
        )

    counts: Counts = run(main)
    return counts


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_answers_are_the_servers(files: tuple[Path, Path]) -> None:
    source, target = files
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    source.write_text(
        "\n".join(
            [
                line("a", {"prompt": "Hi", "max_tokens": 99}),
                line("b", chat, url="/v1/chat/completions"),
                line("c", {"prompt": "Hi", "tepmerature": 1}),
                line("d", {"prompt": "Hi", "stream": True}),
                line("e", {"prompt": "Hi", "model": "gpt-9"}),
                "",
            ]
        )
    )

    async def main() -> Counts:
        llm = scripted_llm(text_script("One two three."))
        api = LocalApi(make_state(llm, ServerArgs()))
        counts = await run_batch(
            source, target, api.answer, max_concurrency=2, max_line_bytes=10_000
        )
        api.state.pool.shutdown()
        await llm.close()
        return counts

    assert run(main) == Counts(answered=2, failed=3)
    found = {record["custom_id"]: record["response"] for record in records_of(target)}
    assert found["a"]["status_code"] == found["b"]["status_code"] == 200
    assert found["a"]["body"]["choices"][0]["text"] == "One two three."
    assert found["a"]["body"]["usage"]["prompt_tokens"] == 1
    assert found["b"]["body"]["choices"][0]["message"]["content"] == "One two three."
    assert "'temperature'" in found["c"]["body"]["error"]["message"]
    assert found["d"]["body"]["error"]["param"] == "stream"
    assert [found[name]["status_code"] for name in "cde"] == [400, 400, 404]


def test_a_malformed_line_hurts_only_itself(files: tuple[Path, Path]) -> None:
    source, target = files
    wrong = [
        "{",
        "[]",
        json.dumps({"custom_id": "x"}),
        line("", {"prompt": "x"}),
        line("m", {"prompt": "x"}, method="GET"),
        line("u", {"prompt": "x"}, url="/v1/audio"),
        line("f", {"prompt": "x"}, extra=1),
        line("l", {"prompt": "x" * 3000}),
        line("good", {"prompt": "again"}),
    ]
    text = "\n".join([line("good", {"prompt": "x"}), *wrong, "  ", line("last", {"prompt": "y"})])
    source.write_bytes(text.encode() + b"\n\xff\xfe")
    assert answer_file(source, target) == Counts(answered=2, failed=10)
    good = [record for record in records_of(target) if record["error"] is None]
    assert [record["custom_id"] for record in good] == ["good", "last"]
    errors = {r["error"]["line"]: r["error"]["message"] for r in records_of(target) if r["error"]}
    assert sorted(errors) == [*range(2, 11), 13]
    for number, words in [
        (2, "not valid JSON"),
        (4, "method is missing"),
        (6, "method must be POST, got 'GET'"),
        (7, "url must be"),
        (8, "extra is not a field"),
        (9, "2000 bytes"),
        (10, "'good' stands in an earlier line"),
    ]:
        assert words in errors[number], errors[number]
    # Who asks for "x" finds out what became of it; "good" is one record, and not two.
    names = {r["error"]["line"]: r["custom_id"] for r in records_of(target) if r["error"]}
    known = {4: "x", 6: "m", 7: "u", 8: "f", 9: "l"}
    assert names == {number: known.get(number) for number in errors}
    before = target.read_text()
    assert answer_file(source, target) == Counts(skipped=12, skipped_failed=10)
    assert target.read_text() == before


@pytest.mark.parametrize(
    ("text", "custom_id"),
    [
        ('{"custom_id": "a", "method": "PO', "a"),
        (' { "custom_id" :"a\\u00e9\\"b", "body": {]}', 'a\u00e9"b'),
        ('{"method": "POST", "custom_id": "a"}', "a"),
        ('{"method": "POST", "custom_id": "a"', None),  # may be the body's
        ('{"body": {"custom_id": "a"}', None),
        ('{"body": {"custom_id": "a"}}', None),
        ('{"custom_id": 5, "method": "POST"}', None),
        ('{"custom_id": "", "method": "PO', None),
        ('{"custom_id": "a\\ud800", "meth', None),
        ('{"custom_id": "a', None),
        ('["custom_id"]', None),
    ],
)
def test_the_id_of_a_line_that_is_no_request(
    files: tuple[Path, Path], text: str, custom_id: str | None
) -> None:
    source, target = files
    source.write_text(text + "\n" + line("other", {"prompt": "x"}), encoding="utf-8")
    assert answer_file(source, target) == Counts(answered=1, failed=1)
    (record,) = (record for record in records_of(target) if record["error"])
    assert record["custom_id"] == custom_id
    assert answer_file(source, target) == Counts(skipped=2, skipped_failed=1)


def test_goes_on_where_it_stopped(files: tuple[Path, Path]) -> None:
    """The engine dies in the middle, and the last line is torn, as a power cut leaves it."""
    source, target = files
    names = [f"id-{i}" for i in range(20)]
    source.write_text("\n".join(line(name, {"prompt": name}) for name in names))
    asked: list[str] = []

    async def dies_later(path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body)["prompt"])
        await asyncio.sleep(0.001)
        if len(asked) > 10:
            raise EngineDead("gone")
        return await shout(path, body)

    with pytest.raises(EngineDead):
        answer_file(source, target, dies_later)
    done = [record["custom_id"] for record in records_of(target)]
    assert 0 < len(done) <= 10
    with target.open("ab") as torn:
        torn.write(b'{"id":"batch_req_1","custom_id":"id-19","resp')
    asked.clear()

    async def notes(path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body)["prompt"])
        return await shout(path, body)

    counts = answer_file(source, target, notes)
    assert counts == Counts(answered=20 - len(done), skipped=len(done))
    assert sorted([*asked, *done]) == sorted(names)
    assert sorted(record["custom_id"] for record in records_of(target)) == sorted(names)


def test_records_stand_there_as_soon_as_they_are_done(files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text(line("slow", {"prompt": "s"}) + "\n" + line("quick", {"prompt": "q"}))
    seen: list[str] = []

    async def answer(path: str, body: bytes) -> tuple[int, bytes]:
        if b'"s"' in body:
            while not seen:
                await asyncio.sleep(0.001)
                seen.extend(record["custom_id"] for record in records_of(target))
        return await shout(path, body)

    answer_file(source, target, answer)
    assert seen == ["quick"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_full_disk(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whole records before, none after, and the next run goes on."""
    source, target = files
    source.write_text("\n".join(line(f"id-{i}", {"prompt": "x" * 50}) for i in range(9)))
    real, room = os.pwrite, [500]

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = real(file, data[: min(len(data), room[0])], offset)
        room[0] -= size
        return size

    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, {"pwrite": pwrite, "fsync": fsync}[call])
        with pytest.raises(EngineError, match=r"No space left on device.*goes on from there"):
            answer_file(source, target)
    assert not target.read_bytes() or target.read_bytes().endswith(b"\n")
    assert len(records_of(target)) == (2 if call == "pwrite" else 0)
    answer_file(source, target)
    assert len({record["custom_id"] for record in records_of(target)}) == 9


def test_files_that_cannot_be_used(files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text(line("a", {"prompt": "x"}))
    with pytest.raises(ConfigError, match="No such file"):
        answer_file(source.with_name("none"), target)
    with pytest.raises(ConfigError, match="same file"):
        answer_file(source, source)
    # Somebody else's file is left as it is, its last line too.
    target.write_bytes(b'{"torn": ')
    with pytest.raises(ConfigError, match="line 1 is no batch record"):
        answer_file(source, target)
    assert target.read_bytes() == b'{"torn": '
    target.unlink()
    with pytest.raises(ConfigError, match="download"):
        answer_file(Path("https://example.org/in.jsonl"), target)
    with pytest.raises(ConfigError, match="cannot be written"):
        answer_file(source, target.parent)
    target.write_text('{"some": "json"}\n')
    with pytest.raises(ConfigError, match="line 1 is no batch record"):
        answer_file(source, target)
    assert target.read_text() == '{"some": "json"}\n'
    target.unlink()
    with Records(target), pytest.raises(ConfigError, match="another run"):
        answer_file(source, target)
