from __future__ import annotations

from pelton.metrics.step_sizes import EDGES, StepSizes


def test_a_step_counts_at_the_first_edge_that_holds_it() -> None:
    sizes = StepSizes()
    for num_tokens in (1, 2, 8, 9, 16384, 16385):
        sizes.add(num_tokens)
    assert sizes.counts == (1, 2, 1, *[0] * 9, 1, 1)
    assert len(sizes.counts) == len(EDGES) + 1
