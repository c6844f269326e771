"""Request by request, in plain steps; any dtype, computed in float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.bidirectional_attention import BidirectionalMetadata, BidirectionalSignature
from pelton.ops.registry import Kernel
from pelton.ops.rope import rope


def bidirectional_attention(
    signature: BidirectionalSignature,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> Kernel:
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim, window = signature.head_dim, signature.window
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    to_value = num_heads + num_kv_heads

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        meta: BidirectionalMetadata,
        out: torch.Tensor,
    ) -> None:
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        if q_norm is not None and k_norm is not None:
            query, key = heads[:, :num_heads], heads[:, num_heads:to_value]
            query.copy_(F.rms_norm(query, (head_dim,), q_norm, signature.qk_norm_eps))
            key.copy_(F.rms_norm(key, (head_dim,), k_norm, signature.qk_norm_eps))
        if signature.rotary_dim and cos is not None and sin is not None:
            rope(heads[:, :to_value], cos, sin)
        end = 0
        for length in meta.query_lens[: meta.num_rows].tolist():
            start, end = end, end + length
            own = heads[start:end].to(accumulate)
            key, value = own[:, num_heads:to_value], own[:, to_value:]
            key = key.repeat_interleave(num_heads // num_kv_heads, dim=1)
            value = value.repeat_interleave(num_heads // num_kv_heads, dim=1)
            scores = torch.einsum("qhd,khd->hqk", own[:, :num_heads], key) * signature.scale
            if window is not None:
                place = torch.arange(length, device=qkv.device)
                is_far = (place[:, None] - place).abs() > window
                scores.masked_fill_(is_far, float("-inf"))
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
            out[start:end] = mixed.reshape(length, -1)
        out[end:].zero_()

    return kernel
