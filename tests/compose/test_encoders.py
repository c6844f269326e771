"""The invariance list for texts that are computed whole: company, padding, preemption, depth,
devices; compared with the text alone. With batch_invariant the bits are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.encoders import both_ways, pooled, texts_of, tiny_encoder
from support.tiny import TinyEngine

from pelton.config.pooling import PoolingParams
from pelton.core.descriptor import Descriptor

FAMILIES = {
    "bert": lambda: tiny_encoder("Bert"),
    "modernbert": lambda: tiny_encoder("ModernBert", local_attention=12),
    "llama": lambda: both_ways("Llama"),
}
TASKS = [
    PoolingParams(task="token_embed", use_activation=False),
    PoolingParams(task="embed", method="mean"),
    PoolingParams(task="embed", method="cls", dimensions=7),
]
LENGTHS = [1, 30, 2, 90, 16, 64, 7, 128]


def padded(live: Descriptor) -> Descriptor:
    """A row and some tokens more than there are, where there is room."""
    return replace(
        live,
        num_rows=min(live.num_rows + 1, 4),
        num_tokens=min(live.num_tokens + 3, 128),
        uniform_query_len=0,
    )


def alone(folder, texts, params, **changes):
    engine = TinyEngine(folder, runner="auto", **changes)
    return [pooled(engine, [text], params)[0] for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_exact", [False, True], ids=["kernels", "invariant"])
def test_invariance(family, is_exact):
    folder, texts = FAMILIES[family](), texts_of(LENGTHS)
    changes = {"batch_invariant": True, "attention_backend": "invariant"} if is_exact else {}
    for params in TASKS:
        expected = alone(folder, texts, params, **changes)

        def check(engine, texts=texts, params=params, expected=expected):
            found = pooled(engine, texts, params)
            for one, right in zip(found, expected, strict=True):
                if is_exact:
                    np.testing.assert_array_equal(one, right)
                else:
                    np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)

        check(TinyEngine(folder, runner="auto", **changes))
        check(TinyEngine(folder, runner="auto", max_num_seqs=1, **changes))
        check(TinyEngine(folder, runner="auto", choose=padded, **changes))
        for depth in (1, 3):
            check(
                TinyEngine(
                    folder, runner="auto", device="fake", max_steps_in_flight=depth, **changes
                )
            )


def test_texts_are_scheduled_whole_and_preempted_ones_again():
    folder, texts = FAMILIES["bert"](), texts_of([70, 70, 20])
    engine = TinyEngine(folder, runner="auto", device="fake", max_steps_in_flight=2)
    params = TASKS[0]
    names = [engine.add(text, params) for text in texts]
    plans = []
    schedule = engine.loop.scheduler.schedule

    def watched():
        plan = schedule()
        if plan is not None:
            plans.append(plan.num_scheduled_tokens.tolist())
        return plan

    engine.loop.scheduler.schedule = watched
    outcomes = engine.run()
    assert sorted(plans[0]) == [70]  # 140 tokens are too many for a step of 128
    assert sorted(plans[1]) == [20, 70]
    expected = alone(folder, texts, params)
    for name, right in zip(names, expected, strict=True):
        np.testing.assert_allclose(outcomes[name].pooled, right, rtol=1e-5, atol=1e-5)
