from __future__ import annotations

import pytest
from support.tiny import make_config, tiny_llama

from pelton.engine.facts import facts_of


@pytest.mark.parametrize(
    ("block_size", "caching", "says"),
    [
        (16, True, "reused in multiples of 16 tokens"),
        (16, False, "not reused"),
        (1024, True, "share fewer than 1024 tokens share no KV"),
    ],
)
def test_a_front_end_says_which_prefixes_are_shared(block_size, caching, says):
    """Case 11."""
    config = make_config(tiny_llama(), block_size=block_size, enable_prefix_caching=caching)
    facts = facts_of(config, "m", {})
    assert says in facts.prefixes
    assert facts.block_size == block_size
