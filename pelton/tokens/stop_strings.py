"""Finding stop strings in text that comes in pieces, without showing any part of one."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from pelton.errors import RequestError

_MAX_STOP_CHARACTERS = 16_384
_NUM_CODE_POINTS = 0x110000


class _Automaton:
    """The stop strings as one machine (Aho and Corasick, 1975): constant work per character.

    State s stands for the longest end of the text that begins some stop string; 0 for none.

    first_letters: what leads out of state 0.
    depth[s]: its length in characters.
    fail[s]: state of the next shorter such end.
    match[s]: the longest stop string that ends in s, or None.
    hold[s]: length of the longest end that is a *proper* beginning, so may still grow into a
        stop string; less than depth[s] where s itself can not grow.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.first_letters = frozenset(stop[0] for stop in stops)
        self._next: dict[int, int] = {}  # state * _NUM_CODE_POINTS + code point -> state
        self.match: list[str | None] = [None]
        depth = [0]
        children: list[list[tuple[int, int]]] = [[]]
        for stop in stops:
            state = 0
            for letter in stop:
                key = state * _NUM_CODE_POINTS + ord(letter)
                following = self._next.get(key)
                if following is None:
                    following = self._next[key] = len(depth)
                    children[state].append((ord(letter), following))
                    children.append([])
                    depth.append(depth[state] + 1)
                    self.match.append(None)
                state = following
            self.match[state] = stop
        self._fail = [0] * len(depth)
        self.hold = [0] * len(depth)
        queue = deque([0])
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            self.match[state] = self.match[state] or self.match[fail]
            self.hold[state] = depth[state] if children[state] else self.hold[fail]
            for code_point, child in children[state]:
                self._fail[child] = self.step(fail, code_point) if state else 0
                queue.append(child)

    def step(self, state: int, code_point: int) -> int:
        while True:
            following = self._next.get(state * _NUM_CODE_POINTS + code_point)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]


_automaton = lru_cache(maxsize=64)(_Automaton)


class StopMatcher:
    """Cuts a text that comes in pieces at the first stop string.

    The match that is complete first wins; of two that are complete at the same character, the
    longer one, which began first. Text is held back only while it is the beginning of some stop
    string, so what is released never has to be taken back. With `include_stop` nothing is held
    back: the text ends right after the stop string.

    Args:
        stops: non-empty strings, at most 16,384 characters together.

    Raises RequestError if they are longer.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        num_characters = sum(map(len, stops))
        if num_characters > _MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop holds {num_characters} characters together; at most "
                f"{_MAX_STOP_CHARACTERS} are allowed.",
                field="stop",
            )
        self._automaton = _automaton(tuple(stops))
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, delta: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            delta: new text.
            enabled: whether a stop string that is complete within `delta` counts. One that is
                complete later counts even if it began here.

        Returns (released text, matched stop string or None). After a match the text is over:
        push no more.
        """
        automaton, state = self._automaton, self._state
        if state == 0 and automaton.first_letters.isdisjoint(delta):
            return delta, None  # nearly always
        for place, letter in enumerate(delta, start=1):
            state = automaton.step(state, ord(letter))
            if enabled and (matched := automaton.match[state]) is not None:
                text = self._held + delta[:place]
                self._state, self._held = 0, ""
                return text if self._include_stop else text[: len(text) - len(matched)], matched
        self._state = state
        if self._include_stop:
            return delta, None
        text = self._held + delta
        num_released = len(text) - automaton.hold[state]
        self._held = text[num_released:]
        return text[:num_released], None

    def finish(self) -> str:
        """The text is over without a match: returns what was held back."""
        rest, self._held, self._state = self._held, "", 0
        return rest
