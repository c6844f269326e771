"""Random steps, and what the kernels around a model's layers must make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from pelton.ops.advance import advance
from pelton.ops.build_inputs import build_inputs
from pelton.ops.ngram_propose import ngram_propose
from pelton.ops.step_tensors import (
    NEXT_TOKENS,
    NUM_COMPUTED,
    TOTAL_LEN,
    InputTensors,
    RowTensors,
    StepArrays,
)
from pelton.ops.store_drafts import store_drafts
from pelton.ops.verify import verify

L, R, SIZES, WINDOWS = 40, 6, (4, 3), (None, 7)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_step(
    generator: torch.Generator, *, num_drafts: int, padding: int
) -> tuple[RowTensors, StepArrays, int, int]:
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


def poisoned_inputs(
    num_rows: int, num_tokens: int, num_logits: int, axes: int, sizes: tuple[int, ...] = SIZES
) -> InputTensors:
    def of(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int64).to(dtype)

    return InputTensors(
        input_ids=of(num_tokens),
        positions=of(axes, num_tokens + 3, dtype=torch.int64)[:, :num_tokens],
        seq_lens=of(num_rows),
        is_padding=of(num_tokens, dtype=torch.bool),
        block_tables=tuple(of(num_rows, L)[:, : -(-L // size)] for size in sizes),
        slot_mappings=tuple(of(num_tokens, dtype=torch.int64) for _ in sizes),
        logits_indices=of(num_logits, dtype=torch.int64),
        logits_slots=of(num_logits, dtype=torch.int64),
        logits_positions=of(num_logits),
    )


def assert_same(left: InputTensors, right: InputTensors) -> None:
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        for x, y in zip(*((a, b) if isinstance(a, tuple) else ((a,), (b,)))):
            assert torch.equal(x, y.cpu()), field.name


def check_step(kernel_of: Callable[[str], Any], seed: int, device: str = "cpu") -> None:
    """kernel_of(op): build_inputs, verify and advance, against the references on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts, padding = seed % 4, (seed // 2) % 3
    rows, step, num_tokens, num_logits = make_step(
        generator, num_drafts=num_drafts, padding=padding
    )
    if seed % 5 == 4:
        # A recurrent model has no tables.
        rows = replace(rows, block_tables=(), block_sizes=(), windows=())
    num_rows = len(step.idx_mapping)
    # More verification rows may be executed than live ones.
    num_logits = min(num_logits + padding, num_tokens)
    shape = (num_rows, num_tokens, num_logits, 1 + seed % 2, rows.block_sizes)
    right = poisoned_inputs(*shape)
    build_inputs(rows, step, right)
    out = on(device, poisoned_inputs(*shape))
    kernel_of("build_inputs")(on(device, rows), on(device, step), out)
    assert_same(right, out)

    # Drafts that stand, some of them, and an unsound draw here and there.
    ids = torch.randint(0, 3, (num_logits,), generator=generator, dtype=torch.int32)
    status = torch.randint(0, 6, (num_logits,), generator=generator, dtype=torch.int32) // 3
    rows.fields[:, NEXT_TOKENS + 1 :] = torch.randint(
        0, 3, (R, num_drafts), generator=generator, dtype=torch.int32
    )
    packed = torch.full((num_rows, num_drafts + 3), -7, dtype=torch.int32)
    found = packed.to(device, copy=True)
    verify(step, rows.fields, ids, status, packed)
    kernel_of("verify")(
        on(device, step), rows.fields.to(device), ids.to(device), status.to(device), found
    )
    assert torch.equal(packed, found.cpu())

    moved = on(device, replace(rows, fields=rows.fields.clone(), tokens=rows.tokens.clone()))
    before = rows.fields.clone()
    kernel_of("advance")(moved, on(device, step), found[:, :-2], found[:, -2])
    advance(rows, step, packed[:, :-2], packed[:, -2])
    # The reserved row is nobody's.
    assert torch.equal(moved.fields[:-1].cpu(), rows.fields[:-1])
    assert torch.equal(moved.tokens[:-1].cpu(), rows.tokens[:-1])
    assert not torch.equal(before[:-1], rows.fields[:-1])


def check_drafts(kernel_of: Callable[[str], Any], seed: int, device: str = "cpu") -> None:
    """ngram_propose and store_drafts against the references."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts = 1 + seed % 5
    rows, step, _, _ = make_step(generator, num_drafts=num_drafts, padding=seed % 3)
    tokens = torch.randint(0, 3, rows.tokens.shape, generator=generator, dtype=torch.int32)
    rows = replace(rows, tokens=tokens)
    rows.fields[:, TOTAL_LEN] = torch.randint(0, L + 1, (R,), generator=generator).int()
    num_rows = len(step.idx_mapping)
    args = (1 + seed % 2, 2 + seed % 3, L - seed % 2)
    right = torch.full((num_rows, num_drafts), -7, dtype=torch.int32)
    found = right.to(device, copy=True)
    ngram_propose(rows, step, right, *args)
    kernel_of("ngram_propose")(on(device, rows), on(device, step), found, *args)
    assert torch.equal(right, found.cpu())

    right[seed % num_rows, seed % num_drafts] = 2**31 - 1
    sampled = torch.randint(0, 2, (num_rows, 2), generator=generator, dtype=torch.int32)[:, 1]
    counts = torch.full((num_rows,), -7, dtype=torch.int32)
    moved, found = (
        on(device, replace(rows, fields=rows.fields.clone())),
        counts.to(device, copy=True),
    )
    kernel_of("store_drafts")(
        moved, on(device, step), _strided(device, sampled), right.to(device), 2, found
    )
    store_drafts(rows, step, sampled, right, 2, counts)
    assert torch.equal(counts, found.cpu())
    assert torch.equal(moved.fields[:-1].cpu(), rows.fields[:-1])


def check_no_verification_rows(verify: Any, device: str = "cpu") -> None:
    step = on(device, StepArrays(ints(1, 3, 0), ints(0), ints(0, 3), ints(0, 0)))
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    out = torch.full((1, 3), -7, dtype=torch.int32, device=device)
    verify(step, torch.zeros(2, 5, dtype=torch.int32, device=device), empty, empty, out)
    assert not out.any()


def check_staged_write(write: Any, device: str = "cpu") -> None:
    arena = torch.zeros(4000, dtype=torch.int32, device=device)
    long = list(range(2500))
    words = [3, 15, 9, 1000, 0, 2, 2, 5, 2505, 11, 12, 13, 14, 15, *long]
    write(arena, ints(*words).to(device), 4)
    right = torch.zeros(4000, dtype=torch.int32)
    right[3:5], right[9:12], right[1000:3500] = ints(11, 12), ints(13, 14, 15), ints(*long)
    assert torch.equal(arena.cpu(), right)


def on(device: str, value: Any) -> Any:
    """The dataclass with its tensors on a device."""
    moved = {}
    for field in fields(value):
        one = getattr(value, field.name)
        if isinstance(one, torch.Tensor):
            # Strided ones keep their strides.
            one = one if device == "cpu" else _strided(device, one)
        elif isinstance(one, tuple) and one and isinstance(one[0], torch.Tensor):
            one = tuple(item if device == "cpu" else _strided(device, item) for item in one)
        moved[field.name] = one
    return replace(value, **moved)


def _strided(device: str, tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base if tensor._base is not None else tensor
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
