from __future__ import annotations

import torch

# A scale has float32's range in two bytes. Its own rounding costs less than the codes' does.
SCALE = torch.bfloat16


def quantise_kv(kv: torch.Tensor, num_kv_heads: int, codes: torch.dtype) -> torch.Tensor:
    info = torch.finfo(codes) if codes.is_floating_point else torch.iinfo(codes)
    num_tokens, num_codes = kv.shape
    heads = kv.view(num_tokens, 2, num_kv_heads, num_codes // (2 * num_kv_heads))
    heads = heads.to(torch.promote_types(kv.dtype, torch.float32))
    # Above zero, so that zeros are not 0 / 0.
    scale = (heads.abs().amax(-1) / info.max).clamp_(min=torch.finfo(SCALE).tiny).to(SCALE)
    # Where its scale was rounded down the largest number lies up to 1/256 beyond the largest code,
    # and that rounds to it in every type of codes: none overflows.
    scaled = heads / scale[..., None]
    if not codes.is_floating_point:
        scaled.round_()
    width = num_codes + 2 * num_kv_heads * SCALE.itemsize
    rows = torch.empty((num_tokens, width), dtype=torch.uint8, device=kv.device)
    rows[:, :num_codes].view(codes).copy_(scaled.flatten(1))
    rows[:, num_codes:].view(SCALE).copy_(scale.flatten(1))
    return rows
