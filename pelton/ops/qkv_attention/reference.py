from __future__ import annotations

import torch
import torch.nn.functional as F

from pelton.ops.paged_attention import AttentionSignature
from pelton.ops.paged_attention.pages import writer
from pelton.ops.registry import Kernel
from pelton.ops.rope import rope
from pelton.ops.store_kv import store_kv


def store_qkv(
    signature: AttentionSignature,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> Kernel:
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim = signature.head_dim
    stored = writer(signature)

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        kv_slots: torch.Tensor,
    ) -> None:
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        if q_norm is not None:
            query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            query.copy_(F.rms_norm(query, (head_dim,), q_norm, signature.qk_norm_eps))
            key.copy_(F.rms_norm(key, (head_dim,), k_norm, signature.qk_norm_eps))
        rope(heads[:, : num_heads + num_kv_heads], cos, sin)
        tokens = stored(qkv[:, num_heads * head_dim :])
        store_kv(tokens, kv.view(-1, tokens.shape[1]), kv_slots)

    return kernel
