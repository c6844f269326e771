from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.causal_conv import ConvSignature
from pelton.ops.recurrent import (
    RecurrentMetadata,
    each_row_alone,
    read_states,
    write_states,
)
from pelton.ops.registry import Kernel


def causal_conv(
    signature: ConvSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    width = signature.width
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    taps = weight.t().to(accumulate).contiguous()  # [W, C]
    shift = None if bias is None else bias.to(accumulate)

    def silu(x: torch.Tensor) -> torch.Tensor:
        if signature.batch_invariant:
            return each_row_alone(F.silu, x)
        return F.silu(x, inplace=True)

    def kernel(
        x: torch.Tensor, states: torch.Tensor, meta: RecurrentMetadata, out: torch.Tensor
    ) -> None:
        for group in meta.groups:
            length = group.query_len
            inputs = torch.cat([read_states(states, meta, group), group.of(x)], dim=1)
            for j in range(min(meta.ring, length)):
                first = length - j
                write_states(states, meta, group, j, inputs[:, first : first + width - 1])
            # Products and sums by themselves: each is rounded alike wherever it stands.
            total = inputs[:, :length].to(accumulate) * taps[0]
            for j in range(1, width):
                total += inputs[:, j : j + length].to(accumulate) * taps[j]
            if shift is not None:
                total += shift
            out[group.tokens].copy_(silu(total.flatten(0, 1)))
        out[meta.num_tokens :].zero_()

    return kernel
