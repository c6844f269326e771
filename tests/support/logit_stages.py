"""The kernels of the sampler's stages beside their references on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from pelton.ops.argmax import argmax
from pelton.ops.judge import judge
from pelton.ops.logprobs import logprobs
from pelton.ops.min_p import min_p
from pelton.ops.penalties import penalties
from pelton.ops.row_tokens import row_tokens
from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN


def check_penalties(kernel: Any, *, vocab: int, width: int, device: str = "cpu") -> None:
    """Tokens that repeat, in the prompt and behind it; ids of nobody; what does not count yet."""
    torch.manual_seed(width)
    num_rows = 5
    logits = torch.randn(num_rows, vocab) * 3
    tokens = torch.randint(-1, min(vocab + 2, 40), (num_rows, width), dtype=torch.int32)
    tokens[1] = 0
    # A row's own position may be past what others need to be looked at.
    num_tokens = torch.tensor([width, width + 9, width // 2, 0, width]).int()
    prompt_len = torch.tensor([width // 3, width // 2, width, 0, 0]).int()
    repetition = [1.3, 0.7, 2.0, 1.5, 1.0]
    frequency = [0.1, 0.0, 0.5, 1.0, 0.0]
    presence = [0.0, -0.6, 0.5, 1.0, 0.0]
    # Columns, as the sampler has them.
    table = torch.tensor([repetition, frequency, presence]).T.contiguous()
    args = (tokens, prompt_len, num_tokens, *table.unbind(1))
    found = logits.to(device, copy=True)
    right = logits.clone()
    penalties(right, *args)
    on = (tokens.to(device), prompt_len.to(device), num_tokens.to(device))
    kernel(found, *on, *table.to(device).unbind(1))
    torch.testing.assert_close(found.cpu(), right, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[3:].cpu(), logits[3:]), "every bit of rows that ask for nothing"


def check_row_tokens(kernel: Any, *, num_drafts: int, device: str = "cpu") -> None:
    torch.manual_seed(num_drafts)
    fields = torch.randint(0, 99, (6, NEXT_TOKENS + 1 + num_drafts), dtype=torch.int32)
    fields[:, NEXT_TOKENS + 1 :] -= 30
    fields[:, TOTAL_LEN] = torch.tensor([0, 1, 7, 19, 20, 18])
    tokens = torch.randint(0, 99, (6, 20), dtype=torch.int32)
    slots = torch.tensor([3, 0, 5, 3, 4])
    for index in (
        torch.arange(25, dtype=torch.int32).expand(5, -1),
        torch.randint(-4, 30, (5, 3), dtype=torch.int32),
    ):
        right = torch.full(index.shape, -7, dtype=torch.int32)
        row_tokens(fields, tokens, slots, index, right)
        found = torch.full_like(right, -7).to(device)
        spread = index if device == "cpu" else index[:1].to(device).expand_as(index)
        if index.stride(0):
            spread = index.to(device)
        kernel(fields.to(device), tokens.to(device), slots.to(device), spread, found)
        assert torch.equal(found.cpu(), right)


def check_min_p(kernel: Any, *, vocab: int, device: str = "cpu") -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab) * 3
    logits[2, 0], logits[3] = -torch.inf, 1.0
    threshold = torch.tensor([0.0, 0.1, 0.01, 1.0, 0.5])
    right, found = logits.clone(), logits.to(device, copy=True)
    min_p(right, threshold)
    kernel(found, threshold.to(device))
    # The logarithm's last bit decides about a value that stands at the bound.
    assert (found.cpu() != right).sum() <= 1
    assert (found > -torch.inf).any(1).all()


def check_logprobs(
    kernel: Any, *, vocab: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    torch.manual_seed(vocab + width)
    logits = (torch.randn(4, vocab) * 4).to(dtype)
    logits[1, vocab // 2 :] = -torch.inf
    logits[2] = 1.0
    token_ids = torch.tensor([0, vocab - 1, vocab // 2, vocab // 3], dtype=torch.int32)
    empty = (
        torch.full((4,), torch.nan),
        torch.full((4,), -7, dtype=torch.int32),
        torch.full((4, width + 3), -7, dtype=torch.int32)[:, :width],
        torch.full((4, width + 3), torch.nan)[:, :width],
    )
    right = [one.clone() for one in empty]
    # The reference's own sums of 150,000 float32 are not exact enough.
    logprobs(logits, token_ids, *right)
    exact = logits.double().log_softmax(-1)
    right[0] = exact.gather(1, token_ids.long()[:, None])[:, 0].float()
    right[3] = exact.gather(1, right[2].long()).float()
    wide = [
        torch.full((4, width + 3), -7, dtype=d, device=device) for d in (torch.int32, torch.float32)
    ]
    found = [empty[0].to(device), empty[1].to(device), *(one[:, :width] for one in wide)]
    kernel(logits.to(device), token_ids.to(device), *found)
    for one, other in zip(found, right):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-5)
    assert all((one[:, width:] == -7).all() for one in wide)


def check_argmax(kernel: Any, *, vocab: int, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab) * 2).round().to(dtype)
    logits[3], logits[4, vocab // 2] = -torch.inf, torch.nan
    ids, best = torch.full((5,), -7, dtype=torch.int32), torch.full((5,), -7.0)
    argmax(logits, ids, best)
    found = torch.full_like(ids, -7).to(device), torch.full_like(best, -7.0).to(device)
    kernel(logits.to(device), *found)
    assert torch.equal(found[1][:4].cpu(), best[:4])
    assert torch.equal(found[0][:3].cpu(), ids[:3])
    assert ((found[0] >= 0) & (found[0] < vocab)).all()
    assert not bool(found[1][4] < torch.inf)


def check_judge(kernel: Any, device: str = "cpu") -> None:
    values = torch.tensor([0.5, -torch.inf, torch.inf, torch.nan])
    raw_max, out_max = values.repeat(4), values.repeat_interleave(4)
    ids, status = torch.arange(1, 17, dtype=torch.int32), torch.full((16,), -7, dtype=torch.int32)
    found = ids.to(device, copy=True), status.to(device, copy=True)
    judge(raw_max, out_max, ids, status)
    kernel(raw_max.to(device), out_max.to(device), *found)
    assert torch.equal(found[0].cpu(), ids)
    assert torch.equal(found[1].cpu(), status)
