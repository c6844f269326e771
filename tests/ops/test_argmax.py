from __future__ import annotations

import pytest
import torch

from pelton.ops.argmax import argmax


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def run(logits):
    out_ids = torch.full((len(logits),), -7, dtype=torch.int32)
    out_max = torch.full((len(logits),), -7.0)
    argmax(logits, out_ids, out_max)
    return out_ids, out_max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 1023, 1024, 1025, 8193, 10000, 49152, 151936])
def test_lowest_id_of_the_largest_value(vocab, dtype):
    logits = (torch.randn(5, vocab) * 2).round().to(dtype)  # many ties
    out_ids, out_max = run(logits)
    for row, (token, best) in enumerate(zip(out_ids.tolist(), out_max)):
        assert best == logits[row].max().float()
        assert token == (logits[row] == logits[row].max()).nonzero()[0].item()


@pytest.mark.parametrize("vocab", [1, 700, 1024, 1025, 8193])
def test_nan_and_infinities(vocab):
    """Case 19: NaN anywhere is seen; case 20: ids stay legal."""
    for place in {0, vocab // 2, vocab - 1}:
        logits = torch.zeros(3, vocab)
        logits[0, place] = torch.nan
        logits[1, place] = torch.inf
        logits[2] = -torch.inf
        out_ids, out_max = run(logits)
        assert out_max[0].isnan()
        assert out_max[1:].tolist() == [torch.inf, -torch.inf]
        assert out_ids.tolist() == [place, place, 0]


def test_last_column_wins_only_when_larger():
    logits = torch.zeros(2, 1025)
    logits[0, 3] = logits[0, 1024] = 1.0
    logits[1, 3], logits[1, 1024] = 1.0, 2.0
    assert run(logits)[0].tolist() == [3, 1024]
