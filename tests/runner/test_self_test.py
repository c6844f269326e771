"""The self-test passes where replays are right, and says so where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.plain import greedy, plain_tokens
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.core.kv.groups import with_tables
from pelton.errors import IntegrityError
from pelton.runner.self_test import SelfTest

GRAPHS = GraphsConfig(decode_sizes=(1, 2, 4), token_sizes=(16, 64))
PROMPTS = prompts_of([1, 7, 30, 16], seed=5)


def made(engine: TinyEngine) -> SelfTest:
    assembled = engine.worker._assembled
    return SelfTest(
        engine.device,
        assembled.runner,
        assembled.executor,
        with_tables(assembled.groups),
        reserved_slot=assembled.reserved_slot,
        max_rows=engine.config.scheduler.max_num_seqs,
        is_recurrent=False,
    )


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_it_passes_and_leaves_nothing(device):
    engine = TinyEngine(tiny_llama(), device=device, graphs=GRAPHS)
    with torch.inference_mode():
        assert made(engine).run() == 4
    assert made(engine).num_blocks == 1 + 5
    assert engine.generate(PROMPTS) == [plain_tokens(p, greedy()) for p in PROMPTS]
    table = engine.worker._assembled.runner._tables.tensors[0]
    with torch._C.DisableTorchFunctionSubclass():
        assert not table[engine.worker._assembled.reserved_slot].any()


def test_steps_have_no_more_rows_than_they_may():
    engine = TinyEngine(tiny_llama(), graphs=GRAPHS, max_num_seqs=1)
    with torch.inference_mode():
        assert made(engine).run() == 2


def test_a_replay_that_is_wrong_is_found(monkeypatch):
    from pelton.attention.paged import PagedBackend

    refresh = PagedBackend._refresh

    def stale(self: Any, meta: Any, batch: Any, group: Any, dtype: Any) -> None:
        refresh(self, meta, batch, group, dtype)
        if batch.is_blank:
            meta.seq_lens = meta.seq_lens - 3

    monkeypatch.setattr(PagedBackend, "_refresh", stale)
    engine = TinyEngine(tiny_llama(), graphs=GRAPHS, attention_backend="reference")
    with (
        torch.inference_mode(),
        pytest.raises(IntegrityError, match=r"lengths \[1\] differs .* enforce_eager=True"),
    ):
        made(engine).run()
