"""Sliding windows shorter than the prompt, alone and beside full attention."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import BACKENDS, tiny_model
from support.tiny import GREEDY, TinyEngine, oracle_greedy, prompts_of

from pelton.batch.block_tables import BlockTables

WINDOW = 6
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("Mistral", {"sliding_window": WINDOW}),
    # One full layer and three with windows: four groups that share one pool.
    "mixed": (
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
}
LENGTHS = (1, 5, 13, 30)


def folder_of(name: str) -> Path:
    family, options = FAMILIES[name]
    return tiny_model(family, **options)


@functools.cache
def cases(name: str) -> tuple[tuple[list[int], list[int]], ...]:
    """(prompt, transformers' greedy tokens) of each length."""
    folder = folder_of(name)
    return tuple((p, oracle_greedy(folder, p, 12)) for p in prompts_of(LENGTHS, seed=21))


def check(engine: TinyEngine, name: str) -> list[str]:
    """All prompts together give transformers' tokens; the requests' names."""
    names = [engine.add(prompt, GREEDY) for prompt, _ in cases(name)]
    outcomes = engine.run()
    for request, (prompt, tokens) in zip(names, cases(name)):
        assert outcomes[request].error is None
        assert outcomes[request].token_ids == tokens, len(prompt)
    return names


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_and_chunked_prompts(name, backend):
    for chunk in (64, 3):
        check(TinyEngine(folder_of(name), max_num_batched_tokens=chunk, **BACKENDS[backend]), name)


def test_the_window_matters():
    """So that the tests here can fail: full attention gives other tokens."""
    prompt, tokens = cases("window")[-1]
    same = folder_of("window")
    wide = TinyEngine(tiny_model("Mistral", sliding_window=None))
    assert wide.generate([prompt]) != [tokens]
    assert TinyEngine(same).generate([prompt]) == [tokens]


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prefix_hits_and_preemption(name, device):
    """Cases 2 and 9. The second round hits what the first has left; the third is preempted in a
    tight pool, and by hand."""
    engine = TinyEngine(folder_of(name), device=device, num_blocks=200)
    check(engine, name)
    again = check(engine, name)
    hits = [engine.outcomes[request].request.num_cached_tokens for request in again]
    assert hits == [(n - 1) // 4 * 4 for n in LENGTHS]
    num_groups = len(engine.worker.groups)
    engine = TinyEngine(
        folder_of(name),
        device=device,
        num_blocks=13 * num_groups,
        long_prefill_token_threshold=5,
        enable_prefix_caching=device == "fake",
    )
    names = [engine.add(prompt, GREEDY) for prompt, _ in cases(name)]
    for count in range(200):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 6 == 5:
            engine.loop.scheduler.preempt(names[count // 6 % len(names)])
    outcomes = engine.run()
    assert engine.loop.scheduler.stats.num_preemptions > 1
    assert [outcomes[request].token_ids for request in names] == [t for _, t in cases(name)]


def test_groups_share_one_pool():
    engine = TinyEngine(folder_of("mixed"))
    assert [(g.kind, g.layers) for g in engine.worker.groups] == [
        ("full", (0,)),
        ("window", (1,)),
        ("window", (2,)),
        ("window", (3,)),
    ]
    pools = engine.worker._assembled.runner._executor._kv
    assert len(pools) == 4
    assert len({pool.data_ptr() for pool in pools}) == 1


def run_poisoned(name: str, backend: str) -> list[list[int]]:
    """Tokens when every block that nobody holds is NaN after every step."""
    engine = TinyEngine(
        folder_of(name),
        device="queued",
        enable_prefix_caching=False,
        long_prefill_token_threshold=5,  # so that chunks of a prompt, too, come after a window
        **BACKENDS[backend],
    )
    names = [engine.add(prompt, GREEDY) for prompt, _ in cases(name)]
    pools = engine.worker._assembled.runner._executor._kv
    num_given_back = 0
    while engine.loop.has_work():
        engine.step()
        free = [block.block_id for block in engine.loop.scheduler._kv._pool.free_blocks()]
        with torch.inference_mode():
            for pool in pools:
                pool[torch.tensor(free)] = math.nan
        live = engine.loop.scheduler._running
        num_given_back += sum(max(request.num_passed_blocks) for request in live)
    assert num_given_back > 0
    return [engine.outcomes[request].token_ids for request in names]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_of_the_window_is_not_read(name, backend):
    """Relative of case 19: blocks that were given back may hold anything while the row goes on."""
    assert run_poisoned(name, backend) == [tokens for _, tokens in cases(name)]


def test_blocks_left_of_the_window_would_be_seen(monkeypatch):
    """The test above can fail: here the batch keeps the stale ids."""
    init = BlockTables.__init__

    def without_windows(self: BlockTables, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.windows = (None,) * len(self.windows)

    monkeypatch.setattr(BlockTables, "__init__", without_windows)
    assert run_poisoned("window", "torch") != [tokens for _, tokens in cases("window")]
