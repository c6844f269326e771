"""Orders that are told as bytes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pelton.core.plan import SlotRef, StepPlan
from pelton.worker.orders import Step


@pytest.mark.parametrize(
    "refs", [[], [SlotRef(3, 1)], [SlotRef(i, 2**31 - 1 - i) for i in range(9)]]
)
def test_a_plan_comes_as_it_went(refs):
    n = len(refs)
    plan = StepPlan(
        step=7,
        refs=refs,
        num_scheduled_tokens=np.arange(1, n + 1, dtype=np.int32),
        num_drafts=np.zeros(n, np.int32),
        num_computed_bound=np.zeros(n, np.int32),
        samples=np.ones(n, np.bool_),
        finished=[SlotRef(4, 2)],
    )
    told = pickle.loads(pickle.dumps(Step.of(plan))).whole_plan()
    assert told.refs == plan.refs == refs
    assert all(isinstance(ref, SlotRef) for ref in told.refs)
    assert told.finished == plan.finished
    assert np.array_equal(told.num_scheduled_tokens, plan.num_scheduled_tokens)
