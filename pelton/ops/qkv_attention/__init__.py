"""qkv_attention(qkv, cos, sin, kv, meta, out): from a layer's qkv product to its attention output.

qkv: [T, (Hq + 2 * Hk) * D], changed in place (rotated). cos, sin: as for rope. kv: as for
paged_attention. out: [T, Hq * D]. Weights: q_norm, k_norm [D] with qk_norm_eps, sinks [Hq] with
has_sinks. The default composes norms, rope, quantise_kv (with kv_codes), store_kv and
paged_attention; a fused kernel is another candidate. Keys and values of the whole step are stored
before any are read, so rows of one step may share blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.pages import writer
from pelton.ops.registry import BoundOp, Candidate, Kernel, bind
from pelton.ops.rope import rope
from pelton.ops.store_kv import store_kv


def bind_composed(
    candidates: Sequence[Candidate], signature: AttentionSignature, **weights: torch.Tensor
) -> BoundOp:
    """The default over the first of paged_attention's `candidates` that takes the signature; its
    name is the ladder's. Raises UnsupportedError when none does."""
    sinks = {"sinks": weights.pop("sinks")} if signature.has_sinks else {}
    attend = bind("paged_attention", candidates, signature, **sinks)

    def attend_rows(query: torch.Tensor, *rest: object) -> None:
        attend(query.shape[0], query, *rest)

    return BoundOp([(None, compose(signature, attend_rows, **weights))], attend.names)


def compose(
    signature: AttentionSignature,
    attend: Kernel,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> Kernel:
    """The default: `attend` is a paged_attention kernel of the same signature."""
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim = signature.head_dim
    query_width = num_heads * head_dim
    stored = writer(signature)

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        if q_norm is not None:
            query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            query.copy_(F.rms_norm(query, (head_dim,), q_norm, signature.qk_norm_eps))
            key.copy_(F.rms_norm(key, (head_dim,), k_norm, signature.qk_norm_eps))
        rope(heads[:, : num_heads + num_kv_heads], cos, sin)
        tokens = stored(qkv[:, query_width:])
        store_kv(tokens, kv.view(-1, tokens.shape[1]), meta.kv_slots)
        attend(heads[:, :num_heads], kv, meta, out.view(out.shape[0], num_heads, head_dim))

    return kernel
