from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.recurrent import (
    RecurrentMetadata,
    each_row_alone,
    read_states,
    write_states,
)
from pelton.ops.registry import Kernel
from pelton.ops.selective_scan import ScanSignature


def selective_scan(
    signature: ScanSignature, a_log: torch.Tensor, d: torch.Tensor, dt_bias: torch.Tensor
) -> Kernel:
    num_heads, head_dim = signature.num_heads, signature.head_dim
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    rate = -a_log.to(accumulate).exp()  # [H]
    skip = d.to(accumulate)[:, None]  # [H, 1]
    bias = dt_bias.to(accumulate)

    def kernel(
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        meta: RecurrentMetadata,
        out: torch.Tensor,
    ) -> None:
        live = slice(meta.num_tokens)
        step = each_row_alone(F.softplus, dt[live].to(accumulate) + bias)
        step = step.clamp(*signature.dt_limits)
        decay = each_row_alone(torch.exp, step * rate)
        for group in meta.groups:
            length = group.query_len
            x_rows = torch.unflatten(group.of(x), 2, (num_heads, head_dim)).to(accumulate)
            b_rows, c_rows = (_of_heads(group.of(t).to(accumulate), signature) for t in (b, c))
            step_rows = group.of(step)[..., None]
            decay_rows = group.of(decay)[..., None, None]
            out_rows = group.of(out)
            state = read_states(states, meta, group).to(accumulate)
            for t in range(length):
                inputs = (x_rows[:, t] * step_rows[:, t])[..., None] * b_rows[:, t, :, None]
                state = state * decay_rows[:, t] + inputs
                result = (state * c_rows[:, t, :, None]).sum(-1) + x_rows[:, t] * skip
                out_rows[:, t].copy_(result.flatten(1))
                if length - 1 - t < meta.ring:
                    write_states(states, meta, group, length - 1 - t, state)
        out[meta.num_tokens :].zero_()

    return kernel


def _of_heads(grouped: torch.Tensor, signature: ScanSignature) -> torch.Tensor:
    """[n, q, G * N] -> [n, q, H, N]."""
    grouped = torch.unflatten(grouped, 2, (signature.num_groups, signature.state_size))
    return grouped.repeat_interleave(signature.num_heads // signature.num_groups, dim=2)
