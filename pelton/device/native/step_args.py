"""The argument structures of steps.h, store.h and norm.h, field by field."""

from __future__ import annotations

import ctypes
from typing import Any

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


def _fields(pointers: str, numbers: str) -> tuple[tuple[str, Any], ...]:
    return (
        *((name, _POINTER) for name in pointers.split()),
        *((name, _INT64) for name in numbers.split()),
    )


class KVGroupArgs(ctypes.Structure):
    _fields_ = _fields(
        "table batch_table slot_mapping", "table_stride batch_stride width block_size window"
    )


class BuildInputsArgs(ctypes.Structure):
    _fields_ = _fields(
        "fields tokens live idx_mapping query_start_loc cu_num_logits input_ids positions seq_lens "
        "is_padding logits_indices logits_slots logits_positions groups",
        "fields_stride tokens_stride positions_stride num_fields num_rows num_tokens num_logits "
        "num_axes num_groups",
    )


class AdvanceArgs(ctypes.Structure):
    _fields_ = _fields(
        "fields tokens live idx_mapping query_start_loc cu_num_logits sampled num_sampled",
        "fields_stride tokens_stride sampled_stride num_sampled_stride num_rows token_columns "
        "num_columns",
    )


class VerifyArgs(ctypes.Structure):
    _fields_ = _fields(
        "cu_num_logits idx_mapping fields token_ids status out",
        "fields_stride out_stride num_rows num_columns num_logits",
    )


class TakeRowsArgs(ctypes.Structure):
    _fields_ = _fields(
        "table index out", "row_bytes table_stride out_stride num_rows index_is_int64"
    )


class TakePackedRowsArgs(ctypes.Structure):
    _fields_ = _fields("packed index out", "num_rows num_columns columns_pad out_stride is_bf16")


class StagedWriteArgs(ctypes.Structure):
    _fields_ = _fields("arena writes", "num_writes")


class ZeroBlocksArgs(ctypes.Structure):
    _fields_ = _fields("pools block_bytes block_ids", "num_pools num_blocks")


class StoreQKVArgs(ctypes.Structure):
    _fields_ = (
        *_fields(
            "qkv cos sin q_norm k_norm kv kv_slots",
            "num_tokens qkv_stride cos_stride sin_stride num_heads num_kv_heads head_dim "
            "rotary_dim",
        ),
        ("norm_eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("kv_kind", ctypes.c_int32),
    )


class LayerNormArgs(ctypes.Structure):
    _fields_ = (
        *_fields("x weight bias out", "num_rows num_columns x_stride out_stride"),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


ARGUMENTS: dict[str, type[ctypes.Structure]] = {
    "pelton_build_inputs": BuildInputsArgs,
    "pelton_advance": AdvanceArgs,
    "pelton_verify": VerifyArgs,
    "pelton_take_rows": TakeRowsArgs,
    "pelton_take_packed_rows": TakePackedRowsArgs,
    "pelton_staged_write": StagedWriteArgs,
    "pelton_zero_blocks": ZeroBlocksArgs,
    "pelton_store_qkv": StoreQKVArgs,
    "pelton_layer_norm": LayerNormArgs,
}
"""Of each function."""
