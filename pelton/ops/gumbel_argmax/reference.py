from __future__ import annotations

import torch

from pelton.ops.argmax.reference import row_argmax


def _int32(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


M1 = _int32(0x85EBCA6B)
M2 = _int32(0xC2B2AE35)
G = _int32(0x9E3779B1)
_NO_ID = 2**31 - 1


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits, logical, in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """murmur3's finaliser, in place."""
    x = _xor_shift(x, 16).mul_(M1)
    x = _xor_shift(x, 13).mul_(M2)
    return _xor_shift(x, 16)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """seeds: [N] int64, positions: [N] int32 -> key0, key1: [N] int32."""
    words = seeds.contiguous().view(torch.int32).view(-1, 2).T  # low, high; little-endian
    first = torch.stack((words[0], words[1] ^ M1))
    keys = _mix(_mix(first.add_(positions * G)).add_(words.flip(0)))
    return keys[0], keys[1]


def token_bits(token_ids: torch.Tensor, key0: torch.Tensor, key1: torch.Tensor) -> torch.Tensor:
    """token_ids: [N or 1, C] int32; keys: [N] -> [N, C] int32."""
    x = token_ids * G + key0[:, None]
    x = _xor_shift(x, 16).mul_(M1).add_(key1[:, None])
    x = _xor_shift(x, 13).mul_(M2)
    return _xor_shift(x, 16)


def gumbel_noise(bits: torch.Tensor) -> torch.Tensor:
    """bits: int32 -> float32 of the same shape; finite for every input. Overwrites `bits`."""
    w = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    w = w.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def gumbel_argmax(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out_ids: torch.Tensor,
    out_max: torch.Tensor,
) -> None:
    columns = token_ids
    if columns is None:
        columns = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    scores = gumbel_noise(token_bits(columns, *row_keys(seeds, positions)))
    # Noise is finite, so a logit of -inf stays -inf.
    scores.mul_((temperature > 0)[:, None]).add_(logits)
    if token_ids is None:
        best, ids = row_argmax(scores)
        out_ids.copy_(ids)
    else:
        best = scores.amax(-1)
        # Losers count as the largest id; beside a NaN nobody loses.
        losers = (scores < best[:, None]).to(torch.int32).mul_(_NO_ID)
        out_ids.copy_(losers.bitwise_or_(token_ids).amin(-1))
    out_max.copy_(best)
