"""Tiny random checkpoints of any family, and what a family must pass."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.folders import new_folder
from support.tiny import VOCAB, TinyEngine, assert_greedy, oracle_logits, prompts_of

from pelton.config.params import SamplingParams
from pelton.core.kv.groups import with_tables
from pelton.core.plan import NewRow, SlotRef, StepPlan
from pelton.device.native.library import library

BACKENDS = {
    "torch": {"attention_backend": "torch"},
    "reference": {"attention_backend": "reference"},
    **({} if library() is None else {"native": {"attention_backend": "native"}}),
    "invariant": {"attention_backend": "invariant", "batch_invariant": True},
}


def _as_json(value: Any) -> Any:
    """Tuples of pairs are dicts, other tuples are lists."""
    if not isinstance(value, tuple):
        return value
    if value and all(isinstance(one, tuple) and isinstance(one[0], str) for one in value):
        return {key: _as_json(one) for key, one in value}
    return [_as_json(one) for one in value]


@functools.cache
def tiny_model(family: str, **overrides: Any) -> Path:
    """A folder with a 2-layer random model of transformers' `family` ("Llama"), in float32.

    Weights are large enough that tokens differ; biases and norms are not what they start as. A
    value that is a tuple of (name, value) pairs becomes a dict: overrides are hashed.
    """
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    values.update(overrides)
    values = {key: _as_json(value) for key, value in values.items()}
    torch.manual_seed(0)
    folder = new_folder("tiny")
    config = getattr(transformers, f"{family}Config")(**values)
    name = {"Gemma3Text": "Gemma3"}.get(family, family)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.1)
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def engine_logits(engine: TinyEngine, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]: one prefill step, the head applied to every token's hidden state."""
    assembled = engine.worker._assembled
    num_blocks = -(-len(ids) // 4)
    num_groups = len(with_tables(assembled.groups))
    assert num_groups * num_blocks < engine.config.cache.num_blocks
    ref = SlotRef(0, 1)
    plan = StepPlan(
        step=0,
        refs=[ref],
        num_scheduled_tokens=np.array([len(ids)], np.int32),
        num_drafts=np.zeros(1, np.int32),
        num_computed_bound=np.zeros(1, np.int32),
        samples=np.ones(1, np.bool_),
        new_rows=[
            NewRow(
                ref=ref,
                request_id="a",
                token_ids=np.array(ids, np.int32),
                prompt_len=len(ids),
                num_computed_tokens=0,
                block_ids=tuple(
                    np.arange(1 + g * num_blocks, 1 + (g + 1) * num_blocks, dtype=np.int32)
                    for g in range(num_groups)
                ),
                params=SamplingParams(temperature=0.0),
                seed=0,
            )
        ],
    )
    with torch.inference_mode():
        in_flight = assembled.runner.start(plan)
        dtype = getattr(torch, engine.config.dtype)
        out = torch.empty(len(ids), engine.config.model.vocab_size, dtype=dtype)
        engine.worker.model.head(in_flight.hidden, out)
        assembled.runner.finish(in_flight).collect()
    return out


def check_against_transformers(folder: Path, backend: str, **changes: Any) -> None:
    """Logits of a prompt, and greedy tokens of three requests at once."""
    changes = {**BACKENDS[backend], **changes}
    (ids,) = prompts_of([45], seed=3)
    expected = oracle_logits(folder, ids)
    logits = engine_logits(TinyEngine(folder, **changes), ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
    prompts = prompts_of([1, 7, 30], seed=5)
    tokens = TinyEngine(folder, **changes).generate(prompts)
    assert_greedy(folder, prompts, tokens, 12)
