"""`pelton bench overhead`: what serving costs. The same requests go to the engine of this process
and, as streams that all run at once, to a `pelton serve` beside it, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.bench import measure, report, serving
from pelton.bench.load import Asked
from pelton.bench.options import OverheadOptions, ServingOptions
from pelton.bench.session import open_session, profiled
from pelton.config.engine import EngineArgs
from pelton.core.plan import Int32Array
from pelton.errors import EngineError

_START_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One side's run. api_cpu_s: processor time of the API process, 0 for the engine alone."""

    tokens_per_s: float
    api_cpu_s: float = 0.0
    client_cpu_share: float = 0.0
    ttft_median_s: float = 0.0


def run(args: EngineArgs, options: OverheadOptions) -> None:
    """Measures, prints, writes the result file."""
    session = open_session(args, options)
    prompts = measure.random_prompts(
        session.config.model.vocab_size, options.num_prompts, options.input_len, session.config.seed
    )
    with serve(args) as (url, pid):
        served = _Served(url, pid, options)
        sides: list[measure.Side | _Served] = [session.sides[0], served]

        def once(side: measure.Side | _Served) -> Sample:
            if isinstance(side, _Served):
                return side.sample(prompts)
            seconds = measure.timed_generate(side, prompts, options.output_len)
            return Sample(prompts.shape[0] * options.output_len / seconds)

        alone, beside = measure.alternate(
            sides, once, num_warmup=options.num_iters_warmup, num_iters=options.num_iters
        )
    num_tokens = options.num_prompts * options.output_len
    result = tell(alone, beside, num_tokens)
    result |= profiled(
        session,
        options,
        batch_size=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
    )
    report.write_json(options.json, session.context | result)


def tell(alone: list[Sample], beside: list[Sample], num_tokens: int) -> dict[str, Any]:
    """Prints both sides and what follows from them; returns it. num_tokens: of a run."""
    for name, samples in (("alone", alone), ("served", beside)):
        print(f"{name:9} tokens/s  {report.Summary.of([s.tokens_per_s for s in samples]).line()}")
    api = report.Summary.of([1000 * sample.api_cpu_s / num_tokens for sample in beside])
    print(f"{'API':9} CPU ms per token  {api.line()}")
    client = report.Summary.of([100 * sample.client_cpu_share for sample in beside])
    print(f"{'client':9} % of a core  {client.line()}")
    ratio = report.print_ratios(
        "throughput",
        [sample.tokens_per_s for sample in beside],
        [sample.tokens_per_s for sample in alone],
        "served / alone",
    )
    return {
        "alone": [dataclasses.asdict(sample) for sample in alone],
        "served": [dataclasses.asdict(sample) for sample in beside],
        "api_cpu_ms_per_token": dataclasses.asdict(api),
        "ratio": ratio,
    }


class _Served:
    """The server's side."""

    def __init__(self, url: str, pid: int, options: OverheadOptions) -> None:
        self._pid = pid
        self._options = ServingOptions(
            url=url,
            num_prompts=options.num_prompts,
            num_warmups=0,
            input_len=options.input_len,
            output_len=options.output_len,
            ignore_eos=True,
            continuous_usage=False,
        )

    def sample(self, prompts: Int32Array) -> Sample:
        """Raises EngineError unless every request made all its tokens."""
        output_len = self._options.output_len
        asked = [Asked(row, output_len) for row in prompts.tolist()]
        before = cpu_seconds(self._pid)
        result, outcomes = asyncio.run(serving.measure(self._options, asked))
        spent = cpu_seconds(self._pid) - before
        if any(one.num_tokens != output_len for one in outcomes):
            raise EngineError(f"not every stream made {output_len} tokens: {result['errors']}.")
        return Sample(
            tokens_per_s=result["output_tokens_per_s"],
            api_cpu_s=spent,
            client_cpu_share=result["client_cpu_share"],
            ttft_median_s=result["latencies_s"]["ttft"]["median"],
        )


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, without its children's (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serve(args: EngineArgs) -> Iterator[tuple[str, int]]:
    """`pelton serve` with the same arguments: its URL and the API process's id. Raises EngineError
    if it does not get ready."""
    values = {
        field.name: value
        for field in dataclasses.fields(args)
        if (value := getattr(args, field.name)) != field.default
    }
    with tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "pelton.cli.main", "serve", "--config", str(config)]
        command += ["--port", "0", "--log-interval", "0", "--no-log-requests"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            yield _url_of(process), process.pid
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines: list[str] = []
    timer = threading.Timer(_START_SECONDS, process.kill)
    timer.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.match(r"  URL +(\S+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return found[1]
    finally:
        timer.cancel()
    raise EngineError("`pelton serve` did not start:\n" + "".join(lines[-20:]))
