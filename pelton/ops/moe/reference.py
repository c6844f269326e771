"""Every expert on every token, and most results thrown away: in plain steps, any dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pelton.ops.moe import MoESignature
from pelton.ops.recurrent import each_row_alone
from pelton.ops.registry import Kernel


def route(signature: MoESignature, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [T, E] -> weights [T, top_k], of the same type, and experts [T, top_k] int64. A
    token's depend on its own logits alone."""
    # topk breaks ties as it likes, by the number of rows too.
    values, experts = logits.sort(dim=-1, descending=True, stable=True)
    values, experts = values[:, : signature.top_k], experts[:, : signature.top_k]
    if signature.normalise_chosen:
        return values.softmax(-1), experts
    return logits.softmax(-1).gather(1, experts), experts


def precise_router(
    signature: MoESignature, router: torch.Tensor, router_bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, H] -> logits [T, E], in float32 at least."""
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    weight = router.to(accumulate)
    bias = None if router_bias is None else router_bias.to(accumulate)
    return lambda x: F.linear(x.to(accumulate), weight, bias)


def activate(signature: MoESignature, gate_up: torch.Tensor) -> torch.Tensor:
    """[n, 2 * I] -> [n, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    limit = signature.swiglu_limit
    if limit is None:
        return _by_elements(signature, F.silu, gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * _by_elements(signature, torch.sigmoid, gate * signature.swiglu_alpha)


def _by_elements(
    signature: MoESignature, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    return each_row_alone(function, x) if signature.batch_invariant else function(x)


def moe(
    signature: MoESignature,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Kernel:
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    logits_of = precise_router(signature, router, router_bias)

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        weights, experts = route(signature, logits_of(x))
        total = x.new_zeros(x.shape, dtype=accumulate)
        for expert in range(signature.num_experts):
            inner = F.linear(
                x, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]
            )
            result = F.linear(
                activate(signature, inner),
                down[expert],
                None if down_bias is None else down_bias[expert],
            )
            is_chosen = experts == expert
            weight = weights.masked_fill(~is_chosen, 0).sum(-1, keepdim=True)
            # What an expert makes of a token that is not its own may be infinite.
            result = (result * weight).masked_fill(~is_chosen.any(-1, keepdim=True), 0)
            total += result
        out.copy_(total)

    return kernel
