"""qkv_attention(qkv, cos, sin, kv, meta, out): from a layer's qkv product to its attention output.

qkv: [T, (Hq + 2 * Hk) * D], changed in place (rotated). cos, sin: as for rope. kv: as for
paged_attention. out: [T, Hq * D]. Weights: q_norm, k_norm [D] with qk_norm_eps, sinks [Hq] with
has_sinks. The default composes norms, rope, quantise_kv (with kv_codes), store_kv and
paged_attention; a fused kernel is another candidate. Keys and values of the whole step are stored
before any are read, so rows of one step may share blocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature, takes_native
from pelton.ops.registry import BoundOp, Candidate, Kernel, bind


def _stores_any(signature: AttentionSignature) -> str | None:
    return None


def _stores_native(signature: AttentionSignature) -> str | None:
    if signature.head_dim > 512:
        return "heads of more than 512 elements"
    return takes_native(signature)


STORE_REFERENCE = (
    Candidate("reference", "pelton.ops.qkv_attention.reference:store_qkv", _stores_any),
)
STORE_NATIVE = (Candidate("native", "pelton.ops.qkv_attention.cpu:store_qkv", _stores_native),)
"""store_qkv(qkv, cos, sin, kv, kv_slots): norms, rope, and keys and values into their slots. The
reference wants slots >= 0; the native kernel leaves out tokens whose slot is below 0."""


def bind_composed(
    candidates: Sequence[Candidate],
    signature: AttentionSignature,
    stores: Sequence[Candidate] = STORE_REFERENCE,
    /,
    **weights: torch.Tensor,
) -> BoundOp:
    """The default over the first of paged_attention's `candidates` that takes the signature; its
    name is the ladder's. Raises UnsupportedError when none does."""
    sinks = {"sinks": weights.pop("sinks")} if signature.has_sinks else {}
    attend = bind("paged_attention", candidates, signature, **sinks)
    store = bind("store_qkv", stores, signature, **weights)

    def attend_rows(query: torch.Tensor, *rest: object) -> None:
        attend(query.shape[0], query, *rest)

    def store_rows(qkv: torch.Tensor, *rest: object) -> None:
        store(qkv.shape[0], qkv, *rest)

    return BoundOp([(None, compose(signature, attend_rows, store_rows))], attend.names)


def compose(signature: AttentionSignature, attend: Kernel, store: Kernel) -> Kernel:
    """The default: `attend` is a paged_attention kernel of the same signature, `store` one of
    store_qkv."""
    num_heads, head_dim = signature.num_heads, signature.head_dim

    def kernel(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        store(qkv, cos, sin, kv, meta.kv_slots)
        num_tokens = qkv.shape[0]
        query = qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
        attend(query, kv, meta, out.view(num_tokens, num_heads, head_dim))

    return kernel


def _takes_triton(signature: AttentionSignature) -> str | None:
    if signature.device_type != "cuda":
        return "for NVIDIA GPUs"
    if signature.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"not in {signature.dtype}"
    if signature.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is above {_MAX_HEAD_DIM}"
    if signature.num_heads > _MAX_GROUP * signature.num_kv_heads:
        return f"more than {_MAX_GROUP} query heads share a key head"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


_MAX_HEAD_DIM = 256
_MAX_GROUP = 64
_PACKAGE = "pelton.ops.qkv_attention.triton"
# Beside the weights these take `workspace` (paged_attention/launch.py). kv may have any strides
# over the same shape; kv_slots is -1 for padding, and padding stores nothing.
TRITON = (Candidate("triton", f"{_PACKAGE}:qkv_attention", _takes_triton),)
TRITON_FIXED = (Candidate("triton_fixed", f"{_PACKAGE}:fixed_qkv_attention", _takes_triton),)
