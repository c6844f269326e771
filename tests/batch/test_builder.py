"""From plan to inputs, verification and advance, against plain Python; specs/core.md 1.5.

Cases 1 and 7 of bug_reports.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.batch import BatchRig, new_row, padded, plan_of
from support.row_model import ModelRow, advance_model, expected_inputs, expected_results

from pelton.batch.input_batch import InputBatch, RowKind
from pelton.core.descriptor import Descriptor
from pelton.core.plan import BlockAppend, SlotRef, StepPlan
from pelton.device.cpu import CPUDevice
from pelton.device.cuda import CUDADevice
from pelton.device.fake import FakeDevice
from pelton.device.protocol import Device
from pelton.ops.advance import advance
from pelton.ops.step_tensors import NEXT_TOKENS
from pelton.ops.verify import verify

DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: CPUDevice(1),
    "fake": FakeDevice,
    "cuda": CUDADevice,
}
NAMES = ["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)]


def poison(rig: BatchRig, batch: InputBatch) -> None:
    """What build_inputs must overwrite, whole."""
    for tensor in inputs_of(batch):
        value = True if tensor.dtype == torch.bool else 1_000_000
        rig.device.launch(torch.Tensor.fill_, tensor, value)


def inputs_of(batch: InputBatch) -> list[torch.Tensor]:
    inputs = batch.inputs
    return [
        inputs.input_ids,
        inputs.positions,
        inputs.seq_lens,
        inputs.is_padding,
        *inputs.block_tables,
        *inputs.slot_mappings,
        inputs.logits_indices,
        inputs.logits_slots,
        inputs.logits_positions,
    ]


def assert_inputs(rig: BatchRig, batch: InputBatch, expected: dict[str, Any]) -> None:
    for name in ("live", "idx_mapping", "query_start_loc", "cu_num_logits"):
        assert rig.read(getattr(batch.step, name)).tolist() == expected[name], name
    for name in ("input_ids", "seq_lens", "is_padding"):
        assert rig.read(getattr(batch.inputs, name)).tolist() == expected[name], name
    for axis in rig.read(batch.inputs.positions).tolist():
        assert axis == expected["positions"]
    for name in ("logits_indices", "logits_slots", "logits_positions"):
        assert rig.read(getattr(batch.inputs, name)).tolist() == expected[name], name
    for name in ("block_tables", "slot_mappings"):
        actual = [rig.read(tensor).tolist() for tensor in getattr(batch.inputs, name)]
        assert actual == expected[name], name


def run_head(rig: BatchRig, batch: InputBatch, drawn: list[int], status: list[int]) -> np.ndarray:
    """verify and advance as the sampling head queues them; packed results of executed length."""
    device, n = rig.device, len(drawn)
    out = device.empty((batch.descriptor.num_rows, rig.num_drafts + 3), torch.int32)
    ids, flags = device.empty((n,), torch.int32), device.empty((n,), torch.int32)
    device.copy_to_device(ids, torch.tensor(drawn, dtype=torch.int32))
    device.copy_to_device(flags, torch.tensor(status, dtype=torch.int32))
    rows = rig.row_tensors
    device.launch(verify, batch.step, rows.fields, ids, flags, out)
    device.launch(advance, rows, batch.step, out[:, :-2], out[:, -2])
    return rig.read(out)


def assert_rows(rig: BatchRig, model: dict[int, ModelRow]) -> None:
    fields, tokens = rig.read(rig.row_tensors.fields), rig.read(rig.row_tensors.tokens)
    for slot, row in model.items():
        assert fields[slot].tolist() == row.fields(), slot
        assert tokens[slot, : len(row.tokens)].tolist() == row.tokens, slot


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_rows_that_stay_the_same_keep_their_header(device):
    """What is kept of a step with one token a row is not taken for one of other rows, and nothing
    that came between changes it."""
    rig = BatchRig(DEVICES[device](), num_drafts=1)
    rows = [new_row(slot, [5] * 4, [[1 + slot]] * len(rig.tables.block_sizes)) for slot in range(3)]
    one_each = [[0, 2], [0, 2], [2, 0], [2, 0], [1, 0, 2], [0, 2], [0, 2]]
    chunk = [(1, 2, 1, True, 3), (0, 3, 0, False, 0)]
    lines = [[(slot, 1, 0, True, 3) for slot in slots] for slots in one_each]
    for step, line in enumerate([lines[0], chunk, *lines, chunk, lines[0]]):
        plan = plan_of(line, new_rows=rows if step == 0 else (), step=step)
        batch, staged = rig.start(plan)
        n, counts = len(line), [row[1] for row in line]
        logits = [(1 + row[2]) * row[3] for row in line]
        assert rig.read(batch.step.live).tolist() == [n, sum(counts), sum(logits)]
        assert rig.read(batch.step.idx_mapping)[:n].tolist() == [row[0] for row in line]
        assert rig.read(batch.step.query_start_loc).tolist() == np.cumsum([0, *counts]).tolist()
        assert rig.read(batch.step.cu_num_logits).tolist() == np.cumsum([0, *logits]).tolist()
        assert batch.slots_np.tolist() == [row[0] for row in line]
        assert batch.num_logits_np.tolist() == logits
        assert batch.descriptor.uniform_query_len == (1 if line is not chunk else 0)
        staged.release()


class Random:
    """Random requests that come, are fed in chunks, decode with drafts, and go."""

    def __init__(self, seed: int, num_drafts: int, block_sizes: tuple[int, ...], length: int):
        self.rng = np.random.default_rng(seed)
        self.num_drafts, self.block_sizes, self.length = num_drafts, block_sizes, length
        self.model: dict[int, ModelRow] = {}
        self.next_block = 1

    def integer(self, low: int, high: int) -> int:
        """In [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def grown(self, row: ModelRow, slot: int, seq_len: int) -> list[BlockAppend]:
        """Blocks that the row lacks for seq_len tokens."""
        appends = []
        for group, size in enumerate(self.block_sizes):
            have = len(row.blocks[group])
            missing = -(-seq_len // size) - have
            if missing > 0:
                ids = np.arange(self.next_block, self.next_block + missing, dtype=np.int32)
                self.next_block += missing
                row.blocks[group] += ids.tolist()
                appends.append(
                    BlockAppend(ref=SlotRef(slot, 1), group=group, first=have, block_ids=ids)
                )
        return appends

    def plan(self, step: int, num_slots: int) -> StepPlan:
        drafts, rng = self.num_drafts, self.rng
        for slot in list(self.model):
            is_full = len(self.model[slot].tokens) + 2 + 2 * drafts >= self.length
            if is_full or rng.random() < 0.1:
                del self.model[slot]
        new_rows = []
        for slot in rng.permutation(num_slots).tolist():
            if slot in self.model or rng.random() < 0.4:
                continue
            n = self.integer(1, self.length // 2)
            tokens = rng.integers(1, 1000, n).tolist()
            largest = max(self.block_sizes)
            hit = largest * self.integer(0, (n - 1) // largest)
            prompt_len = self.integer(1, n)
            row = ModelRow(
                tokens, prompt_len, n, hit, [-1] * drafts, [[] for _ in self.block_sizes]
            )
            self.grown(row, slot, n)
            self.model[slot] = row
            new_rows.append(
                new_row(slot, tokens, row.blocks, prompt_len=prompt_len, num_computed=hit)
            )
        rows, appends = [], []
        for slot in rng.permutation(sorted(self.model)).tolist():
            if rows and rng.random() < 0.2:
                continue
            row = self.model[slot]
            left = len(row.tokens) - row.computed
            q = left if rng.random() < 0.5 else self.integer(1, left)
            num_drafts = self.integer(0, drafts) if q == left else 0
            slack = self.integer(0, drafts) if row.computed >= row.prefill_len else 0
            bound = row.computed + slack
            appends += self.grown(row, slot, bound + q + num_drafts)
            rows.append((slot, q + num_drafts, num_drafts, q == left, bound))
        rows.sort(key=lambda r: r[1])
        return plan_of(rows, new_rows=new_rows, block_appends=appends, step=step)


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_random_steps_equal_plain_python(num_drafts, device):
    """Cases 1 and 7. Chunks, prefix hits, resumed rows, right, wrong and placeholder drafts, padded
    rows and tokens, rows that change hands, four KV groups, two of them with windows: no block that
    no query token of a row can see is in the batch."""
    sizes, windows, length, num_slots = (4, 8, 4, 2), (None, None, 6, 1), 40, 6
    rig = BatchRig(
        DEVICES[device](),
        max_num_seqs=num_slots,
        max_model_len=length,
        max_tokens=200,
        block_sizes=sizes,
        windows=windows,
        num_drafts=num_drafts,
        num_position_axes=2,
    )
    random = Random(num_drafts, num_drafts, sizes, length)
    accepted = 0
    for step in range(40):
        plan = random.plan(step, num_slots)
        choose = padded(random.integer(0, num_slots), random.integer(0, 200))
        before = copy.deepcopy(random.model)
        batch, staged = rig.start(plan, choose)
        poison(rig, batch)
        rig.builder.launch(batch)
        assert_inputs(
            rig,
            batch,
            expected_inputs(
                before,
                plan,
                sizes,
                num_rows=batch.descriptor.num_rows,
                num_tokens=batch.descriptor.num_tokens,
                reserved_slot=rig.rows.reserved_slot,
                windows=windows,
            ),
        )
        assert_rows(rig, random.model)
        drawn, status = [], []
        for ref, count in zip(plan.refs, batch.num_logits_np.tolist()):
            for i in range(count):
                drafts = random.model[ref.slot].drafts
                is_right = i < len(drafts) and drafts[i] >= 0 and random.rng.random() < 0.7
                drawn.append(drafts[i] if is_right else random.integer(0, 999))
                status.append(random.integer(0, 3) if random.rng.random() < 0.2 else 0)
        expected = expected_results(random.model, plan, drawn, status, 1 + num_drafts)
        packed = run_head(rig, batch, drawn, status)
        assert packed[: plan.num_rows].tolist() == expected.tolist()
        assert (packed[plan.num_rows :] == 0).all(), "padding rows yield nothing"
        accepted += int((expected[:, -2] > 1).sum())
        advance_model(random.model, plan, expected)
        assert_rows(rig, random.model)
        if num_drafts:
            for ref in plan.refs:
                row = random.model[ref.slot]
                row.drafts = random.rng.integers(-1, 1000, num_drafts).tolist()
                if random.rng.random() < 0.2:
                    row.drafts = [-1] * num_drafts
                target = rig.row_tensors.fields[ref.slot, NEXT_TOKENS + 1 :]
                rig.device.copy_to_device(target, torch.tensor(row.drafts, dtype=torch.int32))
        staged.release()
    assert accepted > 0 or num_drafts == 0


@pytest.mark.parametrize("n", [3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_lengths_around_a_block(n):
    """k * block - 1, k * block, k * block + 1: the decode token goes where the prompt ends."""
    rig = BatchRig(FakeDevice())
    blocks = list(range(10, 10 + -(-(n + 1) // 4)))
    prompt = list(range(100, 100 + n))
    rig.start(plan_of([(2, n, 0, True, 0)], new_rows=[new_row(2, prompt, [blocks])]))[1].release()
    batch, staged = rig.start(plan_of([(2, n, 0, True, 0)]))
    slots = [blocks[i // 4] * 4 + i % 4 for i in range(n)]
    assert rig.read(batch.inputs.slot_mappings[0]).tolist() == slots
    assert rig.read(batch.inputs.block_tables[0])[0].tolist() == blocks[: -(-n // 4)]
    run_head(rig, batch, [7], [0])
    staged.release()
    batch, staged = rig.start(plan_of([(2, 1, 0, True, n)]))
    assert rig.read(batch.inputs.input_ids).tolist() == [7]
    assert rig.read(batch.inputs.positions).tolist() == [[n]]
    assert rig.read(batch.inputs.seq_lens).tolist() == [n + 1]
    assert rig.read(batch.inputs.slot_mappings[0]).tolist() == [blocks[n // 4] * 4 + n % 4]


def test_worked_example_of_the_core_spec():
    """specs/core.md 1.5c, literally: A in row 7, B in row 2; launched ahead of the tokens."""
    device = FakeDevice()
    rig = BatchRig(device, max_num_seqs=8)
    a_tokens = list(range(10))  # a0..a9; 9 are computed
    b_prompt = [20, 21, 22, 23, 24, 25]
    new_rows = [
        new_row(7, a_tokens, [[1, 2, 3, 4]], prompt_len=5, num_computed=9),
        new_row(2, b_prompt, [[5, 6]]),
    ]
    plans = [
        plan_of([(7, 1, 0, True, 9), (2, 4, 0, False, 0)], new_rows=new_rows, step=0),
        plan_of([(7, 1, 0, True, 10), (2, 2, 0, True, 4)], step=1),
        plan_of([(7, 1, 0, True, 11), (2, 1, 0, True, 6)], step=2),
    ]
    draws = [[110], [111, 206], [112, 207]]
    seen = []
    for plan, drawn in zip(plans, draws):
        batch, staged = rig.start(plan)
        n = len(drawn)
        kept = device.host_buffer((3, 6), torch.int32)
        for row, tensor in enumerate(
            (batch.step.idx_mapping, batch.inputs.input_ids, batch.inputs.seq_lens)
        ):
            device.copy_to_host(kept[row, : len(tensor)], tensor)
        out = device.empty((2, 3), torch.int32)
        ids, flags = device.empty((n,), torch.int32), device.zeros((n,), torch.int32)
        device.copy_to_device(ids, torch.tensor(drawn, dtype=torch.int32))
        device.launch(verify, batch.step, rig.row_tensors.fields, ids, flags, out)
        device.launch(advance, rig.row_tensors, batch.step, out[:, :-2], out[:, -2])
        results = device.host_buffer((2, 3), torch.int32)
        device.copy_to_host(results, out)
        staged.release()
        seen.append((kept, results, plan.num_tokens))
    assert device.num_done == 0, "all three steps were launched before the first one ran"
    device.synchronize()
    facts = [
        (kept[0, :2].tolist(), kept[1, :n].tolist(), kept[2, :2].tolist(), results.tolist())
        for kept, results, n in seen
    ]
    assert facts == [
        ([7, 2], [9, 20, 21, 22, 23], [10, 4], [[110, 1, 0], [0, 0, 0]]),
        ([7, 2], [110, 24, 25], [11, 6], [[111, 1, 0], [206, 1, 0]]),
        ([7, 2], [111, 206], [12, 7], [[112, 1, 0], [207, 1, 0]]),
    ]
    fields, tokens = rig.read(rig.row_tensors.fields), rig.read(rig.row_tensors.tokens)
    assert fields[7].tolist() == [5, 10, 13, 12, 112]
    assert fields[2].tolist() == [6, 6, 8, 7, 207]
    assert tokens[7, :13].tolist() == [*a_tokens, 110, 111, 112]
    assert tokens[2, :8].tolist() == [*b_prompt, 206, 207]


def test_worked_example_of_the_speculation_spec():
    """specs/context_parallel_speculation_kvshare.md 2.3 (K = 3), rows in Pelton's order; a chunk
    that is not final has no verification row here."""
    rig = BatchRig(FakeDevice(), max_model_len=128, max_tokens=128, num_drafts=3)
    a, b, c, t1 = 501, 502, 503, 601
    rows = [
        new_row(0, range(100, 111), [range(1, 6)], prompt_len=5, num_computed=10),
        new_row(1, range(200, 209), [range(6, 10)], num_computed=8),
        new_row(3, range(400, 420), [range(20, 25)]),
        new_row(2, range(300, 360), [range(30, 45)]),
    ]
    plan = plan_of(
        [(0, 4, 3, True, 10), (1, 4, 3, True, 8), (3, 20, 0, True, 0), (2, 50, 0, False, 0)],
        new_rows=rows,
    )
    rig.start(plan)[1].release()
    drafts = rig.row_tensors.fields[0, NEXT_TOKENS + 1 :]
    rig.device.copy_to_device(drafts, torch.tensor([a, b, c], dtype=torch.int32))
    plan.new_rows = []
    batch, staged = rig.start(plan)
    ids = rig.read(batch.inputs.input_ids).tolist()
    assert ids[:4] == [110, a, b, c]
    assert ids[4] == 208, "the prompt's last token stays where it was"
    assert ids[8:28] == list(range(400, 420))
    assert ids[28:] == list(range(300, 350))
    assert rig.read(batch.step.cu_num_logits).tolist() == [0, 4, 8, 9, 9]
    assert rig.read(batch.inputs.logits_indices).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 27]
    assert rig.read(batch.inputs.logits_slots).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 3]
    drawn = [a, t1, 900, 901, 602, 0, 0, 0, 603]
    packed = run_head(rig, batch, drawn, [0] * 9)
    assert packed.tolist() == [
        [a, t1, 0, 0, 2, 0],
        [602, 0, 0, 0, 1, 0],
        [603, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    fields = rig.read(rig.row_tensors.fields)
    # Cursors: row 0 by 4 - 2, row 1 by 4 - 3, row 3 by 20, row 2 by 50.
    assert fields[[0, 1, 3, 2], 3].tolist() == [12, 9, 20, 50]
    assert fields[[0, 1, 3, 2], 2].tolist() == [13, 10, 21, 60]
    assert fields[[0, 1, 3], NEXT_TOKENS].tolist() == [t1, 602, 603]
    staged.release()
    # The next step begins at t1, whose KV slot is the rejected draft b's.
    following, _ = rig.start(plan_of([(0, 1, 0, True, 13)]))
    assert rig.read(following.inputs.input_ids).tolist() == [t1]
    assert rig.read(following.inputs.positions).tolist() == [[12]]


def test_two_batch_rows_may_share_a_slot():
    rig = BatchRig(FakeDevice())
    new = new_row(3, [11, 12, 13, 14, 15], [[4, 5]])
    batch, _ = rig.start(plan_of([(3, 1, 0, False, 0), (3, 3, 0, False, 0)], new_rows=[new]))
    assert rig.read(batch.step.idx_mapping).tolist() == [3, 3]
    assert rig.read(batch.inputs.input_ids).tolist() == [11, 11, 12, 13]
    assert rig.read(batch.inputs.positions).tolist() == [[0, 0, 1, 2]]
    assert rig.read(batch.inputs.slot_mappings[0]).tolist() == [16, 16, 17, 18]
    assert rig.read(batch.inputs.block_tables[0]).tolist() == [[4], [4]]


def test_a_former_owners_blocks_are_not_in_the_batch():
    """Case 7. A row's block table keeps what its last owner had; a kernel that reads whole blocks
    must not be led there."""
    rig = BatchRig(FakeDevice())
    long = new_row(0, range(1, 33), [range(1, 9)])
    rig.start(plan_of([(0, 32, 0, True, 0)], new_rows=[long]))[1].release()
    short = new_row(0, [5], [[20]])
    other = new_row(1, range(1, 31), [range(30, 38)])
    plan = plan_of([(0, 1, 0, True, 0), (1, 30, 0, True, 0)], new_rows=[short, other])
    batch, _ = rig.start(plan)
    table = rig.read(batch.inputs.block_tables[0])
    assert table[0].tolist() == [20] + [0] * 7
    assert table[1].tolist() == list(range(30, 38))


def test_host_facts_of_a_batch():
    rig = BatchRig(CPUDevice(1), num_drafts=2)
    rows = [new_row(slot, [1] * 9, [[1, 2, 3, 4]]) for slot in range(4)]
    plan = plan_of(
        [
            (1, 1, 0, True, 9),  # decode
            (0, 1, 0, True, 8),  # last prompt token
            (2, 3, 2, True, 12),  # verify
            (3, 5, 0, False, 0),  # chunk
        ],
        new_rows=rows,
        step=17,
    )
    plan.bounds_are_exact = False
    batch, _ = rig.start(plan, padded(6, 16))
    assert (batch.step_id, batch.num_rows, batch.num_tokens, batch.num_logits) == (17, 4, 10, 5)
    assert batch.refs == tuple(plan.refs)
    assert batch.slots_np.tolist() == [1, 0, 2, 3]
    assert batch.num_logits_np.tolist() == [1, 1, 3, 0]
    assert batch.row_kind_np.tolist() == [
        RowKind.DECODE,
        RowKind.PREFILL,
        RowKind.VERIFY,
        RowKind.PREFILL,
    ]
    assert batch.seq_len_bound_np.tolist() == [10, 9, 15, 5]
    assert batch.num_decode_rows == 2
    assert not batch.bounds_are_exact
    assert (batch.layout, batch.parent) == ("global", None)
    d = batch.descriptor
    assert (d.num_rows, d.num_tokens, d.max_query_len, d.max_seq_len) == (6, 16, 5, 15)
    assert d.uniform_query_len == 0
    assert len(batch.step.query_start_loc) == len(batch.step.cu_num_logits) == 7


@pytest.mark.parametrize(("lens", "uniform"), [([1, 1, 1], 1), ([3, 3], 3), ([1, 3], 0), ([4], 4)])
def test_uniform_query_length(lens, uniform):
    rig = BatchRig(CPUDevice(1))
    rows = [new_row(slot, [1] * 9, [[1, 2, 3]]) for slot in range(len(lens))]
    plan = plan_of([(i, n, 0, False, 0) for i, n in enumerate(lens)], new_rows=rows)
    batch, _ = rig.start(plan)
    assert batch.descriptor.uniform_query_len == uniform
    assert batch.bounds_are_exact


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(7, 8), (6, 65), (1, 8), (6, 2)])
def test_executed_sizes_that_do_not_fit_are_refused(num_rows, num_tokens):
    """Larger than the buffers, or smaller than what is live: views would silently be short."""
    rig = BatchRig(CPUDevice(1))
    rows = [new_row(slot, [1] * 9, [[1, 2, 3]]) for slot in range(2)]

    def choose(live: Descriptor) -> Descriptor:
        return Descriptor(
            num_tokens=num_tokens,
            num_rows=num_rows,
            uniform_query_len=2,
            max_query_len=2,
            max_seq_len=2,
        )

    with pytest.raises(AssertionError, match="executed"):
        rig.start(plan_of([(i, 2, 0, False, 0) for i in range(2)], new_rows=rows), choose)


def test_padding_rows_change_the_reserved_row_alone():
    """Case 7. Graph sizes 4 and 8 with 3 and 5 real rows."""
    for live, executed in ((3, 4), (5, 8)):
        rig = BatchRig(FakeDevice(), max_num_seqs=8, num_drafts=1)
        rows = [new_row(slot, range(slot, slot + 5), [[2 * slot + 1, 2 * slot + 2]])
                for slot in range(8)]  # fmt: skip
        rig.start(plan_of([(s, 5, 0, True, 0) for s in range(8)], new_rows=rows), padded(8, 40))[
            1
        ].release()
        before = rig.read(rig.row_tensors.fields).copy(), rig.read(rig.row_tensors.tokens).copy()
        plan = plan_of([(s, 5, 0, True, 0) for s in range(live)])
        batch, _ = rig.start(plan, padded(executed, 40))
        assert batch.descriptor.num_rows == executed
        packed = run_head(rig, batch, list(range(70, 70 + live)), [0] * live)
        assert (packed[live:] == 0).all()
        fields, tokens = rig.read(rig.row_tensors.fields), rig.read(rig.row_tensors.tokens)
        assert (fields[live:8] == before[0][live:8]).all()
        assert (tokens[live:8] == before[1][live:8]).all()
        assert fields[:live, 2].tolist() == [6] * live
