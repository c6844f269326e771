"""float8 codes through float16's bits: torch's own conversion on the CPU goes number by number."""

from __future__ import annotations

import torch

from pelton.ops.quantise_kv.reference import SCALE

# float16 is seeeeemmmmmmmmmm. A code's bits, moved to the left by so many places, are those of the
# code divided by the factor: e4m3's exponent is a bit shorter, and counts from 7 instead of 15.
_PLACES_AND_FACTOR = {torch.float8_e4m3fn: (7, 256.0), torch.float8_e5m2: (8, 1.0)}
# So many at a time, so that intermediate tensors stay in the CPU's cache.
_NUMBERS = 1 << 16


def dequantise_fp8(
    rows: torch.Tensor, num_kv_heads: int, head_dim: int, codes: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """As the reference, bit for bit, where codes are finite."""
    places, factor = _PLACES_AND_FACTOR[codes]
    num_codes = 2 * num_kv_heads * head_dim
    wide = torch.promote_types(dtype, torch.float32)
    out = rows.new_empty((*rows.shape[:-1], 2, num_kv_heads, head_dim), dtype=dtype)
    size = max(1, _NUMBERS // num_codes)
    for some, into in zip(
        torch.split(rows.view(-1, rows.shape[-1]), size),
        torch.split(out.view(-1, 2 * num_kv_heads, head_dim), size),
        strict=True,
    ):
        bits = some[:, :num_codes].view(torch.int8).to(torch.int16).mul_(2**places)
        if factor != 1:
            bits.bitwise_and_(~0x4000)  # where the sign stands a second time
        scale = some[:, num_codes:].view(SCALE).to(wide).mul_(factor)
        numbers = bits.view(torch.float16).to(wide).view(into.shape)
        into.copy_(numbers.mul_(scale[..., None]))
    return out
