"""`pelton bench serve`: load on a server that speaks OpenAI's API, and what came of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from pelton.bench import machine, report
from pelton.bench.http_stream import EventReader, HttpClient
from pelton.bench.load import Asked, make_requests, send_times
from pelton.bench.options import ServingOptions
from pelton.bench.outcomes import Outcome, summarise, tokens_by_second
from pelton.bench.timeline import timeline_svg
from pelton.errors import ConfigError, EngineError, PeltonError
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def run(options: ServingOptions) -> None:
    """Measures, prints, writes the result file and the plot."""
    report.check_writable(options.save_result, "save_result")
    report.check_writable(options.plot, "plot")
    asked = make_requests(options)
    result, outcomes = asyncio.run(measure(options, asked))
    context = {
        "command": report.command(),
        "client_machine": dataclasses.asdict(machine.facts(torch.device("cpu"))),
        "options": _without_key(options),
    }
    tell(result)
    report.write_json(options.save_result, context | result)
    if options.plot is not None:
        Path(options.plot).write_text(timeline_svg(outcomes), encoding="utf-8")
        print(f"written   {options.plot}")


async def measure(
    options: ServingOptions, asked: Sequence[Asked]
) -> tuple[dict[str, Any], list[Outcome]]:
    """Sends the requests; returns what is told of them, JSON-ready, and the outcomes.

    Raises EngineError if the server cannot be asked, or no request at all succeeded.
    """
    client = HttpClient(options.url, options.api_key)
    try:
        server = await _server_facts(client, options)
        way = await _find_way(client, options, asked[0], server["model"])
        for number in range(options.num_warmups):
            await _send(client, way, asked[number % len(asked)], options, Outcome(due=0.0))
        cpu, begin = time.process_time(), time.perf_counter()
        outcomes = await _send_all(client, way, asked, options, begin)
        cpu_share = (time.process_time() - cpu) / (time.perf_counter() - begin)
    finally:
        client.close()
    if all(one.error for one in outcomes):
        raise EngineError(f"every request failed: {outcomes[0].error}")
    result = summarise(outcomes, options.percentile_list(), options.limits())
    result |= {
        "server": server,
        "token_counts": way.name,
        "client_cpu_share": cpu_share,
        "errors": dict(Counter(one.error for one in outcomes if one.error)),
        "output_tokens_by_second": tokens_by_second(
            [one for one in outcomes if not one.error], min(one.sent for one in outcomes)
        ),
        "requests": [_details(one, begin) for one in outcomes],
    }
    return result, outcomes


@dataclass(frozen=True, slots=True)
class _Way:
    """How a server is asked, and how its tokens are counted. tokenizer: where it does not count."""

    name: str
    model: str
    stream_options: dict[str, bool] | None
    tokenizer: Tokenizer | None = None


async def _server_facts(client: HttpClient, options: ServingOptions) -> dict[str, Any]:
    model, version = options.model_name, None
    if model is None:
        async with client.request("GET", "/v1/models") as response:
            text = await response.read()
        if response.status in (401, 403, 503):
            # A name would not help.
            raise EngineError(
                f"{options.url} answers with status {response.status}: {_sentence(text)}"
            )
        try:
            model = str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise EngineError(
                f"{options.url} does not tell its models (status {response.status}); give "
                "--model-name."
            ) from None
    async with client.request("GET", "/version") as response:
        text = await response.read()
        if response.status == 200:
            version = _version(text)
    return {"url": options.url, "model": model, "version": version}


async def _find_way(client: HttpClient, options: ServingOptions, asked: Asked, model: str) -> _Way:
    """The most exact way to count that the server takes, found by asking it once or twice."""
    ways = [
        _Way("usage in each chunk", model, {"include_usage": True, "continuous_usage_stats": True}),
        _Way("usage at the end, spread evenly over chunks", model, {"include_usage": True}),
    ]
    if not options.continuous_usage:
        del ways[0]
    short = dataclasses.replace(asked, output_len=min(asked.output_len, 4))
    error = ""
    for way in ways:
        outcome = Outcome(due=0.0)
        has_usage = await _send(client, way, short, options, outcome)
        if not outcome.error:
            if has_usage == "each" or (has_usage == "end" and way is ways[-1]):
                return way
            if has_usage == "end":
                return ways[-1]
        error = error or outcome.error
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(Path(options.tokenizer).expanduser())
        return _Way("by the tokenizer, of the whole text", model, None, tokenizer)
    if error:
        raise EngineError(error)
    raise ConfigError(f"{options.url} does not count tokens (usage); give --tokenizer FOLDER.")


async def _send_all(
    client: HttpClient,
    way: _Way,
    asked: Sequence[Asked],
    options: ServingOptions,
    begin: float,
) -> list[Outcome]:
    room = asyncio.Semaphore(options.max_concurrency or len(asked))

    async def one(request: Asked, due: float) -> Outcome:
        outcome = Outcome(due=begin + due)
        await asyncio.sleep(outcome.due - time.perf_counter())
        is_full = room.locked()
        async with room:
            if is_full:
                # Its turn comes with room for it: the wait is what max_concurrency asks for.
                outcome.due = time.perf_counter()
            await _send(client, way, request, options, outcome)
        return outcome

    times = send_times(options)
    return list(await asyncio.gather(*map(one, asked, times)))


async def _send(
    client: HttpClient, way: _Way, asked: Asked, options: ServingOptions, outcome: Outcome
) -> str:
    """Fills `outcome`. Returns where usage came: "each" chunk, "end", or ""."""
    body = {"model": way.model, **asked.body(options)}
    if way.stream_options is not None:
        body["stream_options"] = way.stream_options
    raw = json.dumps(body).encode()
    counter = _Counter(way.tokenizer)
    outcome.sent = time.perf_counter()
    try:
        async with (
            asyncio.timeout(options.timeout),
            client.request("POST", _PATHS[options.endpoint], raw) as response,
        ):
            if response.status != 200:
                outcome.error = f"status {response.status}: {_sentence(await response.read())}"
            else:
                events = EventReader()
                async for piece in response.pieces:
                    now = time.perf_counter()
                    for event in events.feed(piece):
                        counter.take(now, event)
    except PeltonError as error:
        outcome.error = str(error)
    except TimeoutError:
        outcome.error = f"no whole answer within {options.timeout:g} s"
    outcome.end = time.perf_counter()
    if not outcome.error:
        outcome.end = counter.finish(outcome)
    return counter.usage_came


@dataclass(slots=True)
class _Piece:
    """A chunk with choices. total: tokens so far by its usage, None without one."""

    time: float
    text: str
    is_shown: bool
    total: int | None


class _Counter:
    """Tokens of the chunks of an answer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[_Piece] = []
        self._usage: dict[str, Any] = {}
        self._error = ""
        self._has_ended = False
        self._num_events = 0

    def take(self, now: float, event: bytes) -> None:
        self._num_events += 1
        if event == b"[DONE]":
            self._has_ended = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            self._error = f"an event is no JSON: {event[:100]!r}"
            return
        if not isinstance(chunk, dict) or "error" in chunk:
            self._error = _sentence(event)
            return
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
        choices = chunk.get("choices")
        if not choices:
            return
        text = "".join(map(_text, choices))
        is_last = any(choice.get("finish_reason") for choice in choices)
        # Not every server says so in another way.
        self._has_ended = self._has_ended or is_last
        total = int(usage.get("completion_tokens", 0)) if usage else None
        self._pieces.append(_Piece(now, text, bool(text) or is_last, total))

    @property
    def usage_came(self) -> str:
        """With "each" chunk, at the "end" or, in the last chunk with text, as good as that; ""."""
        if not self._usage:
            return ""
        shown = [piece for piece in self._pieces if piece.is_shown]
        return "each" if all(piece.total is not None for piece in shown) and shown else "end"

    def finish(self, outcome: Outcome) -> float:
        """Fills `outcome` and returns when the last chunk came."""
        if not self._error and not self._num_events:
            self._error = "the answer is no stream of events"
        elif not self._error and not self._has_ended:
            self._error = "the stream ended without [DONE]"
        outcome.chunks = self._chunks()
        outcome.num_prompt_tokens = int(self._usage.get("prompt_tokens", 0))
        if not self._error and outcome.num_tokens == 0:
            self._error = "an answer without tokens"
        outcome.error = self._error
        return self._pieces[-1].time if self._pieces else outcome.end

    def _chunks(self) -> list[tuple[float, int]]:
        came = self.usage_came
        if came == "each":
            totals = [piece.total or 0 for piece in self._pieces]
            before = [0, *accumulate(totals, max)]
            counts = [max(total - old, 0) for total, old in zip(totals, before)]
        elif came == "end":
            shown = [(piece.time, int(piece.is_shown)) for piece in self._pieces]
            return _spread(shown, int(self._usage.get("completion_tokens", 0)))
        elif self._tokenizer is not None:
            counts = _begun([piece.text for piece in self._pieces], self._tokenizer)
        else:
            counts = [int(piece.is_shown) for piece in self._pieces]
        return [(piece.time, count) for piece, count in zip(self._pieces, counts)]


def _begun(texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Tokens of the whole text that begin in each part of it, however it was cut."""
    ids = tokenizer.encode("".join(texts), add_special_tokens=False).tolist()
    starts = list(accumulate((len(tokenizer.token_bytes(token)) for token in ids), initial=0))
    ends = list(accumulate(len(text.encode()) for text in texts))
    begun = [bisect_left(starts[: len(ids)], end) for end in ends]
    if begun:
        begun[-1] = len(ids)
    return [now - before for now, before in zip(begun, [0, *begun])]


def _spread(chunks: Sequence[tuple[float, int]], total: int) -> list[tuple[float, int]]:
    """`total` tokens over the chunks that show something, as evenly as whole numbers allow; the
    first one has one at least, and the last one, which may be an end and no more, perhaps none."""
    shown = [time for time, count in chunks if count]
    ends = [-(-place * total // len(shown)) for place in range(len(shown) + 1)] if shown else []
    return [(time, ends[place + 1] - ends[place]) for place, time in enumerate(shown)]


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning") or ""


def _sentence(answer: bytes) -> str:
    try:
        error = json.loads(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return answer[:200].decode("utf-8", "replace")


def _version(answer: bytes) -> str | None:
    """What a server's /version tells; None if that is something else, such as a page."""
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    version = found.get("version") if isinstance(found, dict) else found
    return version[:100] if isinstance(version, str) else None


def _details(one: Outcome, begin: float) -> dict[str, Any]:
    found: dict[str, Any] = {"sent_s": one.sent - begin, "e2e_s": one.e2e}
    if one.error:
        return found | {"error": one.error}
    return found | {
        "ttft_s": one.ttft,
        "tpot_s": one.tpot,
        "num_prompt_tokens": one.num_prompt_tokens,
        "num_tokens": one.num_tokens,
    }


def _without_key(options: ServingOptions) -> dict[str, Any]:
    found = dataclasses.asdict(options)
    del found["api_key"]
    # JSON has no infinity.
    return {name: "inf" if value == float("inf") else value for name, value in found.items()}


def tell(result: dict[str, Any], write: Callable[[str], None] = print) -> None:
    """The result for people."""
    server = result["server"]
    rows = {
        "server": f"{server['url']}, {server['model']} ({server['version'] or 'no version told'})",
        "requests": f"{result['completed']} done, {result['failed']} failed, in "
        f"{result['duration_s']:.2f} s: {result['requests_per_s']:.2f}/s",
        "tokens": f"{result['total_input_tokens']} in, {result['total_output_tokens']} out "
        f"(counted: {result['token_counts']})",
        "output": f"{result['output_tokens_per_s']:.1f} tokens/s, at most "
        f"{result['peak_output_tokens_per_s']} in one second; with prompts "
        f"{result['total_tokens_per_s']:.1f} tokens/s",
        "concurrency": f"at most {result['peak_concurrency']}, on average "
        f"{result['mean_concurrency']:.1f}",
        "client": f"{100 * result['client_cpu_share']:.1f} % of a core; the latest request left "
        f"{1000 * result['max_lateness_s']:.1f} ms after its time",
    }
    if result["goodput_share"] is not None:
        rows["goodput"] = (
            f"{100 * result['goodput_share']:.1f} % of the requests, "
            f"{result['goodput_requests_per_s']:.2f}/s"
        )
    for name, text in rows.items():
        write(f"{name:12} {text}")
    for name, values in result["latencies_s"].items():
        if values is not None:
            numbers = "  ".join(f"{key} {1000 * value:8.2f}" for key, value in values.items())
            write(f"{name.upper():5} ms     {numbers}")
    for error, count in result["errors"].items():
        write(f"error        {count} times: {error}")
