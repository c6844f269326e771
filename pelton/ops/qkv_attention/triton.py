"""qkv_attention by Triton kernels.

Where every row has one query token, one kernel does it all: it never reads what another row stores
in the same step, so nothing has to be stored before. Otherwise norms, rotation and store are one
kernel, and attention one or two more.
"""

from __future__ import annotations

from typing import Any

import torch

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.launch import StepShape, Workspace
from pelton.ops.paged_attention.triton import TritonAttention, next_power, views
from pelton.ops.qkv_attention.triton_store import quantise_and_store, rotate_and_store
from pelton.ops.quantise_kv.reference import SCALE
from pelton.ops.registry import Kernel

# Heads of a token that one program of rotate_and_store takes, and its warps.
_HEADS, _WARPS = 16, 4


def qkv_attention(
    signature: AttentionSignature,
    workspace: Workspace,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> Kernel:
    attention = TritonAttention(signature, workspace, sinks, is_fixed=is_fixed)
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim = signature.head_dim
    has_norm, eps = q_norm is not None, signature.qk_norm_eps or 0.0
    heads_at_once, warps = _HEADS, _WARPS
    codes = signature.kv_codes
    is_warm = not attention.is_hopper

    def store(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        rotary_dim = cos.shape[-1]
        rest = head_dim - rotary_dim
        num_groups = -(-(num_heads + 2 * num_kv_heads) // heads_at_once)
        (pool, scales), strides = views(signature, kv)
        rotate_and_store[(len(qkv), num_groups)](
            qkv, pool, out, meta.kv_slots, cos, sin, q_norm, k_norm, eps,
            stride_qkv=qkv.stride(0), stride_out=out.stride(0),
            stride_cos=cos.stride(0), stride_sin=sin.stride(0), **strides,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim, HAS_NORM=has_norm, HAS_CODES=codes is not None,
            HEADS=heads_at_once, BLOCK_HALF=next_power(rotary_dim // 2),
            BLOCK_REST=next_power(rest) if rest else 0, BLOCK_D=attention.block_d,
            PDL=attention.is_hopper, num_warps=warps, **attention.launch,
        )  # fmt: skip
        if codes is None:
            return
        info = torch.finfo(codes) if codes.is_floating_point else torch.iinfo(codes)
        quantise_and_store[(len(qkv), -(-2 * num_kv_heads // heads_at_once))](
            qkv, pool, scales, meta.kv_slots, stride_qkv=qkv.stride(0),
            stride_block=strides["stride_block"], stride_token=strides["stride_token"],
            BLOCK_SIZE=strides["BLOCK_SIZE"], NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim, LARGEST=float(info.max), SMALLEST_SCALE=torch.finfo(SCALE).tiny,
            IS_INTEGER=not codes.is_floating_point, HEADS=heads_at_once,
            BLOCK_D=attention.block_d, PDL=attention.is_hopper, num_warps=warps,
            **attention.launch,
        )  # fmt: skip

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        nonlocal is_warm
        shape = StepShape.of(meta, len(qkv))
        if not shape.num_tokens:
            return
        if not shape.num_rows:
            out.zero_()
            return
        if not is_warm:
            attention.warm(qkv, kv, meta, out)
            is_warm = True
        if not is_fixed and codes is None and shape.uniform_query_len == 1:
            fused: dict[str, Any] = {
                "kv_slots_ptr": meta.kv_slots, "cos_ptr": cos, "sin_ptr": sin,
                "q_norm_ptr": q_norm, "k_norm_ptr": k_norm, "eps": eps,
                "stride_cos": cos.stride(0), "stride_sin": sin.stride(0),
                "ROTARY_DIM": cos.shape[-1], "HAS_NORM": has_norm,
            }  # fmt: skip
            attention.decode(shape, 1, qkv, kv, meta, out, fused=fused)
            return
        store(qkv, cos, sin, kv, meta, out)
        attention.attend(shape, qkv, kv, meta, out, fresh=attention.fresh(shape, qkv))

    return kernel


def fixed_qkv_attention(
    signature: AttentionSignature, workspace: Workspace, **weights: torch.Tensor
) -> Kernel:
    """A token's bits do not depend on its batch, nor on how its prompt is cut."""
    return qkv_attention(signature, workspace, is_fixed=True, **weights)
