"""The tensors of a step that ops share.

Shapes: R rows of state (the last is reserved for synthetic steps), B batch rows, T tokens and N
verification rows as executed (padding included), G KV groups, L = max_model_len, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Columns of RowTensors.fields.
PROMPT_LEN = 0
PREFILL_LEN = 1
TOTAL_LEN = 2
NUM_COMPUTED = 3
NEXT_TOKENS = 4  # first of 1 + K: the last known token, then its drafts

PAD_SLOT = -1


@dataclass(frozen=True, slots=True)
class RowTensors:
    """fields: [R, NEXT_TOKENS + 1 + K] int32; tokens: [R, L] int32, every known token;
    block_tables: G x [R, W] int32; block_sizes: G ints; windows: G ints, how many tokens a token
    sees, itself included, or None for all."""

    fields: torch.Tensor
    tokens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    block_sizes: tuple[int, ...]
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the host decides. Arrays are as long as the batch is executed.

    live: [3] int32 = rows, tokens, verification rows that are real.
    idx_mapping: [B] int32, batch row -> row of state; padding rows map to the reserved row.
    query_start_loc: [B + 1] int32; cu_num_logits: [B + 1] int32; both never decrease, padding
        repeats the last value.
    """

    live: torch.Tensor
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class InputTensors:
    """What the model and the head read.

    input_ids: [T] int32. positions: [P, T] int64 (P = 1 but for models with several position axes).
    seq_lens: [B] int32, tokens whose KV exists after this step; 0 for padding.
    is_padding: [T] bool.
    block_tables: G x [B, W'] int32, 0 (the null block) for padding, past a row's last token, and
        left of what the window of a row's first query token shows.
    slot_mappings: G x [T] int64, PAD_SLOT for padding.
    logits_indices: [N] int64, token of each verification row. logits_slots: [N] int64, its row of
        state. logits_positions: [N] int32, its token's position.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    is_padding: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    logits_indices: torch.Tensor
    logits_slots: torch.Tensor
    logits_positions: torch.Tensor
