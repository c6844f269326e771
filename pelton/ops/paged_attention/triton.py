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
    FEW_ROW_HEADS,
    FIXED_SPLIT,
    LONG_QUERY,
    DecodeTile,
    PrefillTile,
    fixed_tile,
    fused_tile,
    plain_tile,
    prefill_tile,
)
from pelton.ops.quantise_kv.reference import SCALE
from pelton.ops.registry import Kernel
from pelton.ops.triton_launch import Launch, load, run

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
        self.block_d = max(next_power(signature.head_dim), 16)
        self.common: dict[str, Any] = {
            "NUM_HEADS": signature.num_heads,
            "NUM_KV_HEADS": signature.num_kv_heads,
            "HEAD_DIM": signature.head_dim,
            "WINDOW": signature.window or 0,
            "SOFTCAP": signature.softcap or 0.0,
            "HAS_SINKS": signature.has_sinks,
            "HAS_CODES": signature.kv_codes is not None,
            "BLOCK_D": self.block_d,
            "PRECISION": "ieee" if signature.dtype == torch.float32 else None,
            "PDL": self.is_hopper,
        }
        self.launch: dict[str, Any] = {"launch_pdl": True} if self.is_hopper else {}
        self._run: Launch = run
        self._row_bytes = self.block_d * signature.dtype.itemsize
        self._has_codes = signature.kv_codes is not None

    def _prefill_tile(self, shape: StepShape, *, is_fresh: bool) -> PrefillTile:
        if self._is_fixed:
            return fixed_tile(row_bytes=self._row_bytes)
        return prefill_tile(
            num_row_heads=shape.num_tokens * self.signature.num_heads,
            max_query_len=shape.max_query_len,
            group=self.group,
            row_bytes=self._row_bytes,
            is_float=self.signature.dtype == torch.float32,
            is_fresh=is_fresh,
            has_codes=self._has_codes,
        )

    def short(self, shape: StepShape) -> int:
        """Query tokens of a row up to which `decode` takes it; 0: `prefill` takes all rows. One of
        a few values, since each is a kernel of its own."""
        longest = shape.max_query_len
        if self._is_fixed:
            short = 1 if longest == 1 else _DECODE_ROWS[-1] // self.group
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

    def decode_tile(self, shape: StepShape, short: int, *, is_fused: bool) -> DecodeTile:
        if self._is_fixed:
            fixed = fixed_tile(row_bytes=self._row_bytes)
            return DecodeTile(
                splits=self._fixed_splits(shape, short),
                min_split=FIXED_SPLIT,
                num_keys=fixed.num_keys,
                num_stages=fixed.num_stages,
                num_warps=fixed.num_warps,
                chunk=1,
                is_early=False,
            )
        row_heads = shape.num_rows * self.signature.num_kv_heads
        most = self._most_programs(short) if row_heads <= MAX_ROW_HEADS else 0
        if not is_fused:
            return plain_tile(row_heads=row_heads, row_bytes=self._row_bytes, most_programs=most)
        return fused_tile(
            row_heads=row_heads,
            max_seq_len=shape.max_seq_len,
            row_bytes=self._row_bytes,
            most_programs=most,
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
        tile_rows = max(rows, _DECODE_ROWS[0])
        if self._is_fixed:
            tile_rows = _DECODE_ROWS[-1]
        tile = self.decode_tile(shape, short, is_fused=fused is not None)
        table = meta.block_table
        pool, strides = views(self.signature, kv)
        arguments = fused or {
            "kv_slots_ptr": None, "cos_ptr": None, "sin_ptr": None, "q_norm_ptr": None,
            "k_norm_ptr": None, "eps": 0.0, "stride_cos": 0, "stride_sin": 0,
            "ROTARY_DIM": 0, "HAS_NORM": False,
        }  # fmt: skip
        self._run(
            decode, (shape.num_rows * self.signature.num_kv_heads, tile.splits),
            query, *pool, out, lse, meta.query_start_loc, meta.seq_lens, table, self._sinks,
            self._workspace.partial, self._workspace.arrived,
            scale=self.signature.scale, min_split=tile.min_split,
            stride_query=query.stride(0), stride_out=out.stride(0), stride_table=table.stride(0),
            **strides, **self.common, **arguments, **self.launch,
            HAS_LSE=lse is not None, IS_FUSED=fused is not None, IS_SPLIT=tile.may_split,
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
        pool, strides = views(self.signature, kv)
        tile = self._prefill_tile(shape, is_fresh=fresh is not None)
        tile_rows = max(tile.num_rows, next_power(self.group))
        tile_tokens = tile_rows // self.group
        num_tiles = shape.num_tokens // tile_tokens + shape.num_rows
        self._run(
            prefill, (self.signature.num_kv_heads, num_tiles),
            query, fresh, *pool, out, lse, meta.query_start_loc, meta.seq_lens, table, self._sinks,
            num_rows=shape.num_rows, split_len=FIXED_SPLIT, scale=self.signature.scale,
            stride_query=query.stride(0), stride_out=out.stride(0), stride_table=table.stride(0),
            **strides, **self.common, **self.launch,
            HAS_LSE=lse is not None, HAS_FRESH=fresh is not None, IS_FIXED=self._is_fixed,
            MIN_QUERY=min_query, BLOCK_M=tile_rows, BLOCK_N=tile.num_keys,
            NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip

    def warm(
        self, qkv: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor
    ) -> None:
        """Compile and load the kernels of steps that are not recorded, those with chunks, whether
        or not this step needs them: later ones then wait for no compiler. Launches nothing."""
        self._run = load
        long, short = 2 * LONG_QUERY, LONG_QUERY
        for num_tokens, longest, fresh in (
            (2**15, long, True),
            (2**15, short, True),
            (2**15, long, False),
            (1, long, False),
        ):
            shape = StepShape(
                num_rows=1,
                num_tokens=num_tokens,
                uniform_query_len=0,
                min_query_len=1,
                max_query_len=longest,
                max_seq_len=longest,
                is_fresh=fresh,
            )
            self.attend(shape, qkv, kv, meta, out, fresh=self.fresh(shape, qkv))
        self._run = run

    def fresh(self, shape: StepShape, qkv: torch.Tensor) -> TensorDescriptor | None:
        """The qkv product as `prefill` reads it, where it may and that pays."""
        signature = self.signature
        fits = (
            self.is_hopper
            and shape.is_fresh
            and shape.num_tokens * signature.num_heads > FEW_ROW_HEADS
            and not self._is_fixed
            and signature.kv_codes is None
            and signature.window is None
            and signature.dtype != torch.float32
            and signature.head_dim == self.block_d
            and qkv.stride(0) % 8 == 0
        )
        if not fits:
            return None
        tile = self._prefill_tile(shape, is_fresh=True)
        return TensorDescriptor.from_tensor(qkv, [tile.num_keys, self.block_d])

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


def views(
    signature: AttentionSignature, kv: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], dict[str, int]]:
    """((keys and values, or their codes; the same in units of a scale, or None), strides)."""
    if signature.kv_codes is None:
        block, token, kind, head, _ = kv.stride()
        pool: tuple[torch.Tensor, torch.Tensor | None] = (kv, None)
    else:
        block, token, _ = kv.stride()
        head = signature.head_dim
        kind = signature.num_kv_heads * head
        pool = kv.view(signature.kv_codes), kv.view(SCALE)
    return pool, {
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
