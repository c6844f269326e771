"""One launch for a step's inputs and its first KV group, one more for each further group.

Programs have roles: a row of the batch, a tile of tokens, or a tile of verification rows. Each
derives what it needs from row state, so none waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.ops import step_tensors
from pelton.ops.step_tensors import InputTensors, RowTensors, StepArrays
from pelton.ops.triton_rows import num_bits, row_of

TOTAL_LEN = tl.constexpr(step_tensors.TOTAL_LEN)
NUM_COMPUTED = tl.constexpr(step_tensors.NUM_COMPUTED)
NEXT_TOKENS = tl.constexpr(step_tensors.NEXT_TOKENS)
PAD_SLOT = tl.constexpr(step_tensors.PAD_SLOT)
_TILE = 64


@triton.jit
def _row(
    program,
    fields,
    live,
    idx_mapping,
    query_start_loc,
    seq_lens,
    table,
    batch_table,
    fields_stride,
    table_stride,
    batch_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    slot = tl.load(idx_mapping + program).to(tl.int64)
    first_token = tl.load(query_start_loc + program)
    query_len = tl.load(query_start_loc + program + 1) - first_token
    computed = tl.load(fields + slot * fields_stride + NUM_COMPUTED)
    seq_len = tl.where(program < tl.load(live), computed + query_len, 0)
    if IS_FIRST:
        tl.store(seq_lens + program, seq_len)
    if HAS_GROUP:
        for start in range(0, width, BLOCK_W):
            w = start + tl.arange(0, BLOCK_W)
            # Past a row's last token its table may hold a former owner's blocks.
            in_use = (w < width) & (w * BLOCK_SIZE < seq_len)
            if WINDOW > 0:
                # Left of the window the host has given blocks back.
                in_use &= w * BLOCK_SIZE + BLOCK_SIZE > computed - (WINDOW - 1)
            block = tl.load(table + slot * table_stride + w, mask=in_use, other=0)
            place = batch_table + program.to(tl.int64) * batch_stride + w
            tl.store(place, block, mask=w < width)


@triton.jit(
    do_not_specialize=["width", "num_rows", "num_bits", "num_tokens", "num_logits"],
    do_not_specialize_on_alignment=["num_rows"],
)
def _build(
    fields,
    tokens,
    live,
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    input_ids,
    positions,
    seq_lens,
    is_padding,
    logits_indices,
    logits_slots,
    logits_positions,
    table,
    batch_table,
    slot_mapping,
    fields_stride,
    tokens_stride,
    positions_stride,
    table_stride,
    batch_stride,
    width,
    num_rows,
    num_bits,
    num_tokens,
    num_logits,
    NUM_AXES: tl.constexpr,
    NUM_NEXT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    program = tl.program_id(0)
    live_tokens = tl.load(live + 1)
    if program < num_rows:
        _row(
            program, fields, live, idx_mapping, query_start_loc, seq_lens, table, batch_table,
            fields_stride, table_stride, batch_stride, width, BLOCK_SIZE, WINDOW, IS_FIRST,
            HAS_GROUP, BLOCK_W,
        )  # fmt: skip
    elif program < num_rows + tl.cdiv(num_tokens, TILE):
        token = (program - num_rows) * TILE + tl.arange(0, TILE)
        exists = token < num_tokens
        is_live = token < live_tokens
        row = row_of(query_start_loc, token, num_rows, num_bits)
        slot = tl.load(idx_mapping + row).to(tl.int64)
        state = fields + slot * fields_stride
        position = tl.load(state + NUM_COMPUTED) + token - tl.load(query_start_loc + row)
        position = tl.where(is_live, position, 0)
        if IS_FIRST:
            # What lies before the last known token is read from the table; it and its drafts not.
            draft = position - (tl.load(state + TOTAL_LEN) - 1)
            column = tl.minimum(tl.maximum(draft, 0), NUM_NEXT - 1)
            newest = tl.load(state + NEXT_TOKENS + column)
            place = tokens + slot * tokens_stride + position
            known = tl.load(place, mask=is_live & (draft < 0), other=0)
            # A draft of -1 is a placeholder that verification rejects; embed anything legal.
            ids = tl.maximum(tl.where(draft < 0, known, newest), 0)
            tl.store(input_ids + token, tl.where(is_live, ids, 0), mask=exists)
            tl.store(is_padding + token, is_live == 0, mask=exists)
            for axis in tl.static_range(NUM_AXES):
                place = positions + axis * positions_stride + token
                tl.store(place, position.to(tl.int64), mask=exists)
        if HAS_GROUP:
            place = table + slot * table_stride + position // BLOCK_SIZE
            block = tl.load(place, mask=is_live, other=0).to(tl.int64)
            kv_slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(slot_mapping + token, tl.where(is_live, kv_slot, PAD_SLOT), mask=exists)
    else:
        index = (program - num_rows - tl.cdiv(num_tokens, TILE)) * TILE + tl.arange(0, TILE)
        exists = index < num_logits
        row = row_of(cu_num_logits, index, num_rows, num_bits)
        from_end = tl.load(cu_num_logits + 1 + row) - index
        at = tl.load(query_start_loc + 1 + row) - from_end
        at = tl.minimum(tl.maximum(at, 0), num_tokens - 1)
        tl.store(logits_indices + index, at.to(tl.int64), mask=exists)
        tl.store(logits_slots + index, tl.load(idx_mapping + row).to(tl.int64), mask=exists)
        # The token's own row: of executed verification rows past the live ones, another.
        row = row_of(query_start_loc, at, num_rows, num_bits)
        slot = tl.load(idx_mapping + row).to(tl.int64)
        computed = tl.load(fields + slot * fields_stride + NUM_COMPUTED)
        position = tl.where(at < live_tokens, computed + at - tl.load(query_start_loc + row), 0)
        tl.store(logits_positions + index, position, mask=exists)


def build_inputs(rows: RowTensors, step: StepArrays, out: InputTensors) -> None:
    num_rows, num_tokens = len(step.idx_mapping), len(out.input_ids)
    num_logits = len(out.logits_indices)
    groups = list(
        zip(rows.block_tables, rows.block_sizes, rows.windows, out.block_tables, out.slot_mappings)
    )
    nobody = (step.live, 1, None, step.live[None], out.positions)  # not read
    for index, (table, block_size, window, batch_table, slot_mapping) in enumerate(
        groups or [nobody]
    ):
        num_programs = num_rows + triton.cdiv(num_tokens, _TILE)
        if index == 0:
            num_programs += triton.cdiv(num_logits, _TILE)
        _build[(num_programs,)](
            rows.fields,
            rows.tokens,
            step.live,
            step.idx_mapping,
            step.query_start_loc,
            step.cu_num_logits,
            out.input_ids,
            out.positions,
            out.seq_lens,
            out.is_padding,
            out.logits_indices,
            out.logits_slots,
            out.logits_positions,
            table,
            batch_table,
            slot_mapping,
            rows.fields.stride(0),
            rows.tokens.stride(0),
            out.positions.stride(0),
            table.stride(0),
            batch_table.stride(0),
            batch_table.shape[1],
            num_rows,
            num_bits(num_rows),
            num_tokens,
            num_logits,
            NUM_AXES=len(out.positions),
            NUM_NEXT=rows.fields.shape[1] - step_tensors.NEXT_TOKENS,
            BLOCK_SIZE=block_size,
            WINDOW=window or 0,
            IS_FIRST=index == 0,
            HAS_GROUP=bool(groups),
            TILE=_TILE,
            BLOCK_W=1024,
            num_warps=4,
        )
