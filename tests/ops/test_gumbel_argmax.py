from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.gumbel_argmax import gumbel_argmax, reference


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(logits, seeds, positions, token_ids=None, temperature=None):
    num_rows = len(logits)
    out_ids = torch.full((num_rows,), -7, dtype=torch.int32)
    out_max = torch.full((num_rows,), -7.0)
    gumbel_argmax(
        logits,
        token_ids,
        torch.ones(num_rows) if temperature is None else temperature,
        torch.as_tensor(seeds, dtype=torch.int64),
        torch.as_tensor(positions, dtype=torch.int32),
        out_ids,
        out_max,
    )
    return out_ids, out_max


def mix(x):
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def oracle_bits(seed, position, token):
    """The contract's formulas on Python integers."""
    mask = 0xFFFFFFFF
    low, high = seed & mask, seed >> 32 & mask
    key0 = (mix((low + position * 0x9E3779B1) & mask) + high) & mask
    key1 = (mix(((high ^ 0x85EBCA6B) + position * 0x9E3779B1) & mask) + low) & mask
    key0, key1 = mix(key0), mix(key1)
    x = (token * 0x9E3779B1 + key0) & mask
    x ^= x >> 16
    x = (x * 0x85EBCA6B + key1) & mask
    x ^= x >> 13
    x = x * 0xC2B2AE35 & mask
    return x ^ x >> 16


def test_bits_are_those_of_the_contract():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]
    positions = [0, 1, 7, 4095, 2**31 - 1, 131072]
    tokens = [0, 1, 2, 49151, 151935, 2**31 - 1]
    keys = reference.row_keys(torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32))
    bits = reference.token_bits(torch.tensor([tokens], dtype=torch.int32), *keys)
    for row, (seed, position) in enumerate(zip(seeds, positions)):
        expected = [oracle_bits(seed, position, token) for token in tokens]
        assert (bits[row].numpy().view(np.uint32) == expected).all()


def test_noise_is_finite_for_the_extremes_and_right_between():
    """Case 20: draws of exactly 0 and 1."""
    values = np.array(
        [0, 1, 2, 2**30, 2**31 - 129, 2**31 - 1, -1, -(2**31), -(2**31) + 1], np.int32
    )
    noise = reference.gumbel_noise(torch.from_numpy(values.copy())).numpy()
    assert np.isfinite(noise).all()
    masked = (values & 0x7FFFFFFF).astype(np.float32)
    w = ((masked + np.float32(0.5)) * np.float32(2.0**-31)).astype(np.float64)
    w = np.minimum(w, 1 - 2.0**-24)
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-w)), rtol=2e-5)
    assert noise.max() > 22
    assert noise.min() > -2.83


@pytest.mark.parametrize("extreme", [0, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("vocab", [8193, 10000, 151936])
def test_only_legal_token_wins_under_extreme_noise(vocab, extreme, monkeypatch):
    """Case 20: -inf + noise must not become NaN or beat the one legal token."""
    monkeypatch.setattr(
        reference,
        "token_bits",
        lambda ids, key0, key1: torch.full((len(key0), ids.shape[1]), extreme, dtype=torch.int32),
    )
    for legal in (0, 5, 8191, vocab - 1):
        logits = torch.full((2, vocab), -torch.inf)
        logits[:, legal] = -3.0
        out_ids, out_max = draw(logits, [1, 2], [3, 4])
        assert out_ids.tolist() == [legal, legal]
        assert out_max.isfinite().all()


@pytest.mark.parametrize("vocab", [1, 2, 511, 1024, 1025, 8193, 151936])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_id_stays_in_the_vocabulary(vocab, bad):
    """Case 20: ids are legal whatever the logits are."""
    for columns in (slice(None), slice(0, 1), slice(vocab - 1, vocab)):
        logits = torch.zeros(1, vocab)
        logits[:, columns] = bad
        out_ids, _ = draw(logits, [9], [1])
        assert 0 <= out_ids.item() < vocab
        some = torch.arange(vocab, dtype=torch.int32)[None, -3:]
        out_ids, _ = draw(logits[:, -3:].contiguous(), [9], [1], some)
        assert out_ids.item() in some


def test_temperature_zero_has_no_noise():
    logits = torch.randn(8, 1000)
    temperature = torch.tensor([0.0, 1.0] * 4)
    out_ids, out_max = draw(logits, range(8), range(8), temperature=temperature)
    assert (out_ids[::2] == logits[::2].argmax(-1)).all()
    assert (out_max[::2] == logits[::2].amax(-1)).all()
    assert (out_max[1::2] != logits[1::2].amax(-1)).any()


def test_candidates_give_the_token_of_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(0)
    vocab, num_rows = 49152, 40
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    values, ids = logits.topk(100)
    kept = torch.full_like(logits, -torch.inf).scatter(1, ids, values)
    seeds, positions = range(100, 100 + num_rows), range(num_rows)
    full = draw(kept, seeds, positions)
    shuffle = torch.randperm(100, generator=generator)
    few = draw(values[:, shuffle], seeds, positions, ids[:, shuffle].to(torch.int32))
    assert (full[0] == few[0]).all()
    assert (full[1] == few[1]).all()
    assert (full[0] != logits.argmax(-1)).any()


def test_equal_candidates_give_the_lowest_id(monkeypatch):
    monkeypatch.setattr(
        reference,
        "token_bits",
        lambda ids, key0, key1: torch.zeros(len(key0), ids.shape[1], dtype=torch.int32),
    )
    token_ids = torch.tensor([[9, 4, 11]], dtype=torch.int32)
    assert draw(torch.zeros(1, 3), [0], [0], token_ids)[0].item() == 4


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_draws_follow_softmax(axis):
    """Chi-square over many seeds at one position, and over many positions of one seed."""
    num_draws, vocab = 40_000, 12
    logits = torch.linspace(-3, 2, vocab)
    varying = torch.arange(num_draws)
    fixed = torch.full((num_draws,), 17)
    seeds, positions = (varying, fixed) if axis == "seed" else (fixed, varying)
    out_ids, _ = draw(logits.expand(num_draws, -1).contiguous(), seeds, positions)
    counts = np.bincount(out_ids.numpy(), minlength=vocab)
    expected = torch.softmax(logits.double(), 0).numpy() * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # 11 degrees of freedom: p = 0.001


def test_neighbouring_draws_are_independent():
    """Seed s at position p + 1 must not repeat seed s + 1 at position p, nor its own last draw."""
    num, vocab = 6000, 16
    logits = torch.zeros(num, vocab)
    base = draw(logits, range(num), [5] * num)[0]
    for seeds, positions in (
        (range(num), [6] * num),
        (range(1, num + 1), [4] * num),
        (range(1, num + 1), [5] * num),
        ([s << 32 for s in range(num)], [5] * num),
    ):
        other = draw(logits, seeds, positions)[0]
        same = (base == other).float().mean().item()
        assert abs(same - 1 / vocab) < 4.5 * (1 / vocab / num) ** 0.5


def test_tail_of_a_large_vocabulary():
    """A quarter million tokens that share 5 % of the probability are drawn at that rate."""
    vocab, num_draws = 262144, 300
    rest = 0.05
    logits = torch.full((1, vocab), float(np.log(rest / (vocab - 1) / (1 - rest))))
    logits[0, 0] = 0.0
    hits = 0
    for first in range(0, num_draws, 10):
        ids = range(first, first + 10)
        hits += int((draw(logits.expand(10, -1), ids, ids)[0] != 0).sum())
    mean = num_draws * rest
    assert abs(hits - mean) < 3.5 * mean**0.5
