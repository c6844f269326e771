"""Fixed query tiles and fixed key splits: a token's result does not depend on its batch.

Every product has the shape [QUERY_TILE * group, D] x [D, KEY_TILE], whatever the row or step, and
splits are merged in order by the online softmax, in which a split that a token cannot see changes
no bit: exp(0) = 1 scales, and 0 is added. A sink is where the online softmax starts.
"""

from __future__ import annotations

import torch

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.pages import reader
from pelton.ops.paged_attention.reference import capped
from pelton.ops.registry import Kernel

QUERY_TILE = 8
KEY_TILE = 64


def paged_attention(signature: AttentionSignature, sinks: torch.Tensor | None = None) -> Kernel:
    num_heads, num_kv_heads = signature.num_heads, signature.num_kv_heads
    head_dim, scale, window = signature.head_dim, signature.scale, signature.window
    group_size = num_heads // num_kv_heads
    accumulate = torch.float64 if signature.dtype == torch.float64 else torch.float32
    read = reader(signature, accumulate)

    def attend_tile(
        query: torch.Tensor, pages: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query: [QUERY_TILE, Hq, D]; pages: [n * KEY_TILE, 2, Hk, D]; last: [QUERY_TILE], the
        last visible key of each token. Returns out [QUERY_TILE, Hq, D] and lse [QUERY_TILE, Hq]."""
        grouped = query.view(QUERY_TILE, num_kv_heads, group_size, head_dim).to(accumulate)
        grouped = grouped.transpose(0, 1).reshape(num_kv_heads, -1, head_dim) * scale
        if sinks is None:
            top = grouped.new_full((num_kv_heads, QUERY_TILE * group_size, 1), float("-inf"))
            total = torch.zeros_like(top)
        else:
            top = (
                sinks.view(num_kv_heads, group_size).to(accumulate).repeat(1, QUERY_TILE)[..., None]
            )
            total = torch.ones_like(top)
        result = torch.zeros_like(grouped)
        key_index = torch.arange(KEY_TILE, device=query.device)
        token_last = last.repeat_interleave(group_size)[None, :, None]
        for start in range(0, pages.shape[0], KEY_TILE):
            keys, values = pages[start : start + KEY_TILE].permute(1, 2, 0, 3)
            visible = key_index + start <= token_last
            if window is not None:
                visible = visible & (key_index + start > token_last - window)
            # Bytes past the sequence may be anything, and 0 * NaN is not 0.
            in_use = (key_index + start <= last.max())[None, :, None]
            scores = torch.stack([q @ k.t() for q, k in zip(grouped, keys.masked_fill(~in_use, 0))])
            scores = capped(scores, signature.softcap).masked_fill(~visible, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            # A token that has seen nothing yet keeps -inf; subtracting it from itself is NaN.
            safe_top = torch.where(new_top == float("-inf"), 0.0, new_top)
            weights = torch.exp(scores - safe_top)
            rescale = torch.exp(top - safe_top)
            values = values.masked_fill(~in_use, 0)
            partial = torch.stack([w @ v for w, v in zip(weights, values)])
            result = result * rescale + partial
            total = total * rescale + weights.sum(-1, keepdim=True)
            top = new_top
        out = (result / total).view(num_kv_heads, QUERY_TILE, group_size, head_dim)
        lse = (top + total.log()).view(num_kv_heads, QUERY_TILE, group_size)
        return out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)

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
            num_splits = -(-int(meta.seq_len_bounds[row]) // KEY_TILE)
            num_blocks = -(-num_splits * KEY_TILE // block_size)
            # Splits may pass the end of the table: the null block stands in, unseen.
            blocks = meta.block_table[row, :num_blocks]
            pages = read(kv[blocks.long()]).flatten(0, 1)
            short = num_splits * KEY_TILE - pages.shape[0]
            if short > 0:
                pages = torch.cat([pages, pages.new_zeros((short, *pages.shape[1:]))])
            pages = pages[: num_splits * KEY_TILE]
            for first in range(start, end, QUERY_TILE):
                n = min(QUERY_TILE, end - first)
                tile = query.new_zeros((QUERY_TILE, num_heads, head_dim))
                tile[:n] = query[first : first + n]
                offset = torch.arange(QUERY_TILE, device=query.device).clamp_(max=n - 1)
                last = meta.seq_lens[row] - (end - first) + offset
                result, tile_lse = attend_tile(tile, pages, last)
                out[first : first + n] = result[:n]
                if lse is not None:
                    lse[first : first + n] = tile_lse[:n]
        out[end:].zero_()

    return kernel
