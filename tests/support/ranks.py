"""Ranks as threads of one process, and their collectives: deterministic, and strict about who calls
what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Group:
    """What the ranks of a group share."""

    size: int
    barrier: threading.Barrier = field(init=False)
    given: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.given = [None] * self.size


@dataclass
class ThreadRank:
    """all_reduce by barrier: every rank adds all partial sums in the same order."""

    rank: int
    group: Group
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange("all_reduce", tensor)).sum(0))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        torch.stack(self._exchange("all_gather", tensor), out=out)

    def _exchange(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What all ranks bring; all must bring it to the same call."""
        call = name, tuple(tensor.shape)
        self.calls.append(call)
        self.group.given[self.rank] = call, tensor.clone()
        self.group.barrier.wait()
        given = list(self.group.given)
        self.group.barrier.wait()
        assert {one for one, _ in given} == {call}, [one for one, _ in given]
        return [brought for _, brought in given]

    @property
    def num_calls(self) -> int:
        return len(self.calls)


def run_ranks(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    group = Group(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, group))
        except BaseException as error:
            results[rank] = error
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
