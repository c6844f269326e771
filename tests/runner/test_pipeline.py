"""Two pipeline stages in one process: each a runner of its own over half the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.embeds import add_form, check_forms
from support.plain import KINDS, greedy, plain_tokens
from support.tiny import TinyEngine, checkpoint_of, prompts_of, tiny_llama

from pelton.core.plan import StepPlan
from pelton.forward.in_flight import Final, Sent
from pelton.forward.stages import LocalLink
from pelton.layers.context import BuildContext
from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN
from pelton.runner.assemble import PipelinePlace, assemble, attention_backend
from pelton.runner.heads.protocol import StepOutcome
from pelton.worker.worker import load_model


class TwoStages:
    """In the place of a worker: layers 0:1 and 1:2, one after the other."""

    def __init__(self, engine: TinyEngine, folder: Path) -> None:
        config = engine.config
        self.device = engine.device
        backend = attention_backend(config)
        build = BuildContext(device=self.device.torch_device, dtype=torch.float32, backend=backend)
        link = LocalLink(
            self.device,
            max_tokens=config.scheduler.max_num_batched_tokens,
            hidden_size=config.model.hidden_size,
            dtype=torch.float32,
        )
        places = (
            PipelinePlace(lo=0, hi=1, following=link),
            PipelinePlace(lo=1, hi=2, previous=link),
        )
        with torch.inference_mode():
            # Each stage has its own model, of which the other stage's layers are broken.
            self.stages = []
            for index, place in enumerate(places):
                model: Any = load_model(config, build, checkpoint_of(folder))
                for parameter in model.layers[1 - index].parameters("x").values():
                    parameter.tensor.fill_(torch.nan)
                self.stages.append(
                    assemble(config, self.device, model, backend, place=place).runner
                )

    def record_next(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepOutcome:
        first, last = self.stages
        with torch.inference_mode():
            sent = first.start(plan)
            final = last.start(plan)
            assert isinstance(sent, Sent)
            assert isinstance(final, Final)
            outcome = last.finish(final)
            first.finish(sent).collect()
        return outcome

    def check_rows(self) -> None:
        """Both stages have computed the same, and know the same tokens, but for the last one that
        was sampled: the first stage hears of it with the row's next step."""
        self.device.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            first, last = (stage._rows._fields.tensor[:-1] for stage in self.stages)
            of_first, of_last = (stage._rows._tokens.tensor[:-1] for stage in self.stages)
            assert torch.equal(first[:, :NEXT_TOKENS], last[:, :NEXT_TOKENS])
            for slot, length in enumerate(first[:, TOTAL_LEN].tolist()):
                assert torch.equal(of_first[slot, : length - 1], of_last[slot, : length - 1])


def two_stages(device: str, **changes: Any) -> tuple[TinyEngine, TwoStages]:
    engine = TinyEngine(tiny_llama(), device=device, num_stages=2, **changes)
    stages = TwoStages(engine, tiny_llama())
    engine.loop._worker = stages  # type: ignore[assignment]
    return engine, stages


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_two_stages_give_the_plain_tokens(chunk, device, depth):
    """With chunked prefill, preemption, and a pool that forces more of it."""
    engine, stages = two_stages(
        device, long_prefill_token_threshold=chunk, max_steps_in_flight=depth, num_blocks=20
    )
    expected = {}
    for index, prompt in enumerate(prompts_of([1, 6, 11, 24, 30], seed=17)):
        for make in KINDS.values():
            name = engine.add(prompt, make(logprobs=1), seed=index)
            expected[name] = plain_tokens(prompt, make(), seed=index)
    for count in range(1000):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 11 == 5:
            engine.loop.scheduler.preempt(f"r{count % 10}")
        if count % 4 == 0:
            for update, _ in engine.loop.drain():
                outcome = engine.outcomes[update.request.request_id]
                outcome.token_ids += update.new_token_ids
            stages.check_rows()
    outcomes = engine.run()
    stages.check_rows()
    assert engine.loop.scheduler.stats.num_preemptions > 1
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_prompts_of_embeddings(chunk, device):
    """The first stage brings them, the other one has no memory for any."""
    engine, stages = two_stages(
        device, long_prefill_token_threshold=chunk, num_blocks=40, enable_prompt_embeds=True
    )
    check_forms(engine, tiny_llama(), prompts_of([1, 6, 11, 24], seed=17), KINDS)
    stages.check_rows()
    sizes = [stage._add_hooks[0].__self__._rows.numel() for stage in stages.stages]  # type: ignore[attr-defined]
    assert sizes == [64 * 48, 0]


def test_a_prompt_of_embeddings_is_refused_on_both_stages():
    engine, stages = two_stages("fake")
    bad = add_form(engine, tiny_llama(), [5, 6, 7], greedy(), "embeds")
    good = engine.add([5, 6, 7], greedy())
    outcomes = engine.run()
    assert "enable_prompt_embeds" in str(outcomes[bad].error)
    assert outcomes[good].token_ids == plain_tokens([5, 6, 7], greedy())
    stages.check_rows()


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("what", ["tokens", "advance"])
def test_a_stage_that_is_told_nothing_goes_astray(device, what):
    """The check of rows can fail: without the sampled tokens, or without the advance by what it has
    computed, the first stage stands still."""
    engine, stages = two_stages(device, long_prefill_token_threshold=3)
    first: Any = stages.stages[0]
    if what == "tokens":
        first._rows.learn = lambda plan: None
    else:
        first._head._advance.launch = lambda batch: None
    (prompt,) = prompts_of([6])
    name = engine.add(prompt, greedy())
    assert engine.run()[name].token_ids != plain_tokens(prompt, greedy())
    with pytest.raises(AssertionError):
        stages.check_rows()


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_a_request_refused_on_both_stages(device):
    """Case 26: it fails alone, its neighbour's rows agree."""
    engine, stages = two_stages(device)
    good, bad = prompts_of([6, 7])
    names = [engine.add(good, greedy()), engine.add(bad, greedy(logprobs=10**6))]
    outcomes = engine.run()
    assert outcomes[names[0]].token_ids == plain_tokens(good, greedy())
    assert outcomes[names[1]].finish_reason == "error"
    assert engine.generate([good, bad], greedy()) == [
        plain_tokens(prompt, greedy()) for prompt in (good, bad)
    ]
    stages.check_rows()
