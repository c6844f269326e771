"""bidirectional_attention and layer_norm against float64; as a program, their Triton kernels in the
interpreter."""

from __future__ import annotations

if __name__ == "__main__":
    import support.interpreter  # noqa: F401

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pelton.ops.bidirectional_attention import BidirectionalMetadata, BidirectionalSignature
from pelton.ops.bidirectional_attention import reference as plain
from pelton.ops.registry import Kernel

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def metadata(lengths: Sequence[int], device: str = "cpu") -> BidirectionalMetadata:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return BidirectionalMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        num_rows=len(lengths),
        query_lens=np.array(lengths, np.int32),
        max_query_len=max(lengths, default=0),
    )


def signature_of(dtype: torch.dtype, device: str = "cpu", **changes: Any) -> BidirectionalSignature:
    values: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.3}
    return BidirectionalSignature(dtype=dtype, device_type=device, **{**values, **changes})


def rotation(num_tokens: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(num_tokens, 1, rotary_dim // 2, dtype=torch.float64) * 6
    return torch.cat([angle.cos(), angle.cos()], -1), angle.sin()


def run(
    kernel: Kernel,
    signature: BidirectionalSignature,
    qkv: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    lengths: Sequence[int],
    device: str = "cpu",
) -> torch.Tensor:
    width = signature.num_heads * signature.head_dim
    out = torch.full((len(qkv), width), torch.nan, dtype=qkv.dtype, device=device)
    cos, sin = (None, None) if turn is None else (t.to(qkv.dtype).to(device) for t in turn)
    kernel(qkv.clone().to(device), cos, sin, metadata(lengths, device), out)
    return out.cpu()


def check_attention(
    factory: Callable[..., Kernel],
    dtype: torch.dtype,
    lengths: Sequence[int],
    device: str = "cpu",
    *,
    num_padding: int = 0,
    has_norms: bool = False,
    **changes: Any,
) -> None:
    """Against the reference in float64, on the same numbers."""
    signature = signature_of(dtype, device, qk_norm_eps=1e-5 if has_norms else None, **changes)
    heads = signature.num_heads + 2 * signature.num_kv_heads
    num_tokens = sum(lengths) + num_padding
    qkv = torch.randn(num_tokens, heads * signature.head_dim).to(dtype)
    turn = rotation(num_tokens, signature.rotary_dim) if signature.rotary_dim else None
    norms: dict[str, torch.Tensor] = {}
    if has_norms:
        norms = {n: 1 + torch.rand(signature.head_dim).to(dtype) for n in ("q_norm", "k_norm")}
    exact_signature = signature_of(torch.float64, qk_norm_eps=signature.qk_norm_eps, **changes)
    exact = plain.bidirectional_attention(
        exact_signature, **{name: norm.double() for name, norm in norms.items()}
    )
    if turn is not None:
        turn = tuple(t.to(dtype).double() for t in turn)  # type: ignore[assignment]
    expected = run(exact, exact_signature, qkv.double(), turn, lengths)
    kernel = factory(signature, **{name: norm.to(device) for name, norm in norms.items()})
    found = run(kernel, signature, qkv, turn, lengths, device)
    tolerance = TOLERANCE[dtype] * (2 if turn is not None or has_norms else 1)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert not found[sum(lengths) :].any(), "padding gets 0"


def check_layer_norm(
    kernel: Kernel, width: int, dtype: torch.dtype, device: str = "cpu", *, num_rows: int = 5
) -> None:
    x = (3 + 2 * torch.randn(num_rows, width)).to(dtype)
    weight, bias = torch.rand(width).to(dtype), torch.randn(width).to(dtype)
    for offset in (bias, None):
        wide = x.double()
        mean = wide.mean(1, keepdim=True)
        expected = (wide - mean) / ((wide - mean).square().mean(1, keepdim=True) + 1e-5).sqrt()
        expected = expected * weight.double()
        if offset is not None:
            expected += offset.double()
            offset = offset.to(device)
        out = torch.full_like(x, torch.nan, device=device)
        kernel(x.to(device), weight.to(device), offset, 1e-5, out)
        own = x.clone().to(device)
        kernel(own, weight.to(device), offset, 1e-5, own)
        assert torch.equal(own, out), "out may be x"
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def check_in_interpreter() -> None:
    """Small sizes; the interpreter has no dots in bfloat16."""
    from pelton.ops.bidirectional_attention.triton import bidirectional_attention
    from pelton.ops.layer_norm.triton import layer_norm

    check_attention(bidirectional_attention, torch.float32, [1, 33, 2, 65], num_padding=3)
    for window in (0, 3, 40):
        check_attention(
            bidirectional_attention, torch.float32, [67, 5], window=window, rotary_dim=16
        )
    check_attention(
        bidirectional_attention, torch.float16, [20, 1], head_dim=24, has_norms=True, rotary_dim=8
    )
    for width in (1, 70):
        check_layer_norm(layer_norm, width, torch.float32)


if __name__ == "__main__":
    check_in_interpreter()
