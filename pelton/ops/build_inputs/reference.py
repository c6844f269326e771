from __future__ import annotations

import torch

from pelton.ops.step_tensors import (
    NEXT_TOKENS,
    NUM_COMPUTED,
    PAD_SLOT,
    TOTAL_LEN,
    InputTensors,
    RowTensors,
    StepArrays,
)


def build_inputs(rows: RowTensors, step: StepArrays, out: InputTensors) -> None:
    device = out.input_ids.device
    num_rows = len(step.idx_mapping)
    num_tokens = len(out.input_ids)
    slots = step.idx_mapping.long()
    fields = rows.fields[slots]
    computed = fields[:, NUM_COMPUTED]

    is_live_row = torch.arange(num_rows, device=device) < step.live[0]
    torch.mul(computed + step.query_start_loc.diff(), is_live_row, out=out.seq_lens)

    token = torch.arange(num_tokens, dtype=torch.int32, device=device)
    torch.ge(token, step.live[1], out=out.is_padding)
    # Padding tokens lie past the last row's end; they borrow that row and are masked below.
    row = torch.searchsorted(step.query_start_loc[1:], token, right=True).clamp_(max=num_rows - 1)
    slot = slots[row]
    position = (computed[row] + token - step.query_start_loc[row]).masked_fill_(out.is_padding, 0)
    out.positions.copy_(position)

    # A position before the last known token is read from the table; it and its drafts are not.
    draft = position - (fields[row, TOTAL_LEN] - 1)
    position = position.long()
    known = rows.tokens[slot, position]
    column = draft.clamp(0, rows.fields.shape[1] - NEXT_TOKENS - 1).long()
    newest = rows.fields[slot, column + NEXT_TOKENS]
    # A draft of -1 is a placeholder that verification rejects; embed anything legal.
    ids = torch.where(draft < 0, known, newest).clamp_(min=0)
    torch.mul(ids, ~out.is_padding, out=out.input_ids)

    for table, block_size, window, batch_table, slot_mapping in zip(
        rows.block_tables, rows.block_sizes, rows.windows, out.block_tables, out.slot_mappings
    ):
        # Past a row's last token its table may hold a former owner's blocks.
        width = batch_table.shape[1]
        first_token = torch.arange(0, width * block_size, block_size, device=device)
        in_use = first_token < out.seq_lens[:, None]
        if window is not None:
            # Left of the window the host has given blocks back, and they may be another row's.
            in_use &= first_token + block_size > computed[:, None] - (window - 1)
        torch.mul(table[slots, :width], in_use, out=batch_table)
        block = table[slot, position // block_size].long()
        kv_slot = block * block_size + position % block_size
        slot_mapping.copy_(kv_slot.masked_fill_(out.is_padding, PAD_SLOT))

    num_logits = len(out.logits_indices)
    if num_logits:
        index = torch.arange(num_logits, dtype=torch.int32, device=device)
        row = torch.searchsorted(step.cu_num_logits[1:], index, right=True).clamp_(max=num_rows - 1)
        from_end = step.cu_num_logits[1:][row] - index
        at = (step.query_start_loc[1:][row] - from_end).clamp_(0, num_tokens - 1)
        out.logits_indices.copy_(at)
        out.logits_slots.copy_(slots[row])
        out.logits_positions.copy_(out.positions[0][out.logits_indices])
