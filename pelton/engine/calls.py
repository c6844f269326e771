"""What the offline API asks of the engine for a list of prompts. No torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from pelton.engine.prompts import Prompt
from pelton.errors import RequestError

_Contra = TypeVar("_Contra", contravariant=True)
_Co = TypeVar("_Co", covariant=True)
Asked = TypeVar("Asked", SamplingParams, PoolingParams)
Output = TypeVar("Output", RequestOutput, PoolingRequestOutput[PoolingOutput])


class Reads(Protocol[_Contra]):
    def __call__(
        self, request_id: str, prompt: Prompt, params: _Contra, *, priority: int = 0
    ) -> tuple[Request, str | None]: ...


class Opened(Protocol[_Co]):
    """The requests of a call that have not ended."""

    def __len__(self) -> int: ...

    def open(self, request: Request, prompt: str | None) -> object: ...

    def take(self, updates: list[tuple[RequestUpdate, LogprobRows | None]]) -> Sequence[_Co]: ...

    def abort_all(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Call(Generic[Asked, Output]):
    """What is asked of the engine for a list of prompts, params being one for each, and how."""

    read: Reads[Asked]
    opened: Opened[Output]
    failed: Callable[[str, str | None, Exception], Output]
    params: Sequence[Asked]
    priority: Sequence[int] | None


def one_each(field: str, kind: type[Asked], given: object, count: int) -> Sequence[Asked]:
    """Of one for all, or of one for each. Raises RequestError for anything else."""
    if given is None:
        given = kind()
    if isinstance(given, kind):
        return [given] * count
    params: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    if len(params) != count or not all(isinstance(one, kind) for one in params):
        raise RequestError(
            f"{field} must be one {kind.__name__}, or one per prompt ({count}); "
            f"got {len(params)} of {type(params[0]).__name__ if params else 'nothing'}.",
            field=field,
        )
    return params


class Progress(Generic[Output]):
    """Of one call: outputs in the prompts' order, and a bar.

    places: of requests, by id. num_tokens: that were ever generated.
    """

    def __init__(self, num_prompts: int, num_tokens: Callable[[], int], has_bar: bool) -> None:
        self.outputs: list[Output | None] = [None] * num_prompts
        self.places: dict[str, int] = {}
        self._num_tokens, self._num_before = num_tokens, num_tokens()
        self._started = time.perf_counter()
        self._bar = tqdm(
            total=num_prompts,
            disable=not has_bar,
            desc="Prompts",
            unit="prompt",
            dynamic_ncols=True,
        )

    def end(self, place: int, output: Output) -> None:
        self.outputs[place] = output
        if self._bar.disable:
            return
        self._bar.update()
        num_tokens = self._num_tokens() - self._num_before
        rate = num_tokens / (time.perf_counter() - self._started)
        self._bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
