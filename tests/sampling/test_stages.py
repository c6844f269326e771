"""The stages that edit logits: biases, allowed tokens, penalties, bad words, processors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sampling import MAX_LEN, NUM_SLOTS, VOCAB, Bench, edited

from pelton.config.params import SamplingParams
from pelton.core.plan import ALL_MASKED, OK, PROCESSOR_FAILED
from pelton.device.fake import FakeDevice
from pelton.errors import RequestError
from pelton.sampling import sampler as sampler_module
from pelton.sampling import table
from pelton.sampling.sampler import STAGES

EOS = 2


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    torch.manual_seed(0)
    for name in ("halve_and_shift", "ban_best", "ban_seen", "fail", "answer"):
        monkeypatch.setitem(table.PROCESSORS, name, f"support.processors:{name}")
    monkeypatch.setitem(table.PROCESSORS, "no_module", "no.such.module:f")


FEW = tuple(range(0, VOCAB, 7))
OPTIONS = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.1},
    {"presence_penalty": -1.7},
    {"presence_penalty": 0.8, "frequency_penalty": -0.4, "repetition_penalty": 1.2},
    {"logit_bias": {5: 9.5, VOCAB - 1: -100.0, 17: 0.25}},
    {"logit_bias": {i: (i % 13) - 6.0 for i in range(0, VOCAB, 3)}},
    {"allowed_token_ids": [VOCAB - 1, 3, 700]},
    {"allowed_token_ids": FEW, "logit_bias": {FEW[3]: 4.0, 1: 90.0}},
    {"bad_words_token_ids": ((3, 8), (9,), (8, 3, 8), (4, 5, 6, 7, 8))},
    {"bad_words_token_ids": ((1000,),), "min_tokens": 40},
    {"logits_processors": {"halve_and_shift": {"shift": 0.01}, "ban_best": {}}},
    {"logits_processors": ["ban_seen"], "frequency_penalty": 0.5},
    {
        "allowed_token_ids": FEW,
        "logit_bias": {14: 3.0, 21: -2.0},
        "min_tokens": 40,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "bad_words_token_ids": ((3, 14), (28,)),
        "logits_processors": {"ban_best": {}},
    },
]


def full(options, **more):
    return SamplingParams(**{"max_tokens": 1000, **options, **more})


def histories(count, seed=3):
    """Prompt and output from few tokens, so that they repeat and form bad words."""
    rng = np.random.default_rng(seed)
    return [
        (rng.choice([2, 3, 4, 5, 6, 7, 8, 9, 14, 1030], rng.integers(5, 40)).tolist(), 4)
        for _ in range(count)
    ]


class Watched(Bench):
    """Keeps the scores as the temperature finds them, per verification row."""

    def run(self, logits, slots, positions):
        self.scores = torch.full((len(slots), logits.shape[1]), torch.nan)

        def watch(tile):
            self.scores[tile.span.start : tile.span.stop] = tile.scores

        stages = list(STAGES)
        at = [stage.__name__ for _, stage in stages].index("temperature")
        stages.insert(at, (sampler_module.ANY, watch))
        kept, sampler_module.STAGES = sampler_module.STAGES, tuple(stages)
        try:
            return super().run(logits, slots, positions)
        finally:
            sampler_module.STAGES = kept


@pytest.mark.parametrize("tile_elements", [None, 1, 4 * VOCAB])
def test_every_option_against_the_oracle(tile_elements):
    bench = Watched(FakeDevice(), tile_elements=tile_elements)
    rows = [(options, *history) for options, history in zip(OPTIONS * 4, histories(60))]
    logits = torch.randn(len(rows), VOCAB) * 3
    logits[:, :10] += 6
    for slot, (options, tokens, prompt_len) in enumerate(rows):
        bench.add(slot, tokens=tokens, prompt_len=prompt_len, temperature=0.0, **options)
    positions = [len(tokens) - 1 for _, tokens, _ in rows]
    drawn, status = bench.run(logits, list(range(len(rows))), positions)
    assert status == [OK] * len(rows)
    for row, (options, tokens, prompt_len) in enumerate(rows):
        expected = edited(logits[row], tokens, prompt_len, full(options))
        if not bench.scores[row].isnan().any():  # a row without needs meets no stage
            np.testing.assert_allclose(bench.scores[row].numpy(), expected, rtol=2e-6, atol=2e-5)
        else:
            assert not options
        assert drawn[row] == int(np.argmax(expected)), options


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_verification_rows_count_the_drafts_before_them(options):
    """1 + K rows of one request: row i has drafts 0..i - 1 in its output."""
    drafts = [3, 8, 3]
    bench = Watched(FakeDevice(), num_drafts=3)
    tokens, prompt_len = [3, 4, 5, 9, 8, 3], 4
    bench.add(7, tokens=tokens, prompt_len=prompt_len, temperature=0.0, **options)
    bench.draft(7, drafts)
    logits = (torch.randn(1, VOCAB) * 3).repeat(4, 1)
    logits[:, :10] += 6
    bench.run(logits, [7] * 4, [5, 6, 7, 8])
    for row in range(4):
        expected = edited(logits[row], tokens + drafts[:row], prompt_len, full(options))
        np.testing.assert_allclose(bench.scores[row].numpy(), expected, rtol=2e-6, atol=2e-5)


# Adding to a logit, masking it and scaling it leave -inf at -inf: these pairs, with what lies
# between them, give the same scores in either order.
COMMUTE = {
    ("allowed_ids", "logit_bias"),
    ("allowed_ids", "min_tokens"),
    ("logit_bias", "min_tokens"),
    ("min_tokens", "penalties"),
    ("min_tokens", "bad_words"),
    ("allowed_ids", "bad_words"),
    ("penalties", "bad_words"),
}


@pytest.mark.parametrize("pair", list(itertools.combinations(range(len(STAGES)), 2)))
def test_another_order_of_stages_gives_other_tokens(pair, monkeypatch):
    """So the tests against the oracles prove the order of STAGES."""
    first, second = pair
    names = STAGES[first][1].__name__, STAGES[second][1].__name__
    tokens, prompt_len = [50, 51, 52, 53, 60, 61, 61, 60], 4
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, VOCAB, generator=generator) * 2
    logits[:, 60:63] += 6
    logits[:, 70] = 30.0  # not allowed
    logits[:, EOS] = 20.0
    logits[:, 61] = 15.0  # a bad word

    def drawn():
        bench = Bench()
        for slot in range(64):
            bench.add(
                slot,
                seed=slot,
                tokens=tokens,
                prompt_len=prompt_len,
                allowed_token_ids=[i for i in range(VOCAB) if i != 70],
                logit_bias={60: 2.0, 62: -2.5, EOS: 1.0},
                min_tokens=9,
                repetition_penalty=1.3,
                frequency_penalty=0.4,
                bad_words_token_ids=((60, 61),),
                logits_processors={"ban_best": {}, "halve_and_shift": {"shift": 0.001}},
                temperature=0.5,
                min_p=0.05,
                top_k=900,
                top_p=0.5,
            )
        return bench.run(logits, list(range(64)), [7] * 64)

    right = drawn()
    swapped = list(STAGES)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    monkeypatch.setattr(sampler_module, "STAGES", tuple(swapped))
    try:
        changed = drawn() != right
    except (RuntimeError, IndexError):  # whatever comes after top_k finds candidates, not a row
        changed = True
    assert changed == (names not in COMMUTE), names


def test_same_tokens_alone_in_a_batch_and_in_other_order():
    rows = [(options, *history) for options, history in zip(OPTIONS * 4, histories(60))]
    logits = torch.randn(60, VOCAB) * 3
    logits[:, :10] += 4
    bench = Bench()
    for slot, (options, tokens, prompt_len) in enumerate(rows):
        bench.add(slot, seed=slot, tokens=tokens, prompt_len=prompt_len, top_k=40, **options)
    positions = [len(tokens) - 1 for _, tokens, _ in rows]
    batch = bench.run(logits, list(range(60)), positions)[0]
    order = torch.randperm(60).tolist()
    shuffled = bench.run(logits[order], order, [positions[i] for i in order])[0]
    assert shuffled == [batch[i] for i in order]
    for row, (options, tokens, prompt_len) in enumerate(rows):
        alone = Bench(tile_elements=1)
        slot = NUM_SLOTS - 1 - row
        alone.add(slot, seed=row, tokens=tokens, prompt_len=prompt_len, top_k=40, **options)
        assert alone.run(logits[row : row + 1], [slot], [positions[row]])[0] == [batch[row]]


def test_a_reused_slot_leaks_nothing():
    """Beside a neighbour that needs every stage, so that all of them see the reused row."""
    tokens, prompt_len = [3, 4, 5, 6, 7, 8, 9, 3], 4
    logits = torch.randn(2, VOCAB) * 3
    for options in OPTIONS:
        used, fresh = Watched(FakeDevice()), Watched(FakeDevice())
        used.add(3, tokens=list(range(60)), prompt_len=10, **OPTIONS[-1])
        used.add(9, tokens=tokens, prompt_len=prompt_len, **OPTIONS[-1])
        used.run(logits, [3, 9], [59, 7])
        for bench in (used, fresh):
            bench.add(3, tokens=tokens, prompt_len=prompt_len, **options)
            bench.add(9, tokens=tokens, prompt_len=prompt_len, **OPTIONS[-1])
            bench.run(logits, [3, 9], [7, 7])
        assert torch.equal(used.scores, fresh.scores), options
        mine, theirs = ([replace(s, processors=()) for s in b.plan.spans] for b in (used, fresh))
        assert mine == theirs


def test_lists_of_requests_in_flight_stay_while_others_come_and_go():
    """The pool grows and moves, and its places are given out again, behind launched steps."""
    bench = Bench(FakeDevice())
    rng = np.random.default_rng(0)
    logits = torch.randn(1, VOCAB)
    for count in range(40):
        slot = count % 6
        legal = rng.choice(VOCAB, rng.integers(1, 400), replace=False).tolist()
        bench.add(slot, temperature=0.0, allowed_token_ids=legal)
        plan = bench.sampler.plan(np.array([slot], np.int32), np.array([9], np.int32))
        step = bench.staging.begin()
        bench.staging.flush(step)
        out = torch.zeros(1, dtype=torch.int32)
        bench.device.launch(
            bench.sampler.run,
            plan,
            type("Given", (), {"logits": lambda self: logits})(),
            torch.tensor([slot]),
            torch.tensor([9], dtype=torch.int32),
            bench.out,
        )
        bench.device.copy_to_host(out, bench.out.token_ids[:1])
        step.release()
        expected = max(legal, key=lambda token: logits[0, token].item())
        if count % 3 == 0:
            # Two more owners of the slot come before the step has run.
            for more in (500, 900):
                bench.add(slot, allowed_token_ids=list(range(more)))
                later = bench.staging.begin()
                bench.staging.flush(later)
                later.release()
        bench.device.synchronize()
        assert out.item() == expected


def test_rows_that_ask_for_nothing_pay_nothing():
    """No needs, no pool, no history: a batch of greedy and random rows is plain."""
    bench = Bench()
    for slot in range(6):
        bench.add(slot, temperature=float(slot > 2), repetition_penalty=1, logit_bias={})
    plan = bench.sampler.plan(np.arange(6, dtype=np.int32), np.full(6, 9, np.int32))
    assert plan.is_plain
    assert plan.spans == ()
    assert len(plan.pool) == 0
    bench.add(0, logit_bias={4: 1.0})
    plan = bench.sampler.plan(np.arange(6, dtype=np.int32), np.full(6, 9, np.int32))
    assert not plan.is_plain
    assert len(bench.rows.lists.pool.tensor) > 0


def test_history_covers_uncertain_positions():
    """With drafts in flight the host's bound is too high by as much as may be rejected: penalties
    read up to the bound, end tokens are masked down to the least."""
    bench = Bench()
    bench.add(0, temperature=0.0, frequency_penalty=1.0, min_tokens=3)
    plan = bench.sampler.plan(np.zeros(1, np.int32), np.array([9], np.int32), 4)
    assert plan.spans[0].history_len == 10
    assert plan.spans[0].needs & sampler_module.Need.MIN_TOKENS
    plan = bench.sampler.plan(np.zeros(1, np.int32), np.array([9], np.int32), 3)
    assert not plan.spans[0].needs & sampler_module.Need.MIN_TOKENS


def test_a_row_that_masks_everything_ends_alone():
    """Case 20."""
    bench = Bench()
    bench.add(0, allowed_token_ids=[5], bad_words_token_ids=((5,),))
    bench.add(1, temperature=0.0, allowed_token_ids=[EOS], min_tokens=5)
    bench.add(2, temperature=0.0, allowed_token_ids=[5])
    bench.add(3, logits_processors=["ban_best"], allowed_token_ids=[7], top_k=3, top_p=0.5)
    tokens, status = bench.run(torch.randn(4, VOCAB), [0, 1, 2, 3], [3] * 4)
    assert status == [ALL_MASKED, ALL_MASKED, OK, ALL_MASKED]
    assert tokens == [0, 0, 5, 0]


@pytest.mark.parametrize("name", ["fail", "answer"])
def test_a_processor_that_fails_ends_its_own_request(name, caplog):
    bench, plain = Bench(), Bench()
    logits = torch.randn(3, VOCAB)
    for slot in range(3):
        options = {"logits_processors": [name] if slot == 1 else ["ban_best"]}
        bench.add(slot, **options)
        plain.add(slot, logits_processors=["ban_best"])
    tokens, status = bench.run(logits, [0, 1, 2], [3] * 3)
    assert status == [OK, PROCESSOR_FAILED, OK]
    expected = plain.run(logits, [0, 1, 2], [3] * 3)[0]
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert "logits processor failed" in caplog.text


@pytest.mark.parametrize("name", ["unknown", "no_module"])
def test_a_processor_that_cannot_be_found_is_refused(name):
    bench = Bench()
    with pytest.raises(RequestError, match=name) as caught:
        bench.add(0, logits_processors=[name])
    assert caught.value.field == "logits_processors"


def test_history_is_as_long_as_a_request():
    """A whole table is in sight, to its last place."""
    tokens = list(range(100, 100 + MAX_LEN))
    bench = Watched()
    bench.add(0, tokens=tokens, prompt_len=4, temperature=0.0, presence_penalty=2.0)
    bench.run(torch.zeros(1, VOCAB), [0], [MAX_LEN - 1])
    assert (bench.scores[0] == -2).nonzero()[:, 0].tolist() == tokens[4:]
