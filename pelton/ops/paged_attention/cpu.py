"""By kernels of our own on CPU, straight from the blocks; device/native/attention.c and prefill.c
say how. The number of threads changes no bit, and no byte beyond a sequence's last token is read.
"""

from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import AttentionArgs, loaded
from pelton.ops.paged_attention import (
    NATIVE_DTYPES,
    AttentionMetadata,
    AttentionSignature,
    native_kv_kind,
)
from pelton.ops.registry import Kernel


def paged_attention(signature: AttentionSignature, sinks: torch.Tensor | None = None) -> Kernel:
    found = loaded()
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    args = AttentionArgs(
        sinks=None if wide_sinks is None else wide_sinks.data_ptr(),
        num_heads=signature.num_heads,
        num_kv_heads=signature.num_kv_heads,
        head_dim=signature.head_dim,
        window=signature.window or 0,
        scale=signature.scale,
        softcap=signature.softcap or 0.0,
        dtype=NATIVE_DTYPES[signature.dtype],
        kv_kind=native_kv_kind(signature),
        use_amx=found.has_amx,
    )
    run = found.functions.pelton_attention

    def kernel(
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        _kept: object = wide_sinks,
    ) -> None:
        args.query, args.query_stride = query.data_ptr(), query.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.lse = None if lse is None else lse.data_ptr()
        args.kv, args.block_stride, args.block_size = kv.data_ptr(), kv.stride(0), kv.shape[1]
        args.query_start_loc = meta.query_start_loc.data_ptr()
        args.seq_lens = meta.seq_lens.data_ptr()
        table = meta.block_table
        args.block_table, args.table_stride = table.data_ptr(), table.stride(0)
        args.num_rows, args.num_tokens = meta.num_rows, out.shape[0]
        call(run, args)

    return kernel
