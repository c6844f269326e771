"""What a step's inputs, verification and advance must be: plain Python, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pelton.core.plan import StepPlan


@dataclass
class ModelRow:
    """tokens: every known token; computed: with KV; drafts: [K]; blocks: per group."""

    tokens: list[int]
    prompt_len: int
    prefill_len: int
    computed: int
    drafts: list[int]
    blocks: list[list[int]] = field(default_factory=list)

    def fields(self) -> list[int]:
        return [
            self.prompt_len,
            self.prefill_len,
            len(self.tokens),
            self.computed,
            self.tokens[-1],
            *self.drafts,
        ]

    def token_at(self, position: int) -> int:
        if position < len(self.tokens):
            return self.tokens[position]
        return max(self.drafts[position - len(self.tokens)], 0)


def expected_inputs(
    model: dict[int, ModelRow],
    plan: StepPlan,
    block_sizes: Sequence[int],
    *,
    num_rows: int,
    num_tokens: int,
    reserved_slot: int,
    windows: Sequence[int | None] = (),
) -> dict[str, Any]:
    """Arrays of executed length, by the names of StepArrays and InputTensors."""
    out: dict[str, Any] = {
        name: [] for name in ("idx_mapping", "input_ids", "positions", "seq_lens", "is_padding")
    }
    logits: dict[str, list[int]] = {"indices": [], "slots": [], "positions": []}
    start, cu = [0], [0]
    max_len = int((plan.num_computed_bound + plan.num_scheduled_tokens).max())
    widths = [-(-max_len // size) for size in block_sizes]
    tables: list[list[list[int]]] = [[] for _ in block_sizes]
    mappings: list[list[int]] = [[] for _ in block_sizes]
    for ref, q, num_drafts, samples in zip(
        plan.refs, plan.num_scheduled_tokens.tolist(), plan.num_drafts.tolist(), plan.samples
    ):
        row = model[ref.slot]
        out["idx_mapping"].append(ref.slot)
        out["seq_lens"].append(row.computed + q)
        for position in range(row.computed, row.computed + q):
            out["input_ids"].append(row.token_at(position))
            out["positions"].append(position)
            out["is_padding"].append(False)
            for group, size in enumerate(block_sizes):
                block = row.blocks[group][position // size]
                mappings[group].append(block * size + position % size)
        for group, size in enumerate(block_sizes):
            used = row.blocks[group][: -(-(row.computed + q) // size)]
            window = windows[group] if windows else None
            if window is not None:
                visible = range(max(row.computed - window + 1, 0), row.computed + q)
                seen = {position // size for position in visible}
                used = [block if i in seen else 0 for i, block in enumerate(used)]
            tables[group].append(used + [0] * (widths[group] - len(used)))
        start.append(start[-1] + q)
        count = 1 + num_drafts if samples else 0
        cu.append(cu[-1] + count)
        for i in range(count):
            logits["indices"].append(start[-1] - count + i)
            logits["slots"].append(ref.slot)
            logits["positions"].append(row.computed + q - count + i)
    pad_rows, pad_tokens = num_rows - plan.num_rows, num_tokens - start[-1]
    out["live"] = [plan.num_rows, start[-1], cu[-1]]
    out["query_start_loc"] = start + [start[-1]] * pad_rows
    out["cu_num_logits"] = cu + [cu[-1]] * pad_rows
    out["idx_mapping"] += [reserved_slot] * pad_rows
    out["seq_lens"] += [0] * pad_rows
    out["input_ids"] += [0] * pad_tokens
    out["positions"] += [0] * pad_tokens
    out["is_padding"] += [True] * pad_tokens
    out["block_tables"] = [table + [[0] * width] * pad_rows for table, width in zip(tables, widths)]
    out["slot_mappings"] = [mapping + [-1] * pad_tokens for mapping in mappings]
    out.update({f"logits_{name}": values for name, values in logits.items()})
    return out


def expected_results(
    model: dict[int, ModelRow],
    plan: StepPlan,
    drawn: Sequence[int],
    status: Sequence[int],
    num_columns: int,
) -> np.ndarray:
    """[B live, 1 + K + 2] int32 as ops/verify packs them."""
    out = np.zeros((plan.num_rows, num_columns + 2), np.int32)
    at = 0
    for b, (ref, num_drafts, samples) in enumerate(
        zip(plan.refs, plan.num_drafts.tolist(), plan.samples)
    ):
        if not samples:
            continue
        kept: list[int] = []
        for i in range(1 + num_drafts):
            kept.append(drawn[at + i])
            out[b, -1] = out[b, -1] or status[at + i]
            if i == num_drafts or model[ref.slot].drafts[i] != drawn[at + i]:
                break
        out[b, : len(kept)] = kept
        out[b, num_columns] = len(kept)
        at += 1 + num_drafts
    return out


def advance_model(model: dict[int, ModelRow], plan: StepPlan, packed: np.ndarray) -> None:
    for b, (ref, q, num_drafts) in enumerate(
        zip(plan.refs, plan.num_scheduled_tokens.tolist(), plan.num_drafts.tolist())
    ):
        row, kept = model[ref.slot], int(packed[b, -2])
        row.tokens += packed[b, :kept].tolist()
        rejected = 1 + num_drafts - kept if plan.samples[b] else 0
        row.computed += q - rejected
