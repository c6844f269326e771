"""By our kernels on CPU: device/native/attention.c and prefill.c; store.c norms and rotates."""

from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import AttentionArgs, loaded
from pelton.device.native.step_args import StoreQKVArgs
from pelton.ops.bidirectional_attention import BidirectionalMetadata, BidirectionalSignature
from pelton.ops.paged_attention import NATIVE_DTYPES
from pelton.ops.registry import Kernel


def bidirectional_attention(
    signature: BidirectionalSignature,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> Kernel:
    found = loaded()
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim, dtype = signature.head_dim, NATIVE_DTYPES[signature.dtype]
    args = AttentionArgs(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        # 0 means none to the kernel: a token that sees itself alone is refused where it is read.
        window=signature.window or 0,
        scale=signature.scale,
        dtype=dtype,
        kv_kind=dtype,
        use_amx=found.has_amx,
    )
    turn = StoreQKVArgs(
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=signature.qk_norm_eps or 0.0,
        dtype=dtype,
        kv_kind=dtype,
    )
    attend, store = found.functions.pelton_attention, found.functions.pelton_store_qkv
    key_bytes = num_heads * head_dim * signature.dtype.itemsize
    changes_heads = bool(signature.rotary_dim) or q_norm is not None

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        meta: BidirectionalMetadata,
        out: torch.Tensor,
        _kept: object = (q_norm, k_norm),
    ) -> None:
        if changes_heads:
            turn.qkv, turn.qkv_stride, turn.num_tokens = qkv.data_ptr(), qkv.stride(0), len(qkv)
            if cos is not None and sin is not None:
                turn.cos, turn.cos_stride, turn.rotary_dim = (
                    cos.data_ptr(),
                    cos.stride(0),
                    cos.shape[-1],
                )
                turn.sin, turn.sin_stride = sin.data_ptr(), sin.stride(0)
            call(store, turn)
        args.query, args.query_stride = qkv.data_ptr(), qkv.stride(0)
        args.kv = qkv.data_ptr() + key_bytes
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.query_start_loc = meta.query_start_loc.data_ptr()
        args.num_rows, args.num_tokens = meta.num_rows, len(out)
        call(attend, args)

    return kernel
