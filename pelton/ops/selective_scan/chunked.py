"""Runs of CHUNK tokens as products of matrices; rows of equal length together."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.recurrent import RecurrentMetadata, RowGroup, read_states, write_states
from pelton.ops.registry import Kernel
from pelton.ops.selective_scan import ScanSignature

CHUNK = 64
# Fewer tokens than this go one by one.
_LEAST = 8


def selective_scan(
    signature: ScanSignature, a_log: torch.Tensor, d: torch.Tensor, dt_bias: torch.Tensor
) -> Kernel:
    num_heads, head_dim = signature.num_heads, signature.head_dim
    num_groups, state_size = signature.num_groups, signature.state_size
    heads = (num_groups, num_heads // num_groups)
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    rate = -a_log.to(accumulate).exp()  # [H]
    skip = d.to(accumulate).view(*heads, 1)
    bias = dt_bias.to(accumulate)

    def run_chunk(
        state: torch.Tensor, x: torch.Tensor, step: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        """state: [n, G, H/G, P, N], moved past the chunk in place. x: [n, l, G, H/G, P]; step: [n,
        l, H]; b, c: [n, l, G, N]. Returns state @ c: [n, l, G, H/G, P]."""
        # Sums of log decays are large, and their differences matter: in float64.
        log_decay = torch.unflatten((step * rate).double().cumsum(1), 2, heads).permute(0, 2, 3, 1)
        apart = (log_decay[..., :, None] - log_decay[..., None, :]).to(accumulate)
        length = x.shape[1]
        later = torch.ones((length, length), dtype=torch.bool, device=x.device).triu_(1)
        weights = apart.masked_fill_(later, float("-inf")).exp_()  # [n, G, H/G, l, l]
        b, c = b.transpose(1, 2), c.transpose(1, 2)  # [n, G, l, N]
        weights *= (c @ b.transpose(-1, -2))[:, :, None]
        scaled = x * torch.unflatten(step, 2, heads)[..., None]
        scaled = scaled.permute(0, 2, 3, 1, 4)  # [n, G, H/G, l, P]
        out = weights @ scaled
        since_start = log_decay.to(accumulate).exp()[..., None]
        out += (c[:, :, None] @ state.transpose(-1, -2)) * since_start
        until_end = (log_decay[..., -1:] - log_decay).to(accumulate).exp()[..., None]
        state *= since_start[..., -1:, :]
        state += (scaled * until_end).transpose(-1, -2) @ b[:, :, None]
        return out.permute(0, 3, 1, 2, 4)

    def run_token(
        state: torch.Tensor, x: torch.Tensor, step: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        """The same for one token: without the axis l."""
        step = torch.unflatten(step, 1, heads)[..., None]
        state *= (step * rate.view(*heads, 1)).exp_()[..., None]
        state.addcmul_((x * step)[..., None], b[:, :, None, None])
        return (state @ c[:, :, None, :, None])[..., 0]

    def kernel(
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        meta: RecurrentMetadata,
        out: torch.Tensor,
    ) -> None:
        steps = F.softplus(dt[: meta.num_tokens].to(accumulate) + bias)
        steps = steps.clamp_(*signature.dt_limits)
        for group in meta.groups:
            run_group(x, steps, b, c, states, meta, group, out)
        out[meta.num_tokens :].zero_()

    def run_group(
        x: torch.Tensor,
        steps: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        meta: RecurrentMetadata,
        group: RowGroup,
        out: torch.Tensor,
    ) -> None:
        length = group.query_len
        x = torch.unflatten(group.of(x), 2, (*heads, head_dim)).to(accumulate)
        b, c = (
            torch.unflatten(group.of(t), 2, (num_groups, state_size)).to(accumulate) for t in (b, c)
        )
        steps, out = group.of(steps), torch.unflatten(group.of(out), 2, (*heads, head_dim))
        state = torch.unflatten(read_states(states, meta, group).to(accumulate), 1, heads)
        # The last states are all kept, so their tokens go one by one.
        num_single = min(meta.ring - 1, length)
        num_chunked = length - num_single
        if num_chunked < _LEAST:
            num_single, num_chunked = length, 0
        for first in range(0, num_chunked, CHUNK):
            part = slice(first, min(first + CHUNK, num_chunked))
            result = run_chunk(state, x[:, part], steps[:, part], b[:, part], c[:, part])
            out[:, part] = result + x[:, part] * skip
        if num_chunked:
            write_states(states, meta, group, num_single, state.flatten(1, 2))
        for t in range(num_chunked, length):
            result = run_token(state, x[:, t], steps[:, t], b[:, t], c[:, t])
            out[:, t] = result + x[:, t] * skip
            if length - 1 - t < meta.ring:
                write_states(states, meta, group, length - 1 - t, state.flatten(1, 2))

    return kernel
