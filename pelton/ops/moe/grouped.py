"""torch's grouped product over tokens in the order of their experts: where groups end stays on the
device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.moe import MoESignature
from pelton.ops.moe.reference import activate, precise_router, route
from pelton.ops.registry import Kernel


def moe(
    signature: MoESignature,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Kernel:
    gate_up_t, down_t = gate_up.transpose(1, 2), down.transpose(1, 2)
    logits_of = precise_router(signature, router, router_bias)

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.shape[0] == 0:
            return
        weights, experts = route(signature, logits_of(x))
        sorted_experts, order = experts.flatten().sort(stable=True)
        every = torch.arange(signature.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)
        inner = F.grouped_mm(x[order // signature.top_k], gate_up_t, offs=ends)
        if gate_up_bias is not None:
            inner += gate_up_bias[sorted_experts]
        result = F.grouped_mm(activate(signature, inner), down_t, offs=ends)
        if down_bias is not None:
            result += down_bias[sorted_experts]
        unsorted = torch.empty_like(result).index_copy_(0, order, result)
        by_slot = unsorted.view(-1, signature.top_k, x.shape[1])
        total = by_slot[:, 0] * weights[:, :1]
        for slot in range(1, signature.top_k):
            total += by_slot[:, slot] * weights[:, slot, None]
        out.copy_(total)

    return kernel
