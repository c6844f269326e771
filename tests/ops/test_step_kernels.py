"""The C kernels around a model's layers write what the references write, element for element."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from pelton.device.native.library import library
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import (
    NEXT_TOKENS,
    NUM_COMPUTED,
    TOTAL_LEN,
    InputTensors,
    RowTensors,
    StepArrays,
)

needs_library = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
L, R, SIZES, WINDOWS = 40, 6, (4, 3), (None, 7)


def both(op: str):
    """The C kernel and the reference of an op."""
    native, reference = step_kernel(op, "cpu"), step_kernel(op, "a device without kernels")
    assert native is not reference
    return native, reference


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_step(generator, *, num_drafts: int, padding: int):
    """Rows of 1 to 6 query tokens over random row state; `padding` rows and tokens more."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    state = draw(-1, 99, R, NEXT_TOKENS + 1 + num_drafts)
    tables = tuple(draw(1, 50, R, -(-L // size)) for size in SIZES)
    num_rows = int(draw(1, R, 1))
    slots = torch.randperm(R - 1, generator=generator)[:num_rows].int()
    query_lens, num_logits = draw(1, 7, num_rows), draw(0, 2 + num_drafts, num_rows)
    query_lens = torch.maximum(query_lens, num_logits)
    for slot, query_len in zip(slots.tolist(), query_lens.tolist()):
        # A row decodes from its last known token on, or is in the midst of its prompt.
        total = int(draw(query_len, L - query_len, 1))
        state[slot, TOTAL_LEN] = total
        computed = total - 1 if query_len <= 1 + num_drafts else total - query_len
        state[slot, NUM_COMPUTED] = max(computed, 0)
    rows = RowTensors(state, draw(0, 99, R, L), tables, SIZES, WINDOWS)
    num_tokens, total_logits = int(query_lens.sum()), int(num_logits.sum())

    def cumulative(lengths: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([ints(0), lengths, torch.zeros(padding, dtype=torch.int32)])
        return padded.cumsum(0, dtype=torch.int32)

    step = StepArrays(
        live=ints(num_rows, num_tokens, total_logits),
        idx_mapping=torch.cat([slots, torch.full((padding,), R - 1, dtype=torch.int32)]),
        query_start_loc=cumulative(query_lens),
        cu_num_logits=cumulative(num_logits),
    )
    return rows, step, num_tokens + padding, total_logits


def poisoned_inputs(num_rows: int, num_tokens: int, num_logits: int, axes: int) -> InputTensors:
    def of(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int64).to(dtype)

    return InputTensors(
        input_ids=of(num_tokens),
        positions=of(axes, num_tokens + 3, dtype=torch.int64)[:, :num_tokens],
        seq_lens=of(num_rows),
        is_padding=of(num_tokens, dtype=torch.bool),
        block_tables=tuple(of(num_rows, L)[:, : -(-L // size)] for size in SIZES),
        slot_mappings=tuple(of(num_tokens, dtype=torch.int64) for _ in SIZES),
        logits_indices=of(num_logits, dtype=torch.int64),
        logits_slots=of(num_logits, dtype=torch.int64),
        logits_positions=of(num_logits),
    )


def assert_same(left, right) -> None:
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        for x, y in zip(*((a, b) if isinstance(a, tuple) else ((a,), (b,)))):
            assert torch.equal(x, y), field.name


@needs_library
@pytest.mark.parametrize("seed", range(12))
def test_inputs_draws_and_rows_are_the_references(seed):
    generator = torch.Generator().manual_seed(seed)
    num_drafts, padding = seed % 4, (seed // 2) % 3
    rows, step, num_tokens, num_logits = make_step(
        generator, num_drafts=num_drafts, padding=padding
    )
    num_rows = len(step.idx_mapping)
    # More verification rows may be executed than live ones.
    num_logits = min(num_logits + padding, num_tokens)
    results = []
    for build in both("build_inputs"):
        out = poisoned_inputs(num_rows, num_tokens, num_logits, axes=1 + seed % 2)
        build(rows, step, out)
        results.append(out)
    assert_same(*results)

    # Drafts that stand, some of them, and an unsound draw here and there.
    ids = torch.randint(0, 3, (num_logits,), generator=generator, dtype=torch.int32)
    status = torch.randint(0, 6, (num_logits,), generator=generator, dtype=torch.int32) // 3
    rows.fields[:, NEXT_TOKENS + 1 :] = torch.randint(
        0, 3, (R, num_drafts), generator=generator, dtype=torch.int32
    )
    packed = []
    for verify in both("verify"):
        out = torch.full((num_rows, num_drafts + 3), -7, dtype=torch.int32)
        verify(step, rows.fields, ids, status, out)
        packed.append(out)
    assert torch.equal(*packed)
    after = []
    for advance in both("advance"):
        moved = replace(rows, fields=rows.fields.clone(), tokens=rows.tokens.clone())
        advance(moved, step, packed[0][:, :-2], packed[0][:, -2])
        # The reserved row is nobody's.
        after.append((moved.fields[:-1], moved.tokens[:-1]))
    assert torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])
    assert not torch.equal(after[0][0], rows.fields[:-1])


@needs_library
def test_a_step_without_verification_rows_yields_nothing():
    step = StepArrays(ints(1, 3, 0), ints(0), ints(0, 3), ints(0, 0))
    empty = torch.zeros(0, dtype=torch.int32)
    for verify in both("verify"):
        out = torch.full((1, 3), -7, dtype=torch.int32)
        verify(step, torch.zeros(2, 5, dtype=torch.int32), empty, empty, out)
        assert not out.any()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_taken(dtype, index_dtype):
    table = torch.arange(7 * 5).view(7, 5).to(dtype)
    index = torch.tensor([6, 0, 0, 3], dtype=index_dtype)
    for take in both("take_rows"):
        out = torch.full((4, 5), torch.nan, dtype=dtype)
        take(table, index, out)
        assert torch.equal(out, table[index.long()])
        take(table, index[:0], out[:0])


@needs_library
def test_words_are_written_where_they_belong():
    for write in both("staged_write"):
        arena = torch.zeros(20, dtype=torch.int32)
        write(arena, ints(3, 15, 9, 0, 2, 2, 5, 11, 12, 13, 14, 15), 3)
        right = torch.zeros(20, dtype=torch.int32)
        right[3:5], right[9:12] = ints(11, 12), ints(13, 14, 15)
        assert torch.equal(arena, right)


@needs_library
def test_blocks_of_every_pool_are_zeroed():
    for zero in both("zero_blocks"):
        pools = [torch.ones(5, 2, 3), torch.ones(5, 7, dtype=torch.uint8)]
        zero(pools, ints(4, 1))
        for pool in pools:
            assert pool.flatten(1).any(1).tolist() == [True, False, True, True, False]
        zero(pools, ints())


def test_without_a_library_the_reference_serves(monkeypatch):
    monkeypatch.setattr("pelton.ops.step_kernels.library", lambda: None)
    from pelton.ops.verify import verify

    assert step_kernel("verify", "cpu") is verify
