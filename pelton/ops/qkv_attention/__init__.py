"""qkv_attention(qkv, cos, sin, kv, meta, out): from a layer's qkv product to its attention output.

qkv: [T, (Hq + 2 * Hk) * D], changed in place (rotated). cos, sin: as for rope. kv: [num_blocks,
block_size, 2, Hk, D]. out: [T, Hq * D]. The default composes rope, store_kv and paged_attention;
a fused kernel is another candidate. Keys and values of the whole step are stored before any are
read, so rows of one step may share blocks.
"""

from __future__ import annotations

import torch

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.registry import Kernel
from pelton.ops.rope import rope
from pelton.ops.store_kv import store_kv


def compose(signature: AttentionSignature, attend: Kernel) -> Kernel:
    """The default: `attend` is a paged_attention kernel of the same signature."""
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim = signature.head_dim
    query_width = num_heads * head_dim
    kv_width = 2 * num_kv_heads * head_dim

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        rope(heads[:, : num_heads + num_kv_heads], cos, sin)
        store_kv(qkv[:, query_width:], kv.view(-1, kv_width), meta.kv_slots)
        attend(heads[:, :num_heads], kv, meta, out.view(out.shape[0], num_heads, head_dim))

    return kernel
