"""What a benchmark of a server sends, and when."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pelton.bench.options import ServingOptions
from pelton.config.reasons import reason_of
from pelton.errors import ConfigError

_FIRST_ID = 100
"""Lower ids are often special."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to be sent. prompt: text, token ids or messages."""

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int

    def body(self, options: ServingOptions) -> dict[str, Any]:
        """Without model and stream options."""
        name = "messages" if options.endpoint == "chat" else "prompt"
        prompt: Any = self.prompt
        if name == "messages" and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        body = {
            name: prompt,
            "max_tokens": self.output_len,
            "temperature": options.temperature,
            "stream": True,
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        return body | (options.extra_body or {})


def make_requests(options: ServingOptions) -> list[Asked]:
    """num_prompts of them; a dataset with fewer is gone through again. Raises ConfigError."""
    if options.dataset is None:
        generator = np.random.default_rng(options.seed)
        shape = (options.num_prompts, options.input_len)
        ids = generator.integers(_FIRST_ID, options.vocab_size, shape)
        return [Asked(row, options.output_len) for row in ids.tolist()]
    found = read_dataset(Path(options.dataset).expanduser(), options)
    if not found:
        raise ConfigError(f"dataset={options.dataset!r} holds no prompts.")
    return [found[number % len(found)] for number in range(options.num_prompts)]


def read_dataset(path: Path, options: ServingOptions) -> list[Asked]:
    """The first num_prompts of a file. Raises ConfigError naming what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset={str(path)!r} cannot be read: {reason_of(error)}.") from None
    try:
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"dataset={str(path)!r} is not JSON: {error}.") from None
    found: list[Asked] = []
    for number, entry in enumerate(entries, start=1):
        if len(found) == options.num_prompts:
            break
        asked = _read_entry(entry, options)
        if asked is None:
            raise ConfigError(
                f"dataset={str(path)!r}: entry {number} has no prompt, messages or conversations "
                f"that endpoint={options.endpoint} can take."
            )
        found.append(asked)
    return found


def _read_entry(entry: Any, options: ServingOptions) -> Asked | None:
    if not isinstance(entry, dict):
        return None
    output_len = entry.get("output_len", options.output_len)
    if type(output_len) is not int or output_len < 1:
        return None
    prompt = entry.get("prompt")
    if isinstance(prompt, str) and prompt:
        return Asked(prompt, output_len)
    messages = entry.get("messages")
    if isinstance(messages, list) and messages and options.endpoint == "chat":
        return Asked(messages, output_len)
    turns = entry.get("conversations")  # ShareGPT: {"from": "human" | "gpt" ..., "value": text}
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        value = turns[0].get("value")
        if isinstance(value, str) and value:
            return Asked(value, output_len)
    return None


def send_times(options: ServingOptions) -> list[float]:
    """When each request is sent, in seconds from the start, in order.

    Gaps are of a gamma distribution with shape `burstiness` and mean 1 / request_rate.
    """
    if math.isinf(options.request_rate):
        return [0.0] * options.num_prompts
    generator = np.random.default_rng((options.seed, 1))
    scale = 1 / (options.request_rate * options.burstiness)
    gaps = generator.gamma(options.burstiness, scale, options.num_prompts)
    gaps[0] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times
