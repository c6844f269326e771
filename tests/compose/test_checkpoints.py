"""Prefix hits of models with recurrent layers: tokens of the plain engine, whatever is hit, lost,
resumed or aborted. test_families.py has the short list, with a checkpoint per block."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import tiny_model
from support.plain import greedy, logprobs_of, plain_tokens, seeded
from support.tiny import TinyEngine, prompts_of

from pelton.config.speculation import SpeculationConfig

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ("linear_attention", "full_attention", "linear_attention", "linear_attention"),
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "attention_multiplier": 0.25,
}
PROMPTS = prompts_of([50, 9, 33], seed=5)
LONG = prompts_of([50], seed=6)[0]


def folder() -> Any:
    return tiny_model("GraniteMoeHybrid", **HYBRID)


def engine_of(**changes: Any) -> TinyEngine:
    given = {"device": "queued", "checkpoint_interval": 16, "num_blocks": 120}
    return TinyEngine(folder(), **{**given, **changes})


def plain(prompt: list[int], params: Any, seed: int) -> list[int]:
    return plain_tokens(prompt, params, seed=seed, folder=folder())


def check(engine: TinyEngine, prompt: list[int], *, seed: int = 3) -> Any:
    """The request, alone in the engine, gives the plain tokens."""
    name = engine.add(prompt, seeded(), seed=seed)
    outcome = engine.run()[name]
    assert outcome.token_ids == plain(prompt, seeded(), seed)
    return outcome.request


def test_a_checkpoint_takes_several_blocks():
    """Otherwise these tests would show little."""
    engine = engine_of()
    assert engine.worker.groups[-1].kind == "recurrent"
    assert engine.worker.groups[-1].pages == 15


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize(("shared", "hit"), [(31, 16), (32, 32), (33, 32), (15, 0), (48, 48)])
def test_hits_end_at_checkpoints(shared, hit, device):
    """k * interval - 1, k * interval, k * interval + 1."""
    engine = engine_of(device=device, max_steps_in_flight=3)
    engine.add(PROMPTS[0][:shared], greedy(1))
    engine.run()
    request = check(engine, PROMPTS[0])
    assert request.num_cached_tokens == hit
    stats = engine.loop.scheduler.stats
    assert stats.num_group_matches == (shared // 4 * 4, hit)
    assert stats.num_cache_hits == hit


@pytest.mark.parametrize("length", [1000, 3000])
def test_long_prefixes_are_shared(length):
    """Case 11: a block of 16 tokens, and checkpoints after 256."""
    wide = {"block_size": 16, "num_blocks": 800, "checkpoint_interval": 256}
    engine = engine_of(**wide, max_num_batched_tokens=512, max_model_len=3100)
    prefix = prompts_of([length], seed=9)[0]
    first, second = [*prefix, 7, 8, 9], [*prefix, 30, 31]
    engine.generate([first], greedy(2))
    (tokens,) = engine.generate([second], greedy(4))
    assert engine.loop.scheduler.stats.num_group_matches == (length // 16 * 16, length // 256 * 256)
    alone = engine_of(
        **wide, max_num_batched_tokens=512, max_model_len=3100, enable_prefix_caching=False
    )
    assert alone.generate([second], greedy(4)) == [tokens]


def test_the_same_prompt_many_times_at_once():
    engine = engine_of(max_num_seqs=6)
    names = [engine.add(PROMPTS[0], seeded(), seed=i) for i in range(6)]
    outcomes = engine.run()
    for i, name in enumerate(names):
        assert outcomes[name].token_ids == plain(PROMPTS[0], seeded(), i)


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_preempted_at_every_step_and_resumed_from_a_checkpoint(device):
    for k in range(1, 16, 2 if device == "queued" else 5):
        engine = engine_of(device=device, long_prefill_token_threshold=7)
        neighbour = engine.add(PROMPTS[1], greedy(14), seed=1)
        name = engine.add(PROMPTS[2], seeded(), seed=3)
        for _ in range(k):
            engine.step()
        assert engine.loop.scheduler.preempt(name)
        outcomes = engine.run()
        assert outcomes[name].token_ids == plain(PROMPTS[2], seeded(), 3), k
        assert outcomes[neighbour].token_ids == plain(PROMPTS[1], greedy(14), 1), k
        assert outcomes[name].request.num_preemptions == 1
        if k > 12:
            assert engine.loop.scheduler.stats.num_cache_hits >= 32, "it began anew"


@pytest.mark.parametrize("depth", [1, 3])
def test_an_abort_in_mid_prefill_leaves_no_poison(depth):
    """Case 12: after each number of chunks; then the freed blocks are filled with others' KV."""
    for chunks in range(1, 6):
        engine = engine_of(
            device="fake", long_prefill_token_threshold=9, max_steps_in_flight=depth, num_blocks=60
        )
        name = engine.add(LONG, greedy())
        for _ in range(chunks):
            engine.step()
        assert engine.loop.abort(name)
        engine.generate(prompts_of([40, 40], seed=chunks), greedy(2))
        check(engine, LONG)
        check(engine, LONG, seed=4)


def test_evicted_checkpoints_are_computed_again():
    """A pool that holds one checkpoint beside a request."""
    engine = engine_of(num_blocks=45)
    for round_ in range(2):
        for seed, prompt in enumerate([PROMPTS[0], LONG, PROMPTS[2]]):
            check(engine, prompt, seed=seed + 10 * round_)
    engine.loop.scheduler.check_integrity()


def test_a_row_may_get_the_blocks_of_its_own_checkpoint():
    """It has read the state before they are zeroed for its keys and values."""
    engine = engine_of(num_blocks=24)
    engine.generate([LONG[:17]], greedy(1))
    assert check(engine, LONG).num_cached_tokens == 16
    assert engine.loop.scheduler.stats.num_cache_hits == 16


def test_a_tight_pool_preempts_and_resumes():
    engine = engine_of(num_blocks=26, max_num_seqs=4)
    prompts = prompts_of([20, 21, 22, 23], seed=12)
    names = [engine.add(prompt, greedy(30), seed=1) for prompt in prompts]
    outcomes = engine.run()
    assert engine.loop.scheduler.stats.num_preemptions > 0
    for name, prompt in zip(names, prompts):
        assert outcomes[name].token_ids == plain(prompt, greedy(30), 1)


def test_bit_for_bit():
    """batch_invariant=True: log-probabilities as exact floats, after hits, in chunks, resumed."""

    def exact(*before: list[int], preempt_at: int = 0, **changes: Any) -> list[Any]:
        engine = engine_of(attention_backend="invariant", batch_invariant=True, **changes)
        for prompt in before:
            engine.generate([prompt], greedy(1))
        name = engine.add(LONG, greedy(20, logprobs=3), seed=4)
        for _ in range(preempt_at):
            engine.step()
        assert not preempt_at or engine.loop.scheduler.preempt(name)
        cached = engine.run()[name].request.num_cached_tokens
        assert cached == (len(before[0]) // 16 * 16 if before else 0)
        return logprobs_of(engine, name)

    alone = exact(enable_prefix_caching=False)
    assert len(alone) == 20
    assert exact() == alone
    assert exact(LONG[:33]) == alone
    assert exact(LONG, PROMPTS[0]) == alone
    assert exact(LONG[:17], long_prefill_token_threshold=5) == alone
    assert exact(preempt_at=12) == alone


def test_drafts_and_checkpoints():
    """Verification leaves the ring at any index; a hit begins at the right one."""
    ngram = SpeculationConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
    )
    prompt = (PROMPTS[1] * 6)[:50]
    engine = engine_of(speculation=ngram)
    for seed in range(3):
        name = engine.add(prompt, greedy(20), seed=seed)
        outcome = engine.run()[name]
        assert outcome.token_ids == plain(prompt, greedy(20), 0)
        assert outcome.request.num_cached_tokens == (48 if seed else 0)


def test_an_answer_is_kept_for_the_next_question():
    """Checkpoints are taken while decoding, too."""
    engine = engine_of()
    name = engine.add(PROMPTS[2], greedy(40))
    answer = engine.run()[name].token_ids
    follow_up = [*PROMPTS[2], *answer, 5, 6]
    assert check(engine, follow_up).num_cached_tokens == 64


def test_quantised_kv_beside_exact_states():
    """Pages of codes hold states as they hold anything."""
    engine = engine_of(kv_dtype="int8")
    (first,) = engine.generate([LONG], greedy())
    assert engine.generate([LONG], greedy()) == [first]
    assert engine.loop.scheduler.stats.num_cache_hits == 48
