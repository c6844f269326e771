"""Recording the whole ladder ahead, as a GPU needs it; here with tapes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.plain import greedy, plain_tokens
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.config.params import SamplingParams
from pelton.core.descriptor import Descriptor
from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice
from pelton.device.made import Made
from pelton.forward.recorded import RecordedExecutor
from pelton.ops.step_kernels import step_kernel
from pelton.runner.capture import Recorder, rehearse
from pelton.runner.synthetic import synthetic_plan

GRAPHS = GraphsConfig(decode_sizes=(1, 2, 4), token_sizes=(16, 64))
PROMPTS = prompts_of([1, 7, 30, 16], seed=5)


def ahead(engine: TinyEngine) -> Any:
    """The engine's device, as one that does not record when it is asked."""
    engine.device.records_when_asked = False  # type: ignore[misc]
    return engine.device


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_ladder_is_recorded_without_touching_a_row(device):
    engine = TinyEngine(tiny_llama(), device=device, graphs=GRAPHS)
    names = [engine.add(prompt) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    with torch.inference_mode():
        assembled = engine.worker._assembled
        recorder = Recorder(ahead(engine), assembled.runner, assembled.executor)
        assert recorder.record_first().num_recorded > 0
        while recorder.record_next():
            pass
    assert not assembled.executor.unrecorded()
    outcomes = engine.run()
    for name, prompt in zip(names, PROMPTS):
        assert outcomes[name].token_ids == plain_tokens(prompt, greedy())


class Ahead(CPUDevice):
    """Records as a GPU does: never in the midst of work."""

    records_when_asked = False


class AheadFake(FakeDevice):
    records_when_asked = False


class Rehearsing(Ahead):
    """Writes nothing of the host's while it rehearses, as a GPU whose kernels are compiled then."""

    _is_rehearsing = False

    @contextlib.contextmanager
    def rehearsing(self):
        self._is_rehearsing = True
        yield
        self._is_rehearsing = False

    def launch(self, kernel, *args):
        if not (self._is_rehearsing and kernel is step_kernel("staged_write", "cpu")):
            super().launch(kernel, *args)


def test_steps_after_a_rehearsal_do_not_build_on_what_it_staged(monkeypatch):
    """Of one row: a step's header then differs least from the rehearsal's, and what is equal is not
    sent again."""
    monkeypatch.setattr("support.tiny.make_device", lambda name: Rehearsing())
    engine = TinyEngine(tiny_llama(), graphs=GRAPHS, max_num_seqs=1)
    assert engine.generate(PROMPTS) == [plain_tokens(p, greedy()) for p in PROMPTS]


@pytest.mark.parametrize("kind", [Ahead, AheadFake])
def test_what_is_not_recorded_runs_eagerly(kind, monkeypatch):
    """A backend that a graph cannot hold records nothing; one that it can has the whole ladder
    before the first step, and nothing is recorded later."""
    from pelton.attention.invariant_backend import InvariantBackend

    engines = {}
    for in_place in (False, True):
        monkeypatch.setattr(InvariantBackend, "refreshes_in_place", in_place)
        monkeypatch.setattr("support.tiny.make_device", lambda name: kind())
        engine = TinyEngine(tiny_llama(), graphs=GRAPHS, attention_backend="invariant")
        engines[in_place] = engine
        expected = [plain_tokens(p, greedy()) for p in PROMPTS]
        assert engine.generate(PROMPTS) == expected, "while the rest is recorded"
        while engine.loop.idle():
            pass
        monkeypatch.setattr(engine.device, "record", None)
        assert engine.generate(PROMPTS) == expected
        executor = engine.worker._assembled.executor
        assert isinstance(executor, RecordedExecutor) == in_place
    executor = engines[True].worker._assembled.executor
    assert executor.num_replayed > 10
    live = Descriptor(
        num_tokens=65, num_rows=1, uniform_query_len=0, max_query_len=65, max_seq_len=65
    )
    assert executor.choose(live) == live


def test_a_rehearsal_has_all_that_is_launched_later(monkeypatch):
    """Each class at every power of two, steps past the ladder, short prompts, and whole plans."""
    monkeypatch.setattr("support.tiny.make_device", lambda name: Ahead())
    monkeypatch.setattr(
        "pelton.attention.invariant_backend.InvariantBackend.refreshes_in_place", True
    )
    engine = TinyEngine(tiny_llama(), graphs=GRAPHS, attention_backend="invariant")
    made = engine.worker._assembled
    shapes: list[Descriptor] = []
    monkeypatch.setattr(made.executor, "warm", lambda shape, is_sampled: shapes.append(shape))
    made.executor._steps.clear()
    plan = synthetic_plan(
        made.reserved_slot, query_lens=[1, 1], num_groups=1, params=SamplingParams(top_k=5)
    )
    started: list[int] = []
    start = made.runner.start
    monkeypatch.setattr(made.runner, "start", lambda p: (started.append(p.num_rows), start(p))[1])
    with torch.inference_mode():
        rehearse(engine.device, made.runner, made.executor, 100, [plan])
    assert started == [2]
    full = {(s.uniform_query_len, s.num_tokens) for s in shapes if s.mode == "full"}
    assert full == {(1, 1), (1, 2), (1, 4), (0, 16), (0, 64)}
    eager = [(s.num_rows, s.num_tokens) for s in shapes if s.mode == "eager"]
    assert {(1, n) for n in (1, 2, 4, 8, 16, 32, 64)} <= set(eager)
    assert max(tokens for _, tokens in eager) == 100


class Wasteful(Ahead):
    """Makes something with each recording."""

    def record(self, run):
        self.made_in_recordings += Made(files=1)  # type: ignore[misc]
        return super().record(run)


@pytest.mark.parametrize("kind", [Ahead, Wasteful])
def test_what_is_made_while_recording_is_told(kind, monkeypatch, caplog):
    monkeypatch.setattr(
        "pelton.attention.invariant_backend.InvariantBackend.refreshes_in_place", True
    )
    monkeypatch.setattr("support.tiny.make_device", lambda name: kind())
    engine = TinyEngine(tiny_llama(), graphs=GRAPHS, attention_backend="invariant")
    num_first = len(engine.worker._assembled.executor._steps)
    while engine.loop.idle():
        pass
    num_later = len(engine.worker._assembled.executor._steps) - num_first
    told = [m for m in caplog.messages if "something was made" in m]
    if kind is Ahead:
        assert not told
    else:
        assert len(told) == 2
        assert f": {num_first} files;" in told[0]
        assert f": {num_later} files;" in told[1]
