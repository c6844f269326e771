from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sampling import NUM_SLOTS, POISON, VOCAB, Bench, GivenLogits

from pelton.config.params import SamplingParams
from pelton.core.plan import ALL_MASKED, NAN_LOGITS, OK
from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice
from pelton.ops.gumbel_argmax import reference as gumbel

TILES = [None, 1, 4 * VOCAB]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def oracle(logits, position, seed, params, end_ids=()):
    """One row in float64 on NumPy; only the noise, which has tests of its own, is ours."""
    x = logits.double().numpy().copy()
    if position + 1 < 4 + params.min_tokens:
        x[list(end_ids)] = -np.inf
    if params.temperature == 0:
        return int(np.argmax(x))
    x = x / float(np.float32(params.temperature))
    if params.min_p > 0:
        x[np.exp(x - x.max()) < float(np.float32(params.min_p))] = -np.inf
    order = np.lexsort((np.arange(len(x)), -x))
    if params.top_k > 0:
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        weights = np.exp(x[order] - x.max())
        before = np.cumsum(weights) - weights
        x[order[1:][before[1:] >= float(np.float32(params.top_p)) * weights.sum()]] = -np.inf
    keys = gumbel.row_keys(torch.tensor([seed]), torch.tensor([position + 1], dtype=torch.int32))
    ids = torch.arange(len(x), dtype=torch.int32)[None]
    return int(
        np.argmax(x + gumbel.gumbel_noise(gumbel.token_bits(ids, *keys))[0].double().numpy())
    )


MIX = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "min_p": 0.02},
    {"top_k": 20},
    {"top_p": 0.6},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": (3, 4)},
    {"temperature": 1.5, "min_tokens": 30, "top_k": 5},
    {"temperature": 0.0, "top_k": 7, "top_p": 0.1, "min_p": 0.9},
    {"temperature": 2.0, "top_k": 1030, "top_p": 0.999},
    {"top_k": 10**6},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile_elements", TILES)
def test_all_stages_against_the_oracle(tile_elements, dtype):
    bench = Bench(FakeDevice(), tile_elements=tile_elements)
    slots = [(7 * i) % NUM_SLOTS for i in range(60)]
    positions = [3 + i for i in range(60)]
    logits = (torch.randn(60, VOCAB) * 3).to(dtype)
    logits[:, 2] += 9  # the end token is likely
    for i, slot in enumerate(slots):
        bench.add(slot, seed=i * 10**15, **MIX[i % len(MIX)])
    tokens, status = bench.run(logits, slots, positions)
    expected = [
        oracle(
            logits[i].float(),
            positions[i],
            i * 10**15,
            SamplingParams(**{"max_tokens": 1000, **MIX[i % len(MIX)]}),
            {2, *MIX[i % len(MIX)].get("stop_token_ids", ())},
        )
        for i in range(60)
    ]
    assert tokens == expected
    assert status == [OK] * 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_elements", TILES)
def test_same_tokens_alone_in_a_batch_and_in_other_order(tile_elements, dtype):
    """Seeded rows do not depend on neighbours, greedy or not, nor on their place or slot."""
    logits = (torch.randn(64, VOCAB) * 3).to(dtype)
    bench = Bench(tile_elements=tile_elements)
    for slot in range(64):
        bench.add(slot, seed=slot, logprobs=3 if slot % 3 else None, **MIX[slot % len(MIX)])
    slots, positions = list(range(64)), [10 + slot for slot in range(64)]
    batch, _ = bench.run(logits, slots, positions)
    batch_out = bench.host
    order = torch.randperm(64).tolist()
    shuffled, _ = bench.run(logits[order], [slots[i] for i in order], [positions[i] for i in order])
    assert shuffled == [batch[i] for i in order]
    for row in range(64):
        alone = Bench(tile_elements=tile_elements)
        slot = 99 - row
        alone.add(slot, seed=row, logprobs=3 if row % 3 else None, **MIX[row % len(MIX)])
        assert alone.run(logits[row : row + 1], [slot], [positions[row]])[0] == [batch[row]]
        if row % 3:
            for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs"):
                mine, theirs = getattr(alone.host, name)[0], getattr(batch_out, name)[row]
                assert torch.equal(mine, theirs), name


def test_two_rows_of_one_slot_have_noise_of_their_own():
    """1 + K verification rows: same logits, same slot, other positions."""
    bench = Bench()
    bench.add(5, seed=1)
    logits = torch.zeros(8, VOCAB)
    tokens, _ = bench.run(logits, [5] * 8, list(range(3, 11)))
    assert len(set(tokens)) > 5
    assert bench.run(logits[:1], [5], [7])[0] == [tokens[4]]


def test_min_tokens_ends_at_the_right_position():
    """prompt of 4, min_tokens 2: indices 4 and 5 may not be an end token, index 6 may."""
    bench = Bench()
    bench.add(0, temperature=0.0, min_tokens=2, stop_token_ids=[9])
    logits = torch.zeros(4, VOCAB)
    logits[:, 2], logits[:, 9], logits[:, 20] = 3.0, 2.0, 1.0
    assert bench.run(logits, [0] * 4, [3, 4, 5, 6])[0] == [20, 20, 2, 2]
    bench.run(logits[:1], [0], [5])
    assert bench.plan.is_plain


def test_a_reused_slot_leaks_nothing():
    logits = torch.randn(1, VOCAB) * 3
    logits[0, 2] = 20.0
    used, fresh = Bench(), Bench()
    used.add(
        3,
        seed=77,
        temperature=1.9,
        top_k=3,
        top_p=0.2,
        min_p=0.5,
        min_tokens=50,
        stop_token_ids=list(range(100)),
        logprobs=5,
    )
    used.run(logits, [3], [4])
    for params in ({}, {"temperature": 0.0}, {"min_tokens": 40, "max_tokens": 50}):
        for bench in (used, fresh):
            bench.add(3, seed=-5, **params)
        for position in range(3, 30):
            assert used.run(logits, [3], [position]) == fresh.run(logits, [3], [position])
            assert used.plan == fresh.plan
    for name in ("temperature", "top_p", "min_p", "top_k", "seed", "min_len", "stop_ids"):
        mine, theirs = (getattr(bench.rows, name).tensor[3] for bench in (used, fresh))
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("vocab", [2, 513, 8193, 10000, 151936])
@pytest.mark.parametrize("tile_elements", [None, 1])
def test_broken_rows_are_told_and_neighbours_unchanged(tile_elements, vocab):
    """Case 19 (NaN, +inf) and case 20 (ids in the vocabulary, all-masked rows), for all stages."""
    bench = Bench(vocab=vocab, tile_elements=tile_elements)
    for slot in range(len(MIX) * 4):
        params = {**MIX[slot // 4]}
        if "stop_token_ids" in params and vocab < 5:
            del params["stop_token_ids"]
        bench.add(slot, seed=slot, eos=(0,), **params)
    num_rows = len(MIX) * 4
    logits = torch.randn(num_rows, vocab)
    slots, positions = list(range(num_rows)), [8] * num_rows
    good, _ = bench.run(logits, slots, positions)
    logits[1::4, vocab - 1] = torch.nan
    logits[2::4, vocab // 2] = torch.inf
    logits[3::4] = -torch.inf
    tokens, status = bench.run(logits, slots, positions)
    assert status == [OK, NAN_LOGITS, NAN_LOGITS, ALL_MASKED] * len(MIX)
    assert tokens[::4] == good[::4]
    assert all(0 <= token < vocab for token in tokens)


def test_nan_behind_a_mask_is_seen():
    """Case 19: min_tokens must not hide that the model's output is broken."""
    bench = Bench()
    bench.add(0, temperature=0.0, min_tokens=9)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = torch.nan
    assert bench.run(logits, [0], [4])[1] == [NAN_LOGITS]


@pytest.mark.parametrize("vocab", [8193, 10000, 151936])
@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_the_only_legal_token_is_drawn(vocab, params):
    """Case 20."""
    bench = Bench(vocab=vocab)
    bench.add(0, **params)
    logits = torch.full((1, vocab), -torch.inf)
    for legal in (0, 4000, vocab - 1):
        logits[0, legal] = -5.0
        assert bench.run(logits, [0], [9]) == ([legal], [OK])
        logits[0, legal] = -torch.inf


def test_draws_follow_softmax_through_the_sampler():
    bench = Bench()
    bench.add(0, seed=12, temperature=2.0, top_k=8)
    logits = torch.full((1, VOCAB), -4.0)
    logits[0, :10] = torch.arange(10).float()
    counts = np.zeros(VOCAB)
    for start in range(0, 20_000, 1000):
        tokens, _ = Bench.run(
            bench, logits.expand(100, -1), [0] * 100, list(range(start, start + 100))
        )
        counts += np.bincount(tokens, minlength=VOCAB)
    expected = np.exp(np.arange(2, 10) / 2)
    expected *= counts.sum() / expected.sum()
    assert counts[2:10].sum() == counts.sum() == 2000
    assert ((counts[2:10] - expected) ** 2 / expected).sum() < 24.3  # 7 degrees: p = 0.001


def test_logprobs_are_raw_and_only_of_rows_that_ask():
    """Case 17: values before temperature and top-k; n distinct, the sampled token apart."""
    bench = Bench()
    logits = torch.randn(4, VOCAB) * 3
    logits[:, 2] = 30.0
    bench.add(0, temperature=0.0, logprobs=1)
    bench.add(1)
    bench.add(2, temperature=2.0, top_k=3, logprobs=5)
    bench.add(3, temperature=0.0, min_tokens=50, logprobs=0)
    tokens, _ = bench.run(logits, [0, 1, 2, 3], [5] * 4)
    exact = logits.double().log_softmax(-1)
    out = bench.host
    for row in (0, 2, 3):
        assert out.token_logprobs[row].item() == pytest.approx(
            exact[row, tokens[row]].item(), abs=1e-5
        )
        assert out.ranks[row] == 1 + (exact[row] > exact[row, tokens[row]]).sum()
        assert out.top_ids[row, :5].tolist() == exact[row].topk(5).indices.tolist()
        assert (out.top_ids[row, 5:] == POISON).all()
    assert out.ranks[3] == 2
    assert out.ranks[1] == POISON


def test_work_follows_need():
    """A greedy batch is plain; beside others its rows are one span without needs."""
    bench = Bench(tile_elements=2 * VOCAB)
    for slot in range(6):
        bench.add(slot, temperature=0.0)
    bench.add(6, top_k=5)
    bench.add(7, top_k=9)
    bench.add(8, top_k=7)
    plan = bench.sampler.plan(np.arange(6, dtype=np.int32), np.full(6, 9, np.int32))
    assert plan.is_plain
    assert plan.spans == ()
    assert plan.logprob_spans == ()
    plan = bench.sampler.plan(np.arange(9, dtype=np.int32), np.full(9, 9, np.int32))
    assert [(s.start, s.stop) for s in plan.spans] == [(0, 6), (6, 8), (8, 9)]
    assert [s.num_candidates for s in plan.spans] == [1, 9, 7]
    assert [int(s.needs) for s in plan.spans[:1]] == [0]
    assert not plan.is_plain
    assert bench.sampler.plan(np.zeros(0, np.int32), np.zeros(0, np.int32)).spans == ()


class MetaDevice(CPUDevice):
    """Tensors without values: any read of one, or shape that depends on one, raises."""

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("tile_elements", TILES)
def test_run_reads_no_device_value(tile_elements):
    bench = Bench(MetaDevice(), tile_elements=tile_elements)
    for slot in range(len(MIX)):
        bench.add(slot, logprobs=2, **MIX[slot])
    num_rows = len(MIX)
    bench.sampler.run(
        bench.sampler.plan(np.arange(num_rows, dtype=np.int32), np.full(num_rows, 9, np.int32)),
        GivenLogits(torch.empty(num_rows, VOCAB, device="meta")),
        torch.empty(num_rows, dtype=torch.int64, device="meta"),
        torch.empty(num_rows, dtype=torch.int32, device="meta"),
        bench.out,
    )
