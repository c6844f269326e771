"""What the wiring decides by itself."""

from __future__ import annotations

import pytest
from support.tiny import TinyEngine, tiny_llama

from pelton.config.speculation import SpeculationConfig
from pelton.runner.heads.sample import SampleHead
from pelton.sampling.prompt_logprobs import MIN_TILE_ROWS


@pytest.mark.parametrize(
    ("max_tokens", "num_rows", "num_drafts", "expected"),
    [(64, 16, 0, 16), (64, 16, 8, 64), (160, 16, 8, 144), (300, 16, 8, 144), (5, 5, 3, 5)],
)
def test_a_step_has_no_more_verification_rows_than_tokens(
    max_tokens: int, num_rows: int, num_drafts: int, expected: int
) -> None:
    """Neither do the buffers, whose rows are as wide as the vocabulary."""
    speculation = SpeculationConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
    )
    engine = TinyEngine(
        tiny_llama(),
        max_num_seqs=num_rows,
        max_num_batched_tokens=max_tokens,
        num_blocks=300,
        speculation=speculation if num_drafts else SpeculationConfig(),
    )
    runner = engine.worker._assembled.runner
    head = runner._head
    assert isinstance(head, SampleHead)
    slot = head._ring._slots[0]
    assert slot.token_logprobs.shape[0] == slot.top_ids.shape[0] == expected
    assert runner._builder._buffers.max_logits == expected
    # Log-probabilities of a prompt borrow these, in tiles that are not too small.
    assert len(head._logits) == len(head._output.token_ids) == max(expected, MIN_TILE_ROWS)
    # All rows in decode at once, with as many drafts as there is room for.
    engine.generate([[3, 4, 3, 4, 3, 4, 3]] * num_rows)
