"""Work by tokens of the request, none by the vocabulary but a memset: all tokens are counted, and
then the first to fetch a token's count, which leaves 0 behind, changes its logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 512
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def _tokens(tokens, num_tokens, row, stride, place, width, V):
    """Ids of a block of a row's tokens, and which count."""
    exists = (place < tl.load(num_tokens + row)) & (place < width)
    ids = tl.load(tokens + row * stride + place, mask=exists, other=-1)
    return ids, exists & (ids >= 0) & (ids < V)


@triton.jit(do_not_specialize=["width", "stride"])
def count(tokens, prompt_len, num_tokens, counts, width, V, stride, BLOCK: tl.constexpr):
    """counts: [N, V] int32, zeros -> how often a token is output; bit 30: the prompt has it."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids, is_token = _tokens(tokens, num_tokens, row, stride, place, width, V)
    is_prompt = place < tl.load(prompt_len + row)
    at = counts + row * V + ids
    tl.atomic_or(at, _IN_PROMPT, mask=is_token & is_prompt, sem="relaxed")
    tl.atomic_add(at, 1, mask=is_token & (is_prompt == 0), sem="relaxed")


@triton.jit(do_not_specialize=["width", "stride"])
def change(
    logits,
    tokens,
    num_tokens,
    repetition,
    frequency,
    presence,
    counts,
    width,
    V,
    logits_stride,
    stride,
    repetition_stride,
    frequency_stride,
    presence_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids, is_token = _tokens(tokens, num_tokens, row, stride, place, width, V)
    zero = tl.zeros([BLOCK], tl.int32)
    fetched = tl.atomic_xchg(counts + row * V + ids, zero, mask=is_token, sem="relaxed")
    is_mine = is_token & (fetched != 0)
    at = logits + row * logits_stride + ids
    logit = tl.load(at, mask=is_mine, other=0.0)
    factor = tl.load(repetition + row * repetition_stride)
    logit = tl.where(logit > 0, tl.div_rn(logit, tl.broadcast_to(factor, [BLOCK])), logit * factor)
    times = (fetched & (_IN_PROMPT - 1)).to(tl.float32)
    logit -= tl.load(frequency + row * frequency_stride) * times
    logit -= tl.where(times > 0, tl.load(presence + row * presence_stride), 0.0)
    tl.store(at, logit, mask=is_mine)


def penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    width = tokens.shape[1]
    if not tokens.numel():
        return
    counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    count[grid](
        tokens, prompt_len, num_tokens, counts, width, vocab_size, tokens.stride(0), BLOCK=_BLOCK
    )
    change[grid](
        logits, tokens, num_tokens, repetition, frequency, presence, counts, width, vocab_size,
        logits.stride(0), tokens.stride(0), repetition.stride(0), frequency.stride(0),
        presence.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip
