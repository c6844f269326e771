"""By a Triton kernel: a program has some query tokens of a request and one head, and passes over
the keys they see in tiles, as arXiv 2205.14135 does. Rotation is torch's, before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pelton.ops.bidirectional_attention import BidirectionalMetadata, BidirectionalSignature
from pelton.ops.registry import Kernel
from pelton.ops.rope import rope

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    qkv, out, query_start_loc, qkv_stride, out_stride, factor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """factor: of scores, so that weights are powers of 2. WINDOW: -1 = none."""
    row, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start_loc + row)
    length = tl.load(query_start_loc + row + 1) - first
    start = tl.program_id(0) * BLOCK_Q
    if start < length:
        dims = tl.arange(0, DIMS)
        is_dim = dims < HEAD_DIM
        query_at = start + tl.arange(0, BLOCK_Q)
        is_query = query_at < length
        base = qkv + first.to(tl.int64) * qkv_stride
        query = tl.load(
            base + query_at[:, None].to(tl.int64) * qkv_stride + head * HEAD_DIM + dims[None, :],
            mask=is_query[:, None] & is_dim[None, :],
            other=0.0,
        )
        key_base = base + (HEADS + head // (HEADS // KV_HEADS)) * HEAD_DIM
        low, high = 0, length
        if WINDOW >= 0:
            low = tl.maximum(start - WINDOW, 0) // BLOCK_K * BLOCK_K
            high = tl.minimum(start + BLOCK_Q + WINDOW, length)
        top = tl.full([BLOCK_Q], -1e30, tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        sums = tl.zeros([BLOCK_Q, DIMS], tl.float32)
        for at in range(low, high, BLOCK_K):
            key_at = at + tl.arange(0, BLOCK_K)
            is_key = key_at < length
            place = key_base + key_at[:, None].to(tl.int64) * qkv_stride + dims[None, :]
            mask = is_key[:, None] & is_dim[None, :]
            key = tl.load(place, mask=mask, other=0.0)
            scores = tl.dot(query, key.T, input_precision="ieee") * factor
            seen = is_key[None, :]
            if WINDOW >= 0:
                distance = query_at[:, None] - key_at[None, :]
                seen = seen & (distance <= WINDOW) & (distance >= -WINDOW)
            scores = tl.where(seen, scores, -1e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            # Where nothing was seen yet all differences are 0, so what is not seen has no weight.
            weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
            kept = tl.exp2(top - new_top)
            total = total * kept + tl.sum(weights, 1)
            value = tl.load(place + KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
            sums = sums * kept[:, None] + tl.dot(
                weights.to(value.dtype), value, input_precision="ieee"
            )
            top = new_top
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out
            + (first + query_at[:, None]).to(tl.int64) * out_stride
            + head * HEAD_DIM
            + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=is_query[:, None] & is_dim[None, :],
        )


def bidirectional_attention(
    signature: BidirectionalSignature,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> Kernel:
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim = signature.head_dim
    is_wide = signature.dtype == torch.float32 or head_dim > 128
    block_q, block_k = (32, 32) if is_wide else (128, 64)
    options: dict[str, Any] = {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "WINDOW": -1 if signature.window is None else signature.window,
        "BLOCK_K": block_k,
        "num_stages": 2 if is_wide else 3,
    }

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        meta: BidirectionalMetadata,
        out: torch.Tensor,
    ) -> None:
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        if q_norm is not None and k_norm is not None:
            query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            query.copy_(F.rms_norm(query, (head_dim,), q_norm, signature.qk_norm_eps))
            key.copy_(F.rms_norm(key, (head_dim,), k_norm, signature.qk_norm_eps))
        if signature.rotary_dim and cos is not None and sin is not None:
            rope(heads[:, : num_heads + num_kv_heads], cos, sin)
        out[int(meta.query_lens.sum()) :].zero_()
        if not meta.num_rows:
            return
        rows = block_q
        if not signature.batch_invariant:
            rows = min(rows, max(16, triton.next_power_of_2(meta.max_query_len)))
        _attend[(triton.cdiv(meta.max_query_len, rows), meta.num_rows, num_heads)](
            qkv,
            out,
            meta.query_start_loc,
            qkv.stride(0),
            out.stride(0),
            signature.scale * _LOG2_E,
            BLOCK_Q=rows,
            num_warps=4 if rows <= 64 else 8,
            **options,
        )

    return kernel
