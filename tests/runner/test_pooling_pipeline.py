"""A pooling model over two stages: the first one's rows advance although nothing comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from runner.test_pipeline import TwoStages
from support.pooled import cosine, hidden_states, tiny_pooled
from support.tiny import TinyEngine, prompts_of

from pelton.config.pooling import PoolingParams
from pelton.runner.heads.relay import RelayHead

PROMPTS = prompts_of([1, 6, 11, 24, 30], seed=17)
METHODS = ("last", "cls", "mean")


def two_stages(device: str, **changes: Any) -> tuple[TinyEngine, TwoStages]:
    engine = TinyEngine(
        tiny_pooled("Llama"), device=device, runner="auto", num_blocks=256, num_stages=2, **changes
    )
    stages = TwoStages(engine, tiny_pooled("Llama"))
    engine.loop._worker = stages  # type: ignore[assignment]
    return engine, stages


def pooled(engine: TinyEngine) -> list[np.ndarray]:
    asked = [PoolingParams(method=method) for method in METHODS for _ in PROMPTS]
    tokens = [PoolingParams(task="token_embed")] * len(PROMPTS)
    return engine.pool([*PROMPTS * len(METHODS), *PROMPTS], [*asked, *tokens])


def expected() -> list[np.ndarray]:
    hidden = [hidden_states(tiny_pooled("Llama"), prompt) for prompt in PROMPTS]
    return [
        *(states[-1] for states in hidden),
        *(states[0] for states in hidden),
        *(states.mean(axis=0) for states in hidden),
        *hidden,
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_two_stages_give_what_one_gives(chunk, device, depth):
    engine, stages = two_stages(
        device, long_prefill_token_threshold=chunk, max_steps_in_flight=depth
    )
    for values, wanted in zip(pooled(engine), expected(), strict=True):
        assert cosine(values, wanted) > 0.9999
    stages.check_rows()


def test_without_the_relays_end_chunks_go_astray(monkeypatch):
    """Its rows stand still, and every chunk is computed as if it were the first."""
    engine, stages = two_stages("cpu", long_prefill_token_threshold=3)
    head = stages.stages[0]._head  # type: ignore[attr-defined]
    assert isinstance(head, RelayHead)
    monkeypatch.setattr(head._advance, "launch", lambda batch: None)
    found = [cosine(a, b) for a, b in zip(pooled(engine), expected(), strict=True)]
    assert min(found) < 0.9
    with pytest.raises(AssertionError):
        stages.check_rows()
