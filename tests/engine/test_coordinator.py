"""Which engine gets a request, from scripted counts."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.scripted_engine import scripted_stats

from pelton.engine import coordinator as module
from pelton.engine.coordinator import Coordinator
from pelton.messages.to_engine import AddRequest, PackedEmbeds

BLOCK = 16


def make(num_replicas: int = 3, **changes: Any) -> Coordinator:
    options = {"max_num_seqs": 256, "run_length": BLOCK, "max_kept": 1000, **changes}
    return Coordinator(num_replicas, **options)


class Asker:
    """Requests with handles of their own."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._next = 0

    def ask(self, ids: Any, *, n: int = 1, **changes: Any) -> int:
        """Where it goes."""
        handle, self._next = self._next, self._next + n
        params = {"n": n} if n > 1 else {}
        packed = np.array(ids, "<i4").tobytes()
        message = AddRequest(handle, f"r{handle}", packed, params, **changes)
        return self.coordinator.choose(message)

    def run(self, ids: Any, **changes: Any) -> int:
        """Where it goes; it ends at once."""
        before = self._next
        place = self.ask(ids, **changes)
        for handle in range(before, self._next):
            self.coordinator.end(handle)
        return place


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def test_equals_take_turns():
    asker = Asker(make())
    assert [asker.run(prompt(seed, 40)) for seed in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_shortest_queue_gets_the_next_request():
    asker = Asker(make())
    places = [asker.ask(prompt(1, 40), n=5), *(asker.ask(prompt(s, 40)) for s in range(2, 12))]
    assert places[0] == 0
    assert Counter(places[1:]) == {1: 5, 2: 5}
    assert asker.ask(prompt(99, 40)) == 0  # all have five; its turn is longest ago


def test_an_answer_that_has_ended_counts_no_more():
    coordinator = make(2)
    asker = Asker(coordinator)
    assert asker.ask(prompt(1, 40), n=4) == 0
    assert [coordinator.place(handle) for handle in range(5)] == [0, 0, 0, 0, None]
    for handle in (0, 1, 2, 3, 3, 77):
        coordinator.end(handle)
    assert coordinator.place(2) is None
    assert [asker.ask(prompt(s, 40)) for s in (2, 3)] == [1, 0]


def test_a_full_cache_counts_as_many_answers():
    """What the engines say of their caches: long requests are few and fill them."""
    coordinator = make(2)
    asker = Asker(coordinator)
    coordinator.note(0, dataclasses.replace(scripted_stats(), kv_usage=0.25))
    places = [asker.ask(prompt(seed, 40)) for seed in range(70)]
    assert places[:64] == [1] * 64
    assert places[66:] == [0] * 4  # until as many are open there
    coordinator.note(0, scripted_stats())
    assert asker.ask(prompt(99, 40)) == 0


def test_prompts_that_begin_alike_meet():
    asker = Asker(make())
    first, other = prompt(1, 200), prompt(2, 200)
    home, away = asker.run(first), asker.run(other)
    assert home != away
    for _ in range(3):  # turns do not matter
        assert asker.run([*first, *prompt(3, 50)]) == home
        assert asker.run([*other[:100], *prompt(4, 80)]) == away
    # The one that knows more of it.
    assert asker.run([*first[:160], *prompt(5, 9)]) == home


@pytest.mark.parametrize(
    ("length", "changes"),
    [(BLOCK - 1, {}), (200, {"cache_salt": "b"}), (200, {"embeds": "other"})],
    ids=["no full run", "another salt", "other embeddings"],
)
def test_prompts_that_share_no_cache_do_not_meet(length, changes):
    def embeds(byte: bytes) -> PackedEmbeds:
        return PackedEmbeds("float32", 8, memoryview(byte * 320))

    if "embeds" in changes:
        base, changes = {"embeds": embeds(b"a")}, {"embeds": embeds(b"b")}
    else:
        base = {"cache_salt": "a"}
    asker = Asker(make(2))
    same = prompt(1, length)
    assert asker.run(same, **base) == 0
    assert asker.run(same, **{**base, **changes}) == 1
    if length > BLOCK:
        assert asker.run(same, **base) == 0
        assert asker.run(same, **base) == 0


def test_without_a_prefix_cache_nothing_meets():
    asker = Asker(make(2, run_length=0))
    assert [asker.run(prompt(1, 200)) for _ in range(4)] == [0, 1, 0, 1]


def test_a_prefix_is_worth_a_queue_but_not_a_long_one():
    """1024 tokens outweigh 16 answers. Then the next engine begins to know them, too."""
    asker = Asker(make(2))
    system = prompt(1, 1024)
    places = [asker.ask([*system, *prompt(seed, 20)]) for seed in range(2, 62)]
    assert places[:16] == [0] * 16
    assert 1 in places[16:19]
    # Now both know them, and the queues decide.
    assert abs(Counter(places)[0] - Counter(places)[1]) <= 16
    assert Counter(places[-20:]) == {0: 10, 1: 10} or Counter(places)[0] == Counter(places)[1]


def test_no_prefix_is_worth_more_than_half_of_the_rows():
    asker = Asker(make(2, max_num_seqs=8))
    places = [asker.ask(prompt(1, 16_000)) for _ in range(6)]
    assert places == [0, 0, 0, 0, 0, 1] or places == [0, 0, 0, 0, 1, 1]


def test_what_is_remembered_is_bounded_and_the_beginnings_stay():
    coordinator = make(2, max_kept=10)
    asker = Asker(coordinator)
    home = asker.run(prompt(1, 8 * BLOCK))
    asker.run(prompt(2, 40 * BLOCK))
    (seen,) = [r.seen for i, r in enumerate(coordinator._replicas) if i != home]
    assert len(seen) == 10
    assert asker.run(prompt(2, 40 * BLOCK)) != home
    assert asker.run(prompt(1, 8 * BLOCK)) == home
    # A long one pushes the older one out.
    for _ in range(2):
        asker.coordinator._remember(coordinator._replicas[home], list(range(10)))
    assert (
        coordinator._num_known(
            coordinator._replicas[home],
            coordinator._runs(
                AddRequest(0, "", np.array(prompt(1, 8 * BLOCK), "<i4").tobytes(), {})
            ),
        )
        == 0
    )


def test_an_emptied_cache_is_forgotten():
    coordinator = make(2)
    asker = Asker(coordinator)
    first = prompt(1, 200)
    assert asker.run(first) == 0
    coordinator.forget_prompts(0)
    assert asker.run(first) == 1


def test_long_prompts_are_chosen_for_quickly():
    """On the event loop that all share; the deadline is for a busy machine."""
    asker = Asker(make(8, max_kept=10**6))
    ids = prompt(1, 500_000)
    asker.run(ids)
    started = time.perf_counter()
    asker.run(ids)
    assert time.perf_counter() - started < 0.1
    assert len(asker.coordinator._replicas[0].seen) == module._MAX_RUNS
