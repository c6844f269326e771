"""moe(x, out): each token through the top_k experts that its router picks, weighted and summed.

x: [T, H], normed, not changed. out: [T, H], given; this rank's part of the sum. Weights: router
[E, H]; gate_up [E, 2 * I, H], the gate's rows first; down [E, H, I]; biases router_bias [E],
gate_up_bias [E, 2 * I], down_bias [E, H] where the signature has them. All of one dtype.

Routing: logits = x @ router.T (+ bias). The top_k largest are chosen; of equal ones the expert
with the lower index. Weights are the softmax over the chosen logits (normalise_chosen), which is
the same as a softmax over all experts whose chosen values are divided by their sum; or else the
softmax over all experts, as it is. All of it is computed in float32 (float64 for float64), as is
the sum: rounded logits would be near ties, and every kernel would choose otherwise.

An expert: silu(gate) * up, then down. With a swiglu_limit l: gate is cut off above l, up outside
-l..l, and the product is (up + 1) * gate * sigmoid(swiglu_alpha * gate).

Tolerance against float64, where the same experts are chosen: 1e-5 in float32, 2e-2 in bfloat16.
Sources: arXiv 1701.06538 (sparse experts); arXiv 2401.04088 (softmax over the chosen); the clamped
activation: OpenAI's gpt-oss model card, arXiv 2508.10925.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from pelton.ops.registry import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESignature:
    """hidden_size H, intermediate_size I of one expert on this rank, num_experts E."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    device_type: str
    normalise_chosen: bool
    has_router_bias: bool = False
    has_gate_up_bias: bool = False
    has_down_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    batch_invariant: bool = False


def _takes_grouped(signature: MoESignature) -> str | None:
    if signature.device_type != "cuda":
        return "torch's grouped product waits for the device elsewhere than on CUDA"
    if signature.dtype != torch.bfloat16:
        return "torch's grouped product is for bfloat16"
    if signature.hidden_size % 8 or signature.intermediate_size % 8:
        return "torch's grouped product wants rows of whole 16 bytes"
    if torch.cuda.get_device_capability() < (9, 0):
        return "torch's grouped product waits for the device before Hopper"
    return _takes_any(signature)


def _takes_sorted(signature: MoESignature) -> str | None:
    if signature.device_type != "cpu":
        return "it reads the experts' counts on the host"
    return _takes_any(signature)


def _takes_any(signature: MoESignature) -> str | None:
    return "its sums depend on the number of rows" if signature.batch_invariant else None


def _takes_invariant(signature: MoESignature) -> str | None:
    return None if signature.batch_invariant else "only for batch_invariant=True (slower)"


FEW_TOKENS = 16
"""The most tokens that can share a pass over the experts that any of them picks, without sorting;
on an H200 it is quicker up to 4."""


def _takes_triton(signature: MoESignature) -> str | None:
    if signature.device_type != "cuda":
        return "for a GPU"
    if signature.dtype == torch.float64:
        return "sums in float32"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return _takes_any(signature)


# Without a grouped product, launches count on a GPU: few tokens touch few experts, many touch all.
CANDIDATES = (
    Candidate("few", "pelton.ops.moe.triton:few", _takes_triton, max_rows=4),
    Candidate("in_order", "pelton.ops.moe.triton:many", _takes_triton),
    Candidate("grouped", "pelton.ops.moe.grouped:moe", _takes_grouped),
    Candidate("sorted", "pelton.ops.moe.by_expert:moe", _takes_sorted),
    Candidate("tiled", "pelton.ops.moe.tiled:moe", _takes_any, max_rows=16),
    Candidate("reference", "pelton.ops.moe.reference:moe", _takes_any),
    Candidate("tiled", "pelton.ops.moe.tiled:moe", _takes_invariant),
)
