"""paged_attention by Triton kernels: few query tokens by `decode`, many by `prefill`.

What is launched follows from the numbers of rows and tokens, the longest query and a bound on
lengths alone, all of which a captured graph fixes; everything else is read on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.launch import (
    MAX_ROW_HEADS,
    PARTIAL_SIZE,
    StepShape,
    Workspace,
)
from pelton.ops.paged_attention.triton_decode import decode
from pelton.ops.paged_attention.triton_prefill import prefill
from pelton.ops.paged_attention.triton_tiles import (
    FIXED,
    FIXED_SPLIT,
    DecodeTile,
    decode_tile,
    prefill_tile,
)
from pelton.ops.registry import Kernel

# Query tokens times heads of a key head that `decode` takes as one tile.
_DECODE_ROWS = (16, 32, 64)
# Programs that fill the GPU.
_FULL = 512


def next_power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class TritonAttention:
    """The kernels of one signature, with their tiles.

    is_fixed: tiles, splits and the order of sums do not depend on the batch.
    """

    def __init__(
        self,
        signature: AttentionSignature,
        workspace: Workspace,
        sinks: torch.Tensor | None = None,
        *,
        is_fixed: bool = False,
    ) -> None:
        self.signature, self._workspace, self._is_fixed = signature, workspace, is_fixed
        self.group = signature.num_heads // signature.num_kv_heads
        self._sinks = sinks
        self.is_hopper = _has_dependent_launch(signature)
        is_float = signature.dtype == torch.float32
        self.block_d = max(next_power(signature.head_dim), 16)
        self.common: dict[str, Any] = {
            "NUM_HEADS": signature.num_heads,
            "NUM_KV_HEADS": signature.num_kv_heads,
            "HEAD_DIM": signature.head_dim,
            "WINDOW": signature.window or 0,
            "SOFTCAP": signature.softcap or 0.0,
            "HAS_SINKS": signature.has_sinks,
            "BLOCK_D": self.block_d,
            "PRECISION": "ieee" if is_float else None,
            "PDL": self.is_hopper,
        }
        self.launch: dict[str, Any] = {"launch_pdl": True} if self.is_hopper else {}
        self._row_bytes = self.block_d * signature.dtype.itemsize
        tile = FIXED if is_fixed else prefill_tile(row_bytes=self._row_bytes, is_float=is_float)
        self.prefill_tile = {
            "BLOCK_M": max(tile.num_rows, next_power(self.group)),
            "BLOCK_N": tile.num_keys,
            "NUM_STAGES": tile.num_stages,
            "num_warps": tile.num_warps,
        }

    def short(self, shape: StepShape) -> int:
        """Query tokens of a row up to which `decode` takes it; 0: `prefill` takes all rows. One of
        a few values, since each is a kernel of its own."""
        longest = shape.max_query_len
        if self._is_fixed:
            short = 1 if longest == 1 else FIXED.num_rows // self.group
            return short if longest <= short and self._fixed_splits(shape, short) else 0
        sizes = [rows // self.group for rows in _DECODE_ROWS]
        return next((size for size in sizes if size >= longest), max(sizes[0], 1))

    def _fixed_splits(self, shape: StepShape, short: int) -> int:
        """Splits of the longest row, or 0 where one program for each row does as well, or must."""
        row_heads = shape.num_rows * self.signature.num_kv_heads
        splits = -(-shape.max_seq_len // FIXED_SPLIT)
        fits = row_heads * splits <= self._most_programs(short)
        return splits if fits and row_heads < _FULL else 0

    def _most_programs(self, short: int) -> int:
        return PARTIAL_SIZE // (next_power(short * self.group) * (self.block_d + 2))

    def decode_tile(self, shape: StepShape, short: int, tile_rows: int) -> DecodeTile:
        if self._is_fixed:
            return DecodeTile(
                splits=self._fixed_splits(shape, short),
                min_split=FIXED_SPLIT,
                num_keys=FIXED.num_keys,
                num_stages=FIXED.num_stages,
                num_warps=FIXED.num_warps,
                chunk=1,
                is_early=False,
            )
        row_heads = shape.num_rows * self.signature.num_kv_heads
        return decode_tile(
            row_heads=row_heads,
            max_seq_len=shape.max_seq_len,
            tile_rows=tile_rows,
            row_bytes=self._row_bytes,
            most_programs=self._most_programs(short) if row_heads <= MAX_ROW_HEADS else 0,
        )

    def decode(
        self,
        shape: StepShape,
        short: int,
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        fused: dict[str, Any] | None = None,
    ) -> None:
        """query, out: their strides over tokens count alone. fused: further arguments."""
        rows = next_power(short * self.group)
        tile_rows = max(rows, FIXED.num_rows if self._is_fixed else _DECODE_ROWS[0])
        tile = self.decode_tile(shape, short, tile_rows)
        table = meta.block_table
        arguments = fused or {
            "kv_slots_ptr": None, "cos_ptr": None, "sin_ptr": None, "q_norm_ptr": None,
            "k_norm_ptr": None, "eps": 0.0, "stride_cos": 0, "stride_sin": 0,
            "ROTARY_DIM": 0, "HAS_NORM": False,
        }  # fmt: skip
        decode[(shape.num_rows * self.signature.num_kv_heads, tile.splits)](
            query, kv, out, lse, meta.query_start_loc, meta.seq_lens, table, self._sinks,
            self._workspace.partial, self._workspace.arrived,
            scale=self.signature.scale, min_split=tile.min_split,
            stride_query=query.stride(0), stride_out=out.stride(0), stride_table=table.stride(0),
            **kv_strides(kv), **self.common, **arguments, **self.launch,
            HAS_LSE=lse is not None, IS_FUSED=fused is not None, IS_SPLIT=tile.splits > 1,
            IS_FIXED=self._is_fixed, IS_EARLY=tile.is_early, MAX_QUERY=short, ROWS=rows,
            BLOCK_M=tile_rows, BLOCK_N=tile.num_keys, CHUNK=tile.chunk,
            NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip

    def prefill(
        self,
        shape: StepShape,
        min_query: int,
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        fresh: Any = None,
    ) -> None:
        table = meta.block_table
        tile_tokens = self.prefill_tile["BLOCK_M"] // self.group
        num_tiles = shape.num_tokens // tile_tokens + shape.num_rows
        prefill[(self.signature.num_kv_heads, num_tiles)](
            query, fresh, kv, out, lse, meta.query_start_loc, meta.seq_lens, table, self._sinks,
            num_rows=shape.num_rows, split_len=FIXED_SPLIT, scale=self.signature.scale,
            stride_query=query.stride(0), stride_out=out.stride(0), stride_table=table.stride(0),
            **kv_strides(kv), **self.common, **self.prefill_tile, **self.launch,
            HAS_LSE=lse is not None, HAS_FRESH=fresh is not None, IS_FIXED=self._is_fixed,
            MIN_QUERY=min_query,
        )  # fmt: skip

    def fresh(self, qkv: torch.Tensor) -> TensorDescriptor | None:
        """The qkv product as `prefill` reads it, where it may."""
        signature = self.signature
        fits = (
            self.is_hopper
            and not self._is_fixed
            and signature.window is None
            and signature.dtype != torch.float32
            and signature.head_dim == self.block_d
            and qkv.stride(0) % 8 == 0
        )
        if not fits:
            return None
        return TensorDescriptor.from_tensor(qkv, [self.prefill_tile["BLOCK_N"], self.block_d])

    def attend(
        self,
        shape: StepShape,
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        fresh: Any = None,
    ) -> None:
        """All rows; tokens of padding are left alone."""
        short = self.short(shape)
        if shape.min_query_len <= short:
            self.decode(shape, short, query, kv, meta, out, lse)
        if shape.max_query_len > short:
            self.prefill(shape, short + 1, query, kv, meta, out, lse, fresh)


def _has_dependent_launch(signature: AttentionSignature) -> bool:
    return signature.device_type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)


def kv_strides(kv: torch.Tensor) -> dict[str, int]:
    block, token, kind, head, _ = kv.stride()
    return {
        "stride_block": block,
        "stride_token": token,
        "stride_kv": kind,
        "stride_head": head,
        "BLOCK_SIZE": kv.shape[1],
    }


def paged_attention(
    signature: AttentionSignature,
    sinks: torch.Tensor | None = None,
    *,
    is_fixed: bool = False,
) -> Kernel:
    attention = TritonAttention(
        signature, Workspace(signature.device_type), sinks, is_fixed=is_fixed
    )

    def kernel(
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        num_tokens = int(meta.query_lens.sum())
        out[num_tokens:].zero_()
        shape = StepShape.of(meta, len(query))
        if num_tokens:
            attention.attend(shape, query, kv, meta, out, lse)

    return kernel
