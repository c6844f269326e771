from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.gated_norm import GatedNormSignature
from pelton.ops.recurrent import each_row_alone
from pelton.ops.registry import Kernel


def gated(signature: GatedNormSignature, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * silu(gate): [T, G, S] in the type that is counted in."""
    gate = gate.to(torch.promote_types(x.dtype, torch.float32))
    silu = each_row_alone(F.silu, gate) if signature.batch_invariant else F.silu(gate)
    return (silu * x).view(len(x), signature.num_groups, signature.group_size)


def scale(
    signature: GatedNormSignature,
    values: torch.Tensor,
    squares: torch.Tensor,
    size: int,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """values: of `gated`, overwritten. squares: [T, G], sums over `size` elements."""
    values *= torch.rsqrt(squares / size + signature.eps)[..., None]
    torch.mul(values.view(out.shape).to(out.dtype), weight, out=out)


def gated_norm(signature: GatedNormSignature, weight: torch.Tensor) -> Kernel:
    def kernel(x: torch.Tensor, gate: torch.Tensor) -> None:
        values = gated(signature, x, gate)
        scale(signature, values, values.square().sum(-1), signature.group_size, weight, x)

    return kernel
