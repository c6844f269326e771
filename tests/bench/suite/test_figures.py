"""The others' figures belong to rows that the suite has."""

from __future__ import annotations

import pytest

from pelton.bench.suite.cases import SUBJECTS
from pelton.bench.suite.figures import PEERS


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_figures_are_of_rows(subject):
    rows = {name for case in subject.cases for name, _ in case.rows()}
    rows |= {name for name, _ in subject.start_rows()}
    if subject.name in PEERS:
        assert set(PEERS[subject.name].figures) <= rows
        assert PEERS[subject.name].source


def test_a_goal_is_no_worse_than_what_it_is_compared_with_and_no_better_than_the_floor():
    rates = ("offline", "prefill", "batch1", "batch32", "batch64")
    for peer in PEERS.values():
        for name, figure in peer.figures.items():
            numbers = [n for n in (figure.peer, figure.goal, figure.floor) if n]
            assert numbers == sorted(numbers, reverse=name not in rates), (peer.name, name)
