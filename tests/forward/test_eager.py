"""A step executed at a larger size than it has: same tokens, and nobody else's memory touched.

Case 7 of bug_reports.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.families import tiny_model
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.core.descriptor import Descriptor
from pelton.device.fake import FakeDevice

MAX_ROWS, MAX_TOKENS = 8, 64
SEEN: list[tuple[int, int]] = []


def choose(live: Descriptor) -> Descriptor:
    """Rows as captured sizes 4 and 8, tokens in steps of 8."""
    rows = 4 if live.num_rows <= 4 else MAX_ROWS
    tokens = min(-(-live.num_tokens // 8) * 8, MAX_TOKENS)
    SEEN.append((rows - live.num_rows, tokens - live.num_tokens))
    return replace(live, num_rows=rows, num_tokens=tokens)


def kv_pools(engine: TinyEngine) -> tuple[torch.Tensor, ...]:
    return engine.worker._assembled.runner._executor._kv


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=50, max_tokens=9, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, max_tokens=15, ignore_eos=True),
]


def run(device: str, is_padded: bool, num_rows: int, **changes) -> TinyEngine:
    """Prompts of several sizes, arriving in two waves, so that rows are reused and batches mix
    chunks with decodes; 3 and 5 rows run as 4 and 8."""
    engine = TinyEngine(
        tiny_llama(),
        device=device,
        choose=choose if is_padded else None,
        **{
            "max_num_seqs": MAX_ROWS,
            "max_num_batched_tokens": MAX_TOKENS,
            "long_prefill_token_threshold": 13,
            **changes,
        },
    )
    with torch.inference_mode():
        for pool in kv_pools(engine):
            # What the allocator gave differs from run to run.
            engine.device.launch(torch.Tensor.fill_, pool[1:], torch.nan)
    prompts = prompts_of([17, 3, 40, 1, 8, 21][: num_rows + 1], seed=4)
    for i, prompt in enumerate(prompts[:num_rows]):
        engine.add(prompt, PARAMS[i % 3], seed=i)
    for _ in range(6):
        engine.step()
    for i, prompt in enumerate(prompts[::-1]):
        engine.add(prompt, PARAMS[(i + 1) % 3], seed=50 + i)
    engine.run()
    return engine


def tokens_of(engine: TinyEngine) -> list[list[int]]:
    assert all(outcome.error is None for outcome in engine.outcomes.values())
    return [outcome.token_ids for outcome in engine.outcomes.values()]


@pytest.fixture(autouse=True)
def forget() -> None:
    SEEN.clear()


@pytest.mark.parametrize("num_rows", [3, 5])
@pytest.mark.parametrize("backend", ["torch", "reference", "invariant"])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_padded_steps_give_the_same_tokens(device, backend, num_rows):
    changes = {"attention_backend": backend, "batch_invariant": backend == "invariant"}
    expected = tokens_of(run("cpu", False, num_rows, **changes))
    assert tokens_of(run(device, True, num_rows, **changes)) == expected
    assert any(rows for rows, _ in SEEN), "rows were padded"
    assert any(tokens for _, tokens in SEEN), "tokens were padded"


def state_of(engine: TinyEngine) -> dict[str, list[np.ndarray]]:
    runner = engine.worker._assembled.runner
    rows = runner._rows.tensors(
        runner._tables.tensors, runner._tables.block_sizes, runner._tables.windows
    )
    tensors = {
        "kv": [pool[1:] for pool in kv_pools(engine)],
        "block tables": list(rows.block_tables),
    }
    tensors["fields"], tensors["tokens"] = [rows.fields], [rows.tokens]
    if isinstance(engine.device, FakeDevice):
        engine.device.synchronize()
    with torch._C.DisableTorchFunctionSubclass():
        arrays = {name: [t.numpy().copy() for t in group] for name, group in tensors.items()}
    reserved = engine.worker._assembled.reserved_slot
    for name in ("fields", "tokens", "block tables"):
        arrays[name] = [np.delete(array, reserved, axis=0) for array in arrays[name]]
    return arrays


@pytest.mark.parametrize("num_rows", [3, 5])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_padding_touches_no_row_and_no_block_of_others(device, num_rows):
    """Bit for bit, with kernels whose sums do not depend on the batch: row state but the reserved
    row, KV but the null block. Where nobody wrote, both have NaN."""
    changes = {"attention_backend": "invariant", "batch_invariant": True}
    plain = state_of(run(device, False, num_rows, **changes))
    padded = state_of(run(device, True, num_rows, **changes))
    for name, arrays in plain.items():
        for a, b in zip(arrays, padded[name]):
            assert a.tobytes() == b.tobytes(), name
    assert any(rows for rows, _ in SEEN)


def test_a_padding_slot_that_pointed_at_a_live_block_would_be_seen(monkeypatch):
    """The comparison above can fail: padded tokens stored in block 1 instead of the null block."""
    from pelton.attention.paged import PagedBackend

    changes = {"attention_backend": "invariant", "batch_invariant": True}
    plain = state_of(run("fake", False, 3, **changes))

    def prepare(self, meta, group, dtype) -> None:
        meta.kv_slots = torch.where(meta.kv_slots < 0, 4, meta.kv_slots)

    monkeypatch.setattr(PagedBackend, "_prepare", prepare)
    broken = state_of(run("fake", True, 3, **changes))
    assert any(a.tobytes() != b.tobytes() for a, b in zip(plain["kv"], broken["kv"]))


def test_one_layer_of_each_kind_is_enough_to_warm_a_step(monkeypatch):
    """Of window layers, full ones, and each KV group, which has block tables of its own."""
    folder = tiny_model("Gemma2", num_hidden_layers=4, sliding_window=8, query_pre_attn_scalar=16)
    engine = TinyEngine(folder)
    executor, model = engine.worker._assembled.executor, engine.worker.model
    assert [model.config.layer_kind(i) for i in range(4)] == ["window", "full"] * 2
    groups = {layer: group.index for group in engine.worker.groups for layer in group.layers}
    assert (groups[0], groups[1]) == (groups[2], groups[3])
    seen: list[tuple[int, int]] = []
    run_layers = model.run_layers

    def spy(lo, hi, *rest):
        seen.append((lo, hi))
        run_layers(lo, hi, *rest)

    monkeypatch.setattr(model, "run_layers", spy)
    monkeypatch.setattr(executor, "run", executor.run_one_of_each)
    engine.add(prompts_of([5])[0], SamplingParams(max_tokens=1))
    engine.run()
    assert seen == [(0, 1), (1, 2)]
