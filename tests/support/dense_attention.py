"""An attention backend of plain torch that a CUDA graph can hold: for tests of recordings."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.attention.table import BACKENDS
from pelton.batch.input_batch import InputBatch
from pelton.core.kv.spec import KVGroup
from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.qkv_attention import bind_composed
from pelton.ops.registry import BoundOp, Candidate, Kernel

NAME = "dense"
BACKENDS.setdefault(NAME, "support.dense_attention:DenseBackend")


class DenseBackend(PagedBackend):
    """Every token looks at the whole block table of its row, and masks what it must not see. No
    window, softcap, sinks or quantised pages."""

    name = NAME
    refreshes_in_place = True

    def _refresh(
        self, meta: AttentionMetadata, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> None:
        torch.clamp(batch.inputs.slot_mappings[group.index], min=0, out=meta.kv_slots)

    def metadata(self, device, batch, group, dtype):  # type: ignore[no-untyped-def]
        meta = AttentionMetadata(
            query_start_loc=batch.step.query_start_loc,
            seq_lens=batch.inputs.seq_lens,
            block_table=batch.inputs.block_tables[group.index],
            kv_slots=device.empty((batch.descriptor.num_tokens,), torch.int64),
            num_rows=batch.num_rows,
            query_lens=batch.query_len_np,
            seq_len_bounds=batch.seq_len_bound_np,
            bounds_are_exact=batch.bounds_are_exact,
            num_decode_rows=batch.num_decode_rows,
        )
        device.launch(self._refresh, meta, batch, group, dtype)
        return meta

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed([CANDIDATE], signature, **weights)


def _takes(signature: AttentionSignature) -> str | None:
    return "plain attention only" if signature.window or signature.softcap else None


CANDIDATE = Candidate(NAME, "support.dense_attention:attention", _takes)


def attention(signature: AttentionSignature) -> Kernel:
    group_size = signature.num_heads // signature.num_kv_heads

    def attend(query, kv, meta, out):  # type: ignore[no-untyped-def]
        token = torch.arange(len(query), dtype=torch.int32, device=query.device)
        ends = meta.query_start_loc[1:]
        row = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
        position = meta.seq_lens[row] - (ends[row] - token)
        pages = kv[meta.block_table.long()].flatten(1, 2)[row]  # [T, S, 2, Hk, D]
        keys, values = pages.repeat_interleave(group_size, dim=3).unbind(2)
        scores = torch.einsum("thd,tshd->ths", query.float(), keys.float()) * signature.scale
        index = torch.arange(keys.shape[1], device=query.device)
        is_live = token < ends[-1]
        seen = (index <= position[:, None]) & is_live[:, None]
        values = values.float().masked_fill(~seen[:, :, None, None], 0)
        weights = torch.softmax(scores.masked_fill(~seen[:, None], -1e30), -1)
        result = torch.einsum("ths,tshd->thd", weights, values)
        out.copy_(result.masked_fill(~is_live[:, None, None], 0))

    return attend
