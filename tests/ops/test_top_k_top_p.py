from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.top_k_top_p import top_k_top_p
from pelton.ops.top_k_top_p.reference import ordered_top_k


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def run(logits, top_k, top_p, num_candidates):
    shape = (len(logits), num_candidates)
    values = torch.full(shape, -7.0)
    ids = torch.full(shape, -7, dtype=torch.int32)
    top_k = torch.as_tensor(top_k, dtype=torch.int32)
    top_k_top_p(logits, top_k, torch.as_tensor(top_p, dtype=torch.float32), values, ids)
    return values, ids


def oracle(row, k, p):
    """Kept token ids in order, in float64."""
    row = row.double().numpy()
    order = np.lexsort((np.arange(len(row)), -row))[: max(1, k)]
    weights = np.exp(row[order] - row[order[0]])
    p = float(np.float32(p))
    if p < 1:
        before = np.cumsum(weights) - weights
        order = order[(before < p * weights.sum()) | (np.arange(len(order)) == 0)]
    return order.tolist()


def kept(values, ids, row):
    return ids[row][values[row] > -torch.inf].tolist()


@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 1000, 8193, 49152])
@pytest.mark.parametrize("seed", range(3))
def test_against_float64(vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, vocab, generator=generator) * 4
    top_k = [1, 2, 20, 50, 1000, vocab, vocab + 5, 50, 50, vocab, vocab, 3]
    top_p = [1.0, 0.5, 0.9, 1.0, 0.95, 0.9, 0.99, 1e-6, 0.123, 0.5, 1.0, 0.7]
    for few in (True, False):
        rows = [r for r in range(12) if not few or top_k[r] <= 50]
        width = min(vocab, max(top_k[r] for r in rows))
        values, ids = run(logits[rows], [top_k[r] for r in rows], [top_p[r] for r in rows], width)
        for place, row in enumerate(rows):
            assert kept(values, ids, place) == oracle(logits[row], top_k[row], top_p[row])
            assert values[place].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 5, 64, 1000, 8193])
def test_ties_go_to_the_lowest_ids(dtype, k):
    """Exactly k are kept, the same ones alone and in a batch."""
    logits = torch.randn(9, 8193).mul(2).round().to(dtype).float()
    logits[3] = 1.0
    logits[4, ::2] = -0.0
    logits[4, 1::2] = 0.0
    values, ids = run(logits, [k] * 9, [1.0] * 9, k)
    for row in range(9):
        assert kept(values, ids, row) == oracle(logits[row], k, 1.0)
        alone = run(logits[row : row + 1], [k], [1.0], k)
        assert (alone[1][0] == ids[row]).all()
    assert ids[3].tolist() == list(range(k))
    assert ids[4].tolist() == list(range(k))


def test_uniform_top_p_keeps_the_smallest_set():
    values, ids = run(torch.zeros(1, 1000), [1000], [0.25], 1000)
    assert kept(values, ids, 0) == list(range(250))


@pytest.mark.parametrize("num_rows", [2, 17, 64])
def test_a_row_is_bitwise_the_same_alone_and_for_every_width(num_rows):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(num_rows, 10000, generator=generator) * 2
    top_k = [40] * num_rows
    top_p = torch.linspace(0.01, 1, num_rows).tolist()
    values, ids = run(logits, top_k, top_p, 40)
    for width in (41, 700, 10000):
        wide_values, wide_ids = run(logits, top_k, top_p, width)
        assert (wide_values[:, :40] == values).all()
        assert (wide_ids[:, :40] == ids).all()
        assert (wide_values[:, 40:] == -torch.inf).all()
    for row in range(num_rows):
        alone = run(logits[row : row + 1], [40], top_p[row : row + 1], 40)
        assert (alone[0][0] == values[row]).all()
        assert (alone[1][0] == ids[row]).all()


@pytest.mark.parametrize("vocab", [5, 8193, 10000])
@pytest.mark.parametrize("bad", [float("nan"), float("-nan"), float("inf"), float("-inf")])
def test_ids_stay_in_the_vocabulary(vocab, bad):
    """Case 20. A NaN with its sign set would sort behind the padding of the last tile."""
    logits = torch.full((2, vocab), bad)
    if np.isnan(bad):
        logits.view(torch.int32)[1] = -1  # NaN with the sign bit
    for width in (1, 4, vocab):
        _, ids = run(logits, [width] * 2, [0.5] * 2, width)
        assert ((ids >= 0) & (ids < vocab)).all()


@pytest.mark.parametrize("vocab", [16, 17, 1023, 4097, 49152])
def test_ordered_top_k_takes_both_ways(vocab):
    values = torch.randn(4, vocab).mul(8).round()
    values[:, 1] = -torch.inf
    for k in {1, 2, min(vocab, 20), min(vocab, 300), vocab - 1, vocab}:
        top, ids = ordered_top_k(values, k)
        order = np.lexsort((np.tile(np.arange(vocab), (4, 1)), -values.numpy()))[:, :k]
        assert (ids.numpy() == order).all()
        assert (top == values.gather(1, ids)).all()
