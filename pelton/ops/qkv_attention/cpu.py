"""By a kernel of our own on CPU: one pass over a step's heads; device/native/store.c."""

from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import StoreQKVArgs
from pelton.ops.paged_attention import NATIVE_DTYPES, AttentionSignature, native_kv_kind
from pelton.ops.registry import Kernel


def store_qkv(
    signature: AttentionSignature,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> Kernel:
    run = loaded().functions.pelton_store_qkv
    args = StoreQKVArgs(
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        num_heads=signature.num_heads,
        num_kv_heads=signature.num_kv_heads,
        head_dim=signature.head_dim,
        norm_eps=signature.qk_norm_eps or 0.0,
        dtype=NATIVE_DTYPES[signature.dtype],
        kv_kind=native_kv_kind(signature),
    )

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        kv_slots: torch.Tensor,
        _kept: object = (q_norm, k_norm),
    ) -> None:
        args.qkv, args.qkv_stride, args.num_tokens = qkv.data_ptr(), qkv.stride(0), qkv.shape[0]
        args.cos, args.cos_stride, args.rotary_dim = cos.data_ptr(), cos.stride(0), cos.shape[-1]
        args.sin, args.sin_stride = sin.data_ptr(), sin.stride(0)
        args.kv, args.kv_slots = kv.data_ptr(), kv_slots.data_ptr()
        call(run, args)

    return kernel
