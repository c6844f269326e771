"""In which order requests are served. Order is a key, so it is the same wherever it matters: who is
admitted, who gets tokens first, and, read backwards, who yields."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from pelton.core.request import Request
from pelton.errors import ConfigError, IntegrityError

PolicyKey = Callable[[Request], tuple[int, ...]]


def fcfs(request: Request) -> tuple[int, ...]:
    """First come, first served."""
    return (request.arrival,)


def priority(request: Request) -> tuple[int, ...]:
    """Lower priority value first, then first come."""
    return (request.priority, request.arrival)


POLICIES: dict[str, PolicyKey] = {"fcfs": fcfs, "priority": priority}


def register(name: str, key: PolicyKey) -> None:
    """Add a policy. The key is taken once, at arrival; ties are broken by arrival.

    Raises ConfigError if the name is taken.
    """
    if name in POLICIES:
        raise ConfigError(f"policy {name!r} exists already; choose another name.")
    POLICIES[name] = key


def get_policy(name: str) -> PolicyKey:
    """Raises ConfigError naming the known policies."""
    if name not in POLICIES:
        raise ConfigError(f"policy must be one of {sorted(POLICIES)}, got {name!r}.")
    return POLICIES[name]


_key = attrgetter("key")


def insert(requests: list[Request], request: Request) -> None:
    """Put a request in its place in a list that is sorted by key."""
    insort(requests, request, key=_key)


def remove(requests: list[Request], request: Request) -> None:
    """Take a request out of a list that is sorted by key. Raises IntegrityError if absent."""
    index = bisect_left(requests, request.key, key=_key)
    if index == len(requests) or requests[index] is not request:
        raise IntegrityError(f"{request} is not in its queue.")
    del requests[index]
