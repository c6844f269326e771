from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.min_p import min_p


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("vocab", [1, 2, 255, 8193, 49152])
def test_against_float64(vocab):
    logits = torch.randn(7, vocab) * 5
    logits[3, 1 : vocab // 2] = -torch.inf
    threshold = torch.tensor([0.0, 1e-6, 0.02, 0.3, 0.9, 1.0, 0.5])
    expected = logits.double().numpy()
    probability = np.exp(expected - expected.max(-1, keepdims=True))
    expected[probability < threshold.double().numpy()[:, None]] = -np.inf
    min_p(logits, threshold)
    assert (logits.numpy() == expected.astype(np.float32)).all()


def test_the_best_token_stays_and_rows_are_independent():
    logits = torch.randn(64, 1000)
    batch = logits.clone()
    min_p(batch, torch.ones(64))
    assert ((batch > -torch.inf).sum(-1) == 1).all()
    assert (batch.argmax(-1) == logits.argmax(-1)).all()
    for row in (0, 63):
        alone = logits[row : row + 1].clone()
        min_p(alone, torch.ones(1))
        assert (alone[0] == batch[row]).all()
