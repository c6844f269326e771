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
from pelton.ops.registry import Kernel

# Query tokens times heads of a key head that `decode` takes as one tile.
_DECODE_ROWS = (16, 32, 64)
_MAX_DECODE_ROWS = 64
# Programs up to which splitting a row's keys pays even when rows are equally long; with more of
# them, splits of at least _LONG_SPLIT keys even out rows that are not.
_FULL = 512
_MAX_SPLITS = 64
_LONG_SPLIT = 1024
# Keys of a split where the order of sums is fixed.
FIXED_SPLIT = 512


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
        self.pdl = _has_dependent_launch(signature)
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
            "PDL": self.pdl,
        }
        self.launch: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        # Elements of a tile of keys, so that the stages fit into shared memory.
        wide = self.block_d * (2 if is_float else 1)
        self.decode_tile = {"BLOCK_N": 64 if wide <= 128 else 32, "NUM_STAGES": 3, "num_warps": 4}
        self.decode_tile["IS_EARLY"] = not is_fixed
        if is_float:
            self.prefill_tile = {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_STAGES": 2, "num_warps": 8}
        elif wide <= 128:
            self.prefill_tile = {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_STAGES": 3, "num_warps": 8}
        else:
            self.prefill_tile = {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_STAGES": 2, "num_warps": 8}
        if is_fixed:
            fixed = {"BLOCK_N": 32, "NUM_STAGES": 2, "num_warps": 4}
            self.decode_tile = {**fixed, "IS_EARLY": False}
            self.prefill_tile = {"BLOCK_M": 64, **fixed}
        self.prefill_tile["BLOCK_M"] = max(self.prefill_tile["BLOCK_M"], next_power(self.group))

    def short(self, shape: StepShape) -> int:
        """Query tokens of a row up to which `decode` takes it; 0: `prefill` takes all rows. One of
        a few values, since each is a kernel of its own."""
        longest = shape.max_query_len
        if self._is_fixed:
            short = 1 if longest == 1 else _MAX_DECODE_ROWS // self.group
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

    def splits(self, shape: StepShape, short: int) -> tuple[int, int]:
        """(most splits of a row, fewest keys of a split)."""
        if self._is_fixed:
            return max(self._fixed_splits(shape, short), 1), FIXED_SPLIT
        row_heads = max(shape.num_rows * self.signature.num_kv_heads, 1)
        splits = min(max(_FULL // row_heads, 4), _MAX_SPLITS)
        splits = min(splits, self._most_programs(short) // row_heads)
        if row_heads > MAX_ROW_HEADS:
            splits = 1
        shortest = self.decode_tile["BLOCK_N"] if row_heads * 4 <= _FULL else _LONG_SPLIT
        return max(splits, 1), shortest

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
        splits, min_split = self.splits(shape, short)
        rows = short * self.group
        block_m = _MAX_DECODE_ROWS if self._is_fixed else 16
        table = meta.block_table
        arguments = fused or {
            "kv_slots_ptr": None, "cos_ptr": None, "sin_ptr": None, "q_norm_ptr": None,
            "k_norm_ptr": None, "eps": 0.0, "stride_cos": 0, "stride_sin": 0,
            "ROTARY_DIM": 0, "HAS_NORM": False,
        }  # fmt: skip
        decode[(shape.num_rows * self.signature.num_kv_heads, splits)](
            query, kv, out, lse, meta.query_start_loc, meta.seq_lens, table, self._sinks,
            self._workspace.partial, self._workspace.arrived,
            scale=self.signature.scale, min_split=min_split,
            stride_query=query.stride(0), stride_out=out.stride(0), stride_table=table.stride(0),
            **kv_strides(kv), **self.common, **arguments, **self.decode_tile, **self.launch,
            HAS_LSE=lse is not None, IS_FUSED=fused is not None, IS_SPLIT=splits > 1,
            IS_FIXED=self._is_fixed, MAX_QUERY=short, ROWS=next_power(rows),
            BLOCK_M=max(block_m, next_power(rows)), CHUNK=16,
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
            self.pdl
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
