"""Through torch's fused attention: decode rows together, and others of one query length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.pages import reader
from pelton.ops.paged_attention.reference import capped, row_mask
from pelton.ops.registry import Kernel

# Decode rows share one padded gather as long as the longest is at most this much longer than the
# shortest; shorter ones than _SHORT tokens always share.
_MAX_STRETCH = 2
_SHORT = 256
# So do neighbours of one query length, up to this, such as rows that verify drafts. Such rows are
# attended as decode rows are, with the query heads of one key head as query tokens.
_MAX_SHARED_QUERY = 16


@dataclass(slots=True)
class DecodeBucket:
    """Decode rows that are attended together. rows: [n] int64, or None for the first n rows in
    order; blocks: [n * W] int32 flat block ids; mask: [n, 1, 1, W * block_size], 0 or -inf."""

    rows: torch.Tensor | None
    num_rows: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class PrefillRows:
    """`count` rows with equally many query tokens, together tokens start:end. blocks and visible
    are None when no row has earlier tokens. Otherwise blocks: [count * W] int32 and visible:
    [count, 1, query_len, W * block_size] bool. Few query tokens are attended as decode rows are;
    packed: [count, 1, query_len * heads of a key head, W * block_size], 0 or -inf, or None before
    the first layer needs it."""

    start: int
    end: int
    count: int
    blocks: torch.Tensor | None
    visible: torch.Tensor | None
    packed: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return (self.end - self.start) // self.count

    def packed_mask(self, group_size: int, dtype: torch.dtype) -> torch.Tensor:
        if self.packed is None or self.packed.shape[2] != self.length * group_size:
            assert self.visible is not None
            mask = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            mask.masked_fill_(~self.visible, float("-inf"))
            self.packed = mask.repeat_interleave(group_size, dim=2)
        return self.packed


def prepare(
    meta: AttentionMetadata,
    *,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """Fill meta.prepared with "decode" buckets and "prefill" rows; runs on the device."""
    device = meta.block_table.device
    num_decode = meta.num_decode_rows
    buckets = []
    for rows_np, longest in _buckets(meta.seq_len_bounds[:num_decode]):
        width = -(-longest // block_size)
        if len(rows_np) == num_decode:
            rows = None
            table, seq_lens = meta.block_table[:num_decode], meta.seq_lens[:num_decode]
        else:
            rows = torch.from_numpy(rows_np).to(device, non_blocking=True)
            table, seq_lens = meta.block_table[rows], meta.seq_lens[rows]
        first = torch.zeros_like(seq_lens)
        # Blocks that `window` tokens in a row can lie in.
        if window is not None and width > -(-(window - 1) // block_size) + 1:
            width = -(-(window - 1) // block_size) + 1
            first = (seq_lens - window).clamp(min=0) // block_size
            column = first[:, None] + torch.arange(width, device=device)
            # Past the table's end the last column stands in, hidden by its position.
            table = table.gather(1, column.clamp(max=table.shape[1] - 1).long())
        key = first[:, None] * block_size + torch.arange(width * block_size, device=device)
        hidden = key >= seq_lens[:, None]
        if window is not None:
            hidden |= key < seq_lens[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask.masked_fill_(hidden, float("-inf"))
        buckets.append(
            DecodeBucket(rows, len(rows_np), table[:, :width].flatten(), mask[:, None, None, :])
        )
    prefill: list[PrefillRows] = []
    sharing: list[tuple[int, int, int]] = []  # rows lo:hi, the end of their tokens
    end = num_decode
    for row in range(num_decode, meta.num_rows):
        start, end = end, end + int(meta.query_lens[row])
        bound = int(meta.seq_len_bounds[row])
        if meta.bounds_are_exact and bound == end - start and window is None:
            last = prefill[-1] if prefill else None
            if last is not None and last.end == start and last.length == bound:
                last.end, last.count = end, last.count + 1
            else:
                prefill.append(PrefillRows(start, end, 1, None, None))
            continue
        lo, hi = row, row + 1
        if sharing and sharing[-1][1] == row and _may_share(meta, sharing[-1][0], hi):
            lo = sharing.pop()[0]
        sharing.append((lo, hi, end))
    for lo, hi, last_end in sharing:
        count, length = hi - lo, int(meta.query_lens[lo])
        width = -(-int(meta.seq_len_bounds[lo:hi].max()) // block_size)
        visible = row_mask(length, width * block_size, meta.seq_lens[lo:hi], window)
        blocks = meta.block_table[lo:hi, :width].flatten()
        start = last_end - count * length
        prefill.append(PrefillRows(start, last_end, count, blocks, visible[:, None]))
    meta.prepared["decode"] = buckets
    meta.prepared["prefill"] = prefill
    meta.prepared["end"] = end


def _may_share(meta: AttentionMetadata, lo: int, hi: int) -> bool:
    """Whether rows lo:hi, which have earlier tokens, may share one padded gather."""
    lengths, bounds = meta.query_lens[lo:hi], meta.seq_len_bounds[lo:hi]
    return bool(
        lengths[0] <= _MAX_SHARED_QUERY
        and (lengths == lengths[0]).all()
        and bounds.max() <= max(_SHORT, _MAX_STRETCH * bounds.min())
    )


def _buckets(bounds: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Rows [n] int64 and their longest bound, longest buckets last; one bucket when lengths are
    alike, in row order."""
    if len(bounds) == 0:
        return []
    order = np.argsort(bounds, kind="stable")
    buckets = []
    first = 0
    while first < len(order):
        limit = max(_SHORT, _MAX_STRETCH * int(bounds[order[first]]))
        last = int(np.searchsorted(bounds[order], limit, side="right"))
        buckets.append((order[first:last].astype(np.int64), int(bounds[order[last - 1]])))
        first = last
    return buckets


def paged_attention(signature: AttentionSignature) -> Kernel:
    """torch's fused attention; no softcap, no sinks."""
    return _over_pages(signature, F.scaled_dot_product_attention, {})


def masked_attention(signature: AttentionSignature, sinks: torch.Tensor | None = None) -> Kernel:
    """The same steps with scores in memory, for what the fused attention lacks."""
    accumulate = torch.promote_types(signature.dtype, torch.float32)

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None,
        scale: float,
        is_causal: bool = False,
        enable_gqa: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As torch's function of these arguments. sinks: broadcast against scores [n, H, q, 1]."""
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        scores = capped((query @ key.transpose(-1, -2)).to(accumulate) * scale, signature.softcap)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                scores = scores + attn_mask
        if sinks is not None:
            column = sinks.to(accumulate).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
        return weights.to(value.dtype) @ value

    views = {}
    if sinks is not None:
        # Decode rows hold the query heads of one key head where prefill rows have tokens.
        views["decode"] = sinks.view(1, signature.num_kv_heads, -1, 1)
        views["prefill"] = sinks.view(1, signature.num_heads, 1, 1)
    return _over_pages(signature, attend, views)


def _over_pages(
    signature: AttentionSignature,
    attend: Callable[..., torch.Tensor],
    sinks: dict[str, torch.Tensor],
) -> Kernel:
    extra = {phase: {"sinks": tensor} for phase, tensor in sinks.items()}
    for_decode, for_prefill = extra.get("decode", {}), extra.get("prefill", {})
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim, scale = signature.head_dim, signature.scale
    group_size = num_heads // num_kv_heads
    read = reader(signature, signature.dtype)

    def attend_packed(
        rows: PrefillRows, query: torch.Tensor, pages: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Every token's query heads of one key head as its query tokens: keys are read once."""
        shape = (rows.count, rows.length, num_kv_heads, group_size, head_dim)
        extra = {name: sink.repeat(1, 1, rows.length, 1) for name, sink in for_decode.items()}
        result = attend(
            query.view(shape).transpose(1, 2).flatten(2, 3),
            pages[:, :, 0].transpose(1, 2),
            pages[:, :, 1].transpose(1, 2),
            attn_mask=rows.packed_mask(group_size, signature.dtype),
            scale=scale,
            **extra,
        )
        by_key_head = (rows.count, num_kv_heads, rows.length, group_size, head_dim)
        out.view(shape).copy_(result.view(by_key_head).transpose(1, 2))

    def kernel(
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        assert lse is None, "this candidate returns no log-sum-exp"
        for bucket in meta.prepared["decode"]:
            n = bucket.num_rows
            pages = read(kv.index_select(0, bucket.blocks)).view(n, -1, 2, num_kv_heads, head_dim)
            queries = query[:n] if bucket.rows is None else query[bucket.rows]
            # The query heads of one key head go in as its query tokens: keys are read once.
            result = attend(
                queries.view(n, num_kv_heads, group_size, head_dim),
                pages[:, :, 0].transpose(1, 2),
                pages[:, :, 1].transpose(1, 2),
                attn_mask=bucket.mask,
                scale=scale,
                **for_decode,
            )
            if bucket.rows is None:
                out[:n].view(result.shape).copy_(result)
            else:
                out[bucket.rows] = result.flatten(1, 2)
        for rows in meta.prepared["prefill"]:
            tokens = slice(rows.start, rows.end)
            if rows.blocks is None:
                # Nothing was cached: this step's own keys and values are all there is.
                pages = kv.flatten(0, 1).index_select(0, meta.kv_slots[tokens])
            else:
                pages = kv.index_select(0, rows.blocks)
            pages = read(pages).view(rows.count, -1, 2, num_kv_heads, head_dim)
            if rows.blocks is not None and rows.length <= _MAX_SHARED_QUERY:
                attend_packed(rows, query[tokens], pages, out[tokens])
                continue
            result = attend(
                query[tokens].view(rows.count, -1, num_heads, head_dim).transpose(1, 2),
                pages[:, :, 0].transpose(1, 2),
                pages[:, :, 1].transpose(1, 2),
                attn_mask=rows.visible,
                is_causal=rows.blocks is None,
                scale=scale,
                enable_gqa=group_size > 1,
                **for_prefill,
            )
            out[tokens].view(rows.count, -1, num_heads, head_dim).copy_(result.transpose(1, 2))
        if meta.prepared["end"] < out.shape[0]:
            out[meta.prepared["end"] :].zero_()

    return kernel
