"""Row by row, in plain steps; any dtype, computed in float32 at least."""

from __future__ import annotations

import torch

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.pages import reader
from pelton.ops.registry import Kernel


def row_mask(
    query_len: int, num_keys: int, seq_len: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[..., query_len, num_keys] bool: which keys each query token sees; seq_len: [...]."""
    device = seq_len.device
    key = torch.arange(num_keys, device=device)
    last = seq_len[..., None] - query_len + torch.arange(query_len, device=device)
    visible = key <= last[..., None]
    if window is not None:
        visible &= key > last[..., None] - window
    return visible


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """softcap * tanh(scores / softcap), or the scores without one."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def paged_attention(signature: AttentionSignature, sinks: torch.Tensor | None = None) -> Kernel:
    group_size = signature.num_heads // signature.num_kv_heads
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    read = reader(signature, accumulate)

    def kernel(
        query: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        block_size = kv.shape[1]
        end = 0
        for row in range(meta.num_rows):
            start, end = end, end + int(meta.query_lens[row])
            num_blocks = -(-int(meta.seq_len_bounds[row]) // block_size)
            pages = read(kv[meta.block_table[row, :num_blocks].long()]).flatten(0, 1)
            keys, values = pages.repeat_interleave(group_size, dim=2).unbind(1)
            tokens = query[start:end].to(accumulate)
            scores = torch.einsum("qhd,khd->hqk", tokens, keys) * signature.scale
            scores = capped(scores, signature.softcap)
            visible = row_mask(
                end - start, num_blocks * block_size, meta.seq_lens[row], signature.window
            )
            scores = scores.masked_fill(~visible, float("-inf"))
            # Bytes past the sequence may be anything, and 0 * NaN is not 0.
            values = values.masked_fill(~visible.any(0)[:, None, None], 0)
            if sinks is not None:
                column = sinks.to(accumulate)[:, None, None].expand(-1, end - start, 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : values.shape[0]]
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
            if lse is not None:
                lse[start:end] = scores.logsumexp(-1).t()
        out[end:].zero_()

    return kernel
