"""Custom logits processors: from a name to a function, and what the function is told."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pelton.errors import RequestError
from pelton.sampling.table import processor_target


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """token_ids: [W] int32, the request's prompt and output before the token to be drawn, drafts
    that are being verified included; -1 behind them, and where the prompt has an embedding.
    prompt_len, num_tokens: [] int32, of these."""

    token_ids: torch.Tensor
    prompt_len: torch.Tensor
    num_tokens: torch.Tensor


Processor = Callable[[torch.Tensor, ProcessedRow], object]


def load_processors(asked: Mapping[str, Mapping[str, Any]]) -> tuple[Processor, ...]:
    """The functions that a request asks for, with their arguments bound, in the request's order.

    Raises RequestError for a name that is not in the table, or whose function cannot be imported.
    """
    return tuple(_load(name, arguments) for name, arguments in asked.items())


def _load(name: str, arguments: Mapping[str, Any]) -> Processor:
    target = processor_target(name)
    module, _, function = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise RequestError(
            f"logits_processors names {name!r}, whose {target!r} cannot be imported: "
            f"{type(error).__name__}: {error}.",
            field="logits_processors",
        ) from error
    return functools.partial(found, **arguments)
