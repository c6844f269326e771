"""lm_head_sample(hidden, indices, rows, logits, out_ids, out_status): from hidden states to tokens.

For rows that ask for nothing but a temperature. Which rows are greedy stands on the device, so one
recorded step serves greedy rows and random ones alike.

hidden: [T, H], before the final norm, not changed. indices: [N] int64, the rows to sample, N >= 1.
rows: DrawRows. logits: [N, V] of hidden's dtype, memory that a candidate may use or not; what it
holds afterwards nobody may read. out_ids, out_status: [N] int32, written.

    logits = head(rms_norm(hidden[indices]) @ weight.T), rounded to hidden's dtype
    temperature 0:  the id of the largest logit, the lowest one on ties
    else:           ops/gumbel_argmax of float32 logits / temperature

Status: OK, NAN_LOGITS (a logit is NaN or +inf, or became so by the temperature) or ALL_MASKED (all
are -inf), as in core/plan.py; unless OK the id is 0. Weights: weight [V, H], norm_weight [H], and
`head`, the model's own way to its logits: head(hidden [N, H], out [N, V]).
Tolerance: tokens equal to the reference's where the product's last bits are.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from pelton.device.native.library import library
from pelton.ops.product import NO_BLOCKS
from pelton.ops.registry import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSignature:
    """logits_divisor, softcap: what the model does to its logits after the product. in_blocks: the
    weight is a BlockWeight."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device_type: str
    norm_eps: float
    logits_divisor: float = 1.0
    softcap: float | None = None
    batch_invariant: bool = False
    in_blocks: bool = False


@dataclass(frozen=True, slots=True)
class DrawRows:
    """slots: [N] int64, each row's row of state. positions: [N] int32, of each row's input token;
    the token to be drawn gets the next one. temperature [R] float32, 0 = greedy, and seeds [R]
    int64: of every row of state."""

    slots: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


FUSED_ROWS = 16
"""Rows that share one pass over the head's weight."""


def _takes_any(signature: HeadSignature) -> str | None:
    return None


def _takes_native(signature: HeadSignature) -> str | None:
    return NO_BLOCKS if signature.in_blocks else _takes(signature)


def _takes_blocks(signature: HeadSignature) -> str | None:
    return _takes(signature) if signature.in_blocks else "only for a weight in quantised blocks"


def _takes(signature: HeadSignature) -> str | None:
    if signature.device_type != "cpu":
        return "for the CPU"
    if signature.dtype not in (torch.bfloat16, torch.float32):
        return f"not in {signature.dtype}"
    if signature.logits_divisor != 1.0 or signature.softcap is not None:
        return "the logits are scaled or capped"
    return None if library() is not None else "no library of CPU kernels"


def _takes_triton(signature: HeadSignature) -> str | None:
    if signature.device_type != "cuda":
        return "for a GPU"
    if signature.dtype == torch.float64:
        return "draws from float32 at most"
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def _takes_fused(signature: HeadSignature) -> str | None:
    if signature.logits_divisor != 1.0 or signature.softcap is not None:
        return "logits are changed after the product"
    if signature.batch_invariant:
        return "more rows take another product"
    return _takes_triton(signature)


CANDIDATES = (
    Candidate("native", "pelton.ops.lm_head_sample.cpu:drawn", _takes_native, copies_weight=True),
    Candidate("fused", "pelton.ops.lm_head_sample.triton:fused", _takes_fused, max_rows=FUSED_ROWS),
    Candidate("drawn", "pelton.ops.lm_head_sample.triton:from_logits", _takes_triton),
    Candidate(
        "blocks", "pelton.ops.lm_head_sample.cpu:drawn_blocks", _takes_blocks, copies_weight=True
    ),
    Candidate("composed", "pelton.ops.lm_head_sample.reference:composed", _takes_any),
)
