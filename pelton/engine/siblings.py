"""A request for n answers, as n requests of the engine. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pelton.core.request import Request
from pelton.engine.answers import as_request_failure
from pelton.errors import PeltonError

_SEEDS = 2**64


class Siblings:
    """Lets a request's children into the engine: child 0 first, under the request's own id; the
    others with its first token, when the prompt's full blocks are in the prefix cache, or when it
    has failed. They take the places behind it in the queue.

    Args:
        add: gives the engine a request; raises if it can never run.
    """

    def __init__(self, add: Callable[[Request], None]) -> None:
        self._add = add
        self._waiting: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        """Requests whose other children have not joined."""
        return len(self._waiting)

    def add(self, children: list[Request]) -> None:
        """Give the engine child 0. Raises what is wrong with it; nothing is left behind then."""
        first, *others = children
        if others:
            self._waiting[first.request_id] = others
        try:
            self._add(first)
        except Exception:
            self._waiting.pop(first.request_id, None)
            raise

    def join(self, first: Request) -> list[tuple[Request, Exception]]:
        """Child 0 got something, or has ended. Returns the children that could not join, and why;
        nothing if all have joined before."""
        refused: list[tuple[Request, Exception]] = []
        for index, child in enumerate(self._waiting.pop(first.request_id, ()), 1):
            child.arrival = first.arrival + index
            try:
                self._add(child)
            except PeltonError as error:
                refused.append((child, error))
            except Exception as error:
                refused.append((child, as_request_failure(child.request_id, error)))
        return refused

    def forget(self, request_id: str) -> list[Request]:
        """The request was aborted: returns the children that will not join any more."""
        return self._waiting.pop(request_id, [])


def children_of(request: Request) -> list[Request]:
    """The request itself and its n - 1 siblings: the same prompt, other noise."""
    return [request, *(_sibling(request, index) for index in range(1, request.params.n))]


def _sibling(request: Request, index: int) -> Request:
    seed = request.params.seed
    if seed is not None:
        seed = (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return Request(
        f"{request.request_id}#{index}",
        request.known_token_ids,
        dataclasses.replace(request.params, n=1, seed=seed, prompt_logprobs=None),
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        prompt_embeds=request.prompt_embeds,
        eos_token_ids=request.eos_token_ids,
    )
