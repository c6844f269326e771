"""Batches made of pieces of a batch: row maps, inputs, and whole layers run in two halves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.batch import BatchRig, new_row, padded, plan_of
from support.tiny import TinyEngine, tiny_llama

from pelton.attention.invariant_backend import InvariantBackend
from pelton.batch.derive import DerivedBatches, RowMap, token_range
from pelton.batch.input_batch import InputBatch, PartOf
from pelton.batch.prompt_embeds import PromptEmbedRows
from pelton.batch.recurrent_states import RecurrentStates
from pelton.batch.staged import StagedStep, Staging
from pelton.core.kv.groups import group_layers
from pelton.device.fake import FakeDevice
from pelton.device.protocol import Device
from pelton.forward.eager import EagerExecutor, allocate_buffers
from pelton.forward.stages import WholeModel
from pelton.layers.context import OneRank
from pelton.model_state.default import DefaultModelState
from pelton.model_state.segments import Segments
from pelton.ops.derive_inputs import derive_inputs
from pelton.runner.memory import allocate_kv


def declare_parts(count: int) -> Any:
    def declare(rig: BatchRig) -> list[DerivedBatches]:
        return [
            DerivedBatches(
                rig.device,
                rig.staging,
                f"part{i}",
                rig.make_buffers(f"part{i}"),
                rig.rows.reserved_slot,
            )
            for i in range(count)
        ]

    return declare


# (query length, computed before) of each row; decode rows first.
ROWS = [(1, 6), (1, 0), (3, 4), (5, 0), (9, 7)]
NUM_TOKENS = 19


def start_parts(
    device: Device, cuts: list[int], choose: Any = lambda live: live
) -> tuple[BatchRig, InputBatch, list[InputBatch]]:
    """The batch of ROWS and its parts between consecutive cuts, inputs queued."""
    rig = BatchRig(device, declare=declare_parts(len(cuts) - 1), block_sizes=(4, 8))
    rng = np.random.default_rng(1)
    rows, block, entries = [], 1, []
    for slot, (q, computed) in enumerate(ROWS):
        n = q + computed
        small = list(range(block, block + -(-n // 4)))
        large = list(range(block, block + -(-n // 8)))
        block += len(small)
        rows.append(new_row(slot, rng.integers(3, 1000, n), [small, large], num_computed=computed))
        entries.append((slot, q, 0, True, computed))
    parts: list[InputBatch] = []

    def describe(batch: InputBatch, staged: StagedStep) -> None:
        for i, (start, end) in enumerate(pairwise(cuts)):
            row_map = token_range(batch, start, end)
            part = rig.extra[i].describe(batch, row_map, staged, PartOf(i, len(cuts) - 1))
            parts.append(part)

    batch, _ = rig.start(plan_of(entries, new_rows=rows), choose, describe)
    for derived, part in zip(rig.extra, parts):
        derived.launch(part)
    return rig, batch, parts


CUTS = [[0, cut, NUM_TOKENS] for cut in range(NUM_TOKENS + 1)] + [
    [0, 3, 4, 4, 11, 17, 19],
    [0, 1, 2, 5, 10, 19],
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_parts_hold_the_parents_tokens_in_order(cuts):
    """Every cut: at row ends, within rows, empty parts; two derived rows of one slot."""
    rig, batch, parts = start_parts(FakeDevice(), cuts)
    read = rig.read
    for name in ("input_ids", "is_padding"):
        whole = read(getattr(batch.inputs, name))
        pieces = [read(getattr(part.inputs, name)) for part in parts]
        assert np.concatenate(pieces).tolist() == whole.tolist(), name
    positions = np.concatenate([read(part.inputs.positions) for part in parts], axis=1)
    assert positions.tolist() == read(batch.inputs.positions).tolist()
    for group in range(2):
        pieces = [read(part.inputs.slot_mappings[group]) for part in parts]
        assert np.concatenate(pieces).tolist() == read(batch.inputs.slot_mappings[group]).tolist()
    ends = np.cumsum([q for q, _ in ROWS])
    for index, (part, (start, end)) in enumerate(zip(parts, pairwise(cuts))):
        pieces = [
            (slot, max(start, at - q), min(end, at))
            for slot, ((q, _), at) in enumerate(zip(ROWS, ends.tolist()))
            if max(start, at - q) < min(end, at)
        ]
        lens = [last - first for _, first, last in pieces]
        seq_lens = [sum(ROWS[slot]) - (int(ends[slot]) - last) for slot, _, last in pieces]
        assert part.num_rows == len(pieces)
        assert part.num_tokens == end - start
        assert (part.num_logits, part.layout) == (0, PartOf(index, len(parts)))
        assert part.parent is batch
        assert part.query_len_np.tolist() == lens
        assert part.seq_len_bound_np.tolist() == read(part.inputs.seq_lens).tolist() == seq_lens
        assert read(part.step.query_start_loc).tolist() == [0, *np.cumsum(lens)]
        assert read(part.step.live).tolist() == [len(pieces), end - start, 0]
        slots = [slot for slot, *_ in pieces]
        assert read(part.step.idx_mapping).tolist() == part.slots_np.tolist() == slots
        assert [ref.slot for ref in part.refs] == slots
        assert lens[: part.num_decode_rows] == [1] * part.num_decode_rows
        assert part.descriptor.max_query_len == max(lens, default=0)
        assert part.descriptor.max_seq_len == max(seq_lens, default=0)
        for group, size in enumerate((4, 8)):
            table = read(part.inputs.block_tables[group])
            parent = read(batch.inputs.block_tables[group])
            for i, slot in enumerate(slots):
                n = -(-seq_lens[i] // size)
                assert table[i, :n].tolist() == parent[slot, :n].tolist()


def test_a_map_that_reorders_and_repeats_rows():
    rig = BatchRig(FakeDevice(), declare=declare_parts(1))
    rows = [new_row(s, range(10 * s, 10 * s + 6), [[2 * s + 1, 2 * s + 2]]) for s in range(3)]
    parts = []
    row_map = RowMap(*np.array([[2, 0, 2], [1, 0, 3], [2, 1, 3]], np.int32))

    def describe(batch: InputBatch, staged: StagedStep) -> None:
        parts.append(rig.extra[0].describe(batch, row_map, staged, PartOf(0, 1)))

    rig.start(plan_of([(s, 6, 0, False, 0) for s in range(3)], new_rows=rows), describe=describe)
    (part,) = parts
    rig.extra[0].launch(part)
    assert rig.read(part.inputs.input_ids).tolist() == [21, 22, 0, 23, 24, 25]
    assert rig.read(part.inputs.seq_lens).tolist() == [3, 1, 6]
    assert rig.read(part.inputs.slot_mappings[0]).tolist() == [21, 22, 4, 23, 24, 25]
    assert part.num_decode_rows == 0, "single rows count only where they come first"


@pytest.mark.parametrize("cut", [0, 1, 6, 11, NUM_TOKENS])
def test_derived_padding_touches_nothing(cut):
    """Case 7: padded rows of a derived batch are the reserved row, padded tokens have slot -1, and
    the header that the host sent is left as it was."""
    rig, batch, parts = start_parts(FakeDevice(), [0, cut, NUM_TOKENS], padded(6, 24))
    assert rig.read(batch.inputs.is_padding).sum() == 24 - NUM_TOKENS
    header = rig.read(rig.staging.header_tensor).copy()
    for derived, part in zip(rig.extra, parts):
        step, inputs = derived._buffers.views(padded(6, 24)(part.descriptor), 0)
        for tensor in (inputs.input_ids, inputs.seq_lens, *inputs.slot_mappings):
            rig.device.launch(torch.Tensor.fill_, tensor, 1000)
        row_map = derived._map.tensor.view(3, -1)[:, :6]
        rig.device.launch(derive_inputs, batch.step, batch.inputs, row_map, step, inputs)
        n, t = part.num_rows, part.num_tokens
        assert rig.read(step.idx_mapping)[n:].tolist() == [rig.rows.reserved_slot] * (6 - n)
        assert rig.read(inputs.seq_lens)[n:].tolist() == [0] * (6 - n)
        assert rig.read(inputs.input_ids)[t:].tolist() == [0] * (24 - t)
        assert rig.read(inputs.is_padding).tolist() == [False] * t + [True] * (24 - t)
        assert (rig.read(inputs.positions)[:, t:] == 0).all()
        for group in range(2):
            assert (rig.read(inputs.slot_mappings[group])[t:] == -1).all()
            assert (rig.read(inputs.block_tables[group])[n:] == 0).all()
    assert (rig.read(rig.staging.header_tensor) == header).all()


@pytest.mark.parametrize("cuts", [[0, c, NUM_TOKENS] for c in (0, 1, 4, 8, 13, 18, 19)], ids=str)
def test_layers_on_two_halves_equal_layers_on_the_whole(cuts):
    """Bit for bit, with kernels whose sums do not depend on the batch. The halves run one after the
    other, all layers each, over KV of earlier steps; a row cut in two reads its first piece."""
    engine = TinyEngine(
        tiny_llama(), attention_backend="invariant", batch_invariant=True, num_blocks=40
    )
    model = engine.worker.model
    device = FakeDevice()
    rig, batch, parts = start_parts(device, cuts)
    layers = model.kv_layers(4)
    torch.manual_seed(0)
    backend = InvariantBackend()
    no_embeds = PromptEmbedRows(
        device, is_enabled=False, max_tokens=0, hidden_size=1, dtype=torch.float32
    )
    earlier = [torch.randn(40, 4, 2, 2, 16) for _ in layers]

    def run(pieces: list[InputBatch]) -> tuple[np.ndarray, list[np.ndarray]]:
        kv = allocate_kv(device, backend, layers, 40)
        for pool, values in zip(kv, earlier):
            device.copy_to_device(pool, values)
        states = RecurrentStates(device, layers, num_rows=1, num_drafts=0)
        state = DefaultModelState(
            device,
            engine.config.model,
            backend,
            group_layers(layers),
            states,
            Segments(device, Staging(device, 1), num_rows=64, max_tokens=64),
            dtype=torch.float32,
            max_tokens=64,
            max_model_len=64,
        )
        buffers = allocate_buffers(device, model.widths(), 64, torch.float32)
        executor = EagerExecutor(
            device,
            model,
            state,
            WholeModel(device, model, no_embeds),
            buffers,
            kv,
            states,
            OneRank(),
        )
        hidden = []
        for piece in pieces:
            prepared = executor.prepare(piece)
            executor.run(prepared)
            hidden.append(rig.read(executor.finish(prepared)).copy())
        return np.concatenate(hidden), [rig.read(pool) for pool in kv]

    whole, whole_kv = run([batch])
    assert np.isfinite(whole).all()
    halves, halves_kv = run(parts)
    assert (whole == halves).all()
    assert all((a == b).all() for a, b in zip(whole_kv, halves_kv))
