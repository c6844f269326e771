"""Which of several equal engines gets a request. No torch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pelton.core.scheduler import SchedulerStats
from pelton.messages.to_engine import AddRequest

_WORTH_AN_ANSWER = 64
"""Tokens. So many that need not be computed outweigh one more answer that is open."""
_LARGEST_WORTH = 0.5
"""Of an engine's rows: no prefix outweighs more open answers than this."""
_MAX_RUNS = 2048
"""Of a prompt. Who shares so many is told apart no further; hashing them takes half a
millisecond."""
_MAX_KEPT = 65536
"""Runs that are remembered of an engine, however large its cache is: some 8 MB."""
_SAMPLE_BYTES = 4096
"""Of a prompt's embeddings, in place of the token ids that it lacks there."""


@dataclass(slots=True)
class _Replica:
    """seen: hashes of the runs that prompts sent there begin with, least recently used first.
    last_turn: when it was chosen last."""

    seen: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_open: int = 0
    kv_usage: float = 0.0
    last_turn: int = 0


class Coordinator:
    """Knows of each answer where it is made, and of each engine what it has to do and which prompts
    it has seen.

    A request goes where the least is to be done for it: to the engine with the fewest open answers,
    or the least of its KV cache in use, whichever of the two is scarcer there; what the engine has
    probably cached of the prompt counts in its favour. Among equals the one goes first whose last
    turn is longest ago. All answers of a request are made by one engine, which shares their prompt.

    Args:
        num_replicas: engines.
        max_num_seqs: rows of each.
        run_length: tokens; cached prefixes are reused in multiples of it. 0: they are not.
        max_kept: runs that an engine's cache holds.
    """

    def __init__(
        self, num_replicas: int, *, max_num_seqs: int, run_length: int, max_kept: int
    ) -> None:
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._max_num_seqs = max_num_seqs
        self._run_length = run_length
        self._max_kept = min(max_kept, _MAX_KEPT)
        self._places: dict[int, int] = {}
        self._num_turns = 0

    def choose(self, message: AddRequest) -> int:
        """The engine for a request, whose answers are open there from now on."""
        runs = self._runs(message)
        chosen = min(
            range(len(self._replicas)),
            key=lambda index: (
                self._costs(self._replicas[index], runs),
                self._replicas[index].last_turn,
            ),
        )
        replica = self._replicas[chosen]
        self._num_turns += 1
        replica.last_turn = self._num_turns
        self._remember(replica, runs)
        num_answers = message.params.get("n", 1)
        replica.num_open += num_answers
        for handle in range(message.handle, message.handle + num_answers):
            self._places[handle] = chosen
        return chosen

    def place(self, handle: int) -> int | None:
        """The engine that makes an answer; None if none does any more."""
        return self._places.get(handle)

    def end(self, handle: int) -> None:
        """An answer has ended, or is not wanted any more; a second time is no harm."""
        index = self._places.pop(handle, None)
        if index is not None:
            self._replicas[index].num_open -= 1

    def note(self, index: int, stats: SchedulerStats) -> None:
        """An engine says how it stands."""
        self._replicas[index].kv_usage = stats.kv_usage

    def forget_prompts(self, index: int) -> None:
        """An engine's cache is empty."""
        self._replicas[index].seen.clear()

    def _costs(self, replica: _Replica, runs: list[int]) -> float:
        """In answers."""
        load = max(float(replica.num_open), replica.kv_usage * self._max_num_seqs)
        worth = self._num_known(replica, runs) * self._run_length / _WORTH_AN_ANSWER
        return load - min(worth, _LARGEST_WORTH * self._max_num_seqs)

    def _num_known(self, replica: _Replica, runs: list[int]) -> int:
        for count, run in enumerate(runs):
            if run not in replica.seen:
                return count
        return len(runs)

    def _runs(self, message: AddRequest) -> list[int]:
        """A hash for each full run of the prompt, of all tokens up to its end. Python's own hashes:
        two that are equal by accident cost a detour, and no answer."""
        size = 4 * self._run_length
        if not size:
            return []
        ids = message.token_ids
        embeds = message.embeds
        sample = b"" if embeds is None else bytes(embeds.rows[:_SAMPLE_BYTES])
        last = hash((message.cache_salt, sample))
        runs = []
        for end in range(size, min(len(ids), size * _MAX_RUNS) + 1, size):
            last = hash((last, ids[end - size : end]))
            runs.append(last)
        return runs

    def _remember(self, replica: _Replica, runs: list[int]) -> None:
        """From the last one to the first, which is forgotten last: without it the others are of no
        use."""
        for run in reversed(runs):
            replica.seen[run] = None
            replica.seen.move_to_end(run)
        while len(replica.seen) > self._max_kept:
            replica.seen.popitem(last=False)
