from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.batch.staged import Staging
from pelton.config.params import SamplingParams
from pelton.core.plan import NewRow, SlotRef
from pelton.device.cpu import CPUDevice
from pelton.errors import RequestError
from pelton.sampling.rows import MAX_STOP_IDS, Need, SamplingRows


def make(vocab=500):
    staging = Staging(CPUDevice(), depth=1)
    rows = SamplingRows(staging, num_rows=3, vocab_size=vocab, max_logprobs=20)
    staging.allocate()
    return staging, rows


def new_row(params, **fields):
    return NewRow(
        ref=SlotRef(1, 0),
        request_id="r",
        token_ids=np.zeros(4, np.int32),
        num_computed_tokens=0,
        block_ids=(),
        params=params,
        **{"prompt_len": 4, "seed": 0, "eos_token_ids": (2,), **fields},
    )


def test_every_field_is_staged():
    staging, rows = make()
    params = SamplingParams(
        temperature=0.5, top_p=0.9, min_p=0.1, top_k=30, min_tokens=5, stop_token_ids=[7, 2]
    )
    rows.add_request(new_row(params, seed=-(2**63)))
    staging.flush(staging.begin())
    assert rows.temperature.tensor[1].item() == 0.5
    assert rows.top_p.tensor[1].item() == np.float32(0.9)
    assert rows.min_p.tensor[1].item() == np.float32(0.1)
    assert rows.top_k.tensor[1].item() == 30
    assert rows.seed.tensor[1].item() == -(2**63)
    assert rows.min_len.tensor[1].item() == 9
    assert rows.stop_ids.tensor[1].tolist() == [2, 7] + [-1] * (MAX_STOP_IDS - 2)
    assert not rows.temperature.tensor[[0, 2]].any()
    assert Need(int(rows.needs_np[1])) == (
        Need.RANDOM | Need.MIN_TOKENS | Need.MIN_P | Need.TOP_K | Need.TOP_P
    )


@pytest.mark.parametrize(
    ("params", "eos", "field", "words"),
    [
        ({"stop_token_ids": [999999], "min_tokens": 1}, (2,), "stop_token_ids", "500"),
        ({"stop_token_ids": [500]}, (2,), "stop_token_ids", "500"),
        ({"stop_token_ids": list(range(128)), "min_tokens": 1}, (400,), "stop_token_ids", "128"),
        ({"logprobs": 10**6}, (2,), "logprobs", "20"),
        ({"logprobs": 21}, (2,), "logprobs", "20"),
    ],
)
def test_impossible_requests_are_refused_whole(params, eos, field, words):
    """Case 26: named field and limit, and nothing staged."""
    staging, rows = make()
    with pytest.raises(RequestError, match=words) as caught:
        rows.add_request(new_row(SamplingParams(**params), eos_token_ids=eos))
    assert caught.value.field == field
    assert staging.num_writes == 0
    assert rows.needs_np[1] == 0


def test_as_many_end_tokens_as_fit():
    staging, rows = make()
    params = SamplingParams(stop_token_ids=list(range(128)), min_tokens=1)
    rows.add_request(new_row(params))
    staging.flush(staging.begin())
    assert torch.equal(rows.stop_ids.tensor[1], torch.arange(128, dtype=torch.int32))
    rows.add_request(new_row(SamplingParams(stop_token_ids=list(range(300)))))


def test_logprobs_above_a_small_vocabulary_are_refused():
    """Case 26: more alternatives than tokens."""
    _, rows = make(vocab=10)
    rows.add_request(new_row(SamplingParams(logprobs=10)))
    with pytest.raises(RequestError, match="at most 10"):
        rows.add_request(new_row(SamplingParams(logprobs=11)))
