"""keep_top against what top_k_top_p keeps."""

from __future__ import annotations

from typing import Any

import torch

from pelton.ops.keep_top.reference import keep_top as reference
from pelton.ops.top_k_top_p.reference import top_k_top_p

KINDS = ("random", "ties", "flat")


def logits_of(kind: str, num_rows: int, vocab: int) -> torch.Tensor:
    """[num_rows, vocab] float32, random or full of equal ones; with a -0.0, and half a row of
    -inf."""
    logits = torch.randn(num_rows, vocab) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(num_rows, vocab)
    logits[0, vocab // 2] = -0.0
    logits[3, : vocab // 2] = -torch.inf
    return logits


def check_keep_top(
    kernel: Any, *, vocab: int, kinds: tuple[str, ...] = KINDS, device: str = "cpu"
) -> None:
    torch.manual_seed(vocab)
    ks = [1, 2, 5, vocab, vocab - 1, vocab, vocab, 7, vocab, 3, -1, vocab]
    ps = [1.0, 1.0, 0.5, 0.9, 1.0, 1e-6, 0.999, 0.3, 1.0, 0.7, 0.9, 0.0]
    top_k = torch.tensor(ks, dtype=torch.int32).clamp(min=-1)
    top_p = torch.tensor(ps)
    for kind in kinds:
        logits = logits_of(kind, len(ks), vocab)
        found = logits.to(device, copy=True)
        reference(logits, top_k, top_p)
        kernel(found, top_k.to(device), top_p.to(device))
        found = found.cpu()
        # A probability's last bit may be another, and with it who is the last to stay.
        differs = (found != logits).sum(1)
        assert (differs <= 1).all(), (kind, vocab, differs)
        assert (differs == 0).float().mean() > 0.8, (kind, vocab, differs)
        assert (found > -torch.inf).any(1).all()


def check_top_k_top_p(
    kernel: Any, *, vocab: int, width: int, kinds: tuple[str, ...] = KINDS, device: str = "cpu"
) -> None:
    """Against the reference, with poison in the results. width: of the candidates."""
    torch.manual_seed(vocab + width)
    most = min(width, vocab)
    ks = [1, 2, most, most, 0, most, max(1, most // 2), most, 3]
    ps = [1.0, 0.5, 0.9, 1.0, 0.5, 1e-6, 0.3, 0.999, 0.0]
    top_k, top_p = torch.tensor(ks, dtype=torch.int32), torch.tensor(ps)
    for kind in kinds:
        logits = logits_of(kind, len(ks), vocab)
        shape = (len(ks), most)
        values, ids = torch.full(shape, -7.0), torch.full(shape, -7, dtype=torch.int32)
        top_k_top_p(logits, top_k, top_p, values, ids)
        found = values.to(device).fill_(torch.nan), ids.to(device).fill_(-7)
        kernel(logits.to(device), top_k.to(device), top_p.to(device), *found)
        found_values, found_ids = found[0].cpu(), found[1].cpu()
        assert ((found_ids >= 0) & (found_ids < vocab)).all()
        # A probability's last bit may be another, and with it who is the last to stay.
        is_kept = (values > -torch.inf) & (found_values > -torch.inf)
        differs = ((values > -torch.inf) != (found_values > -torch.inf)).sum(1)
        assert (differs <= 1).all(), (kind, vocab, width, differs)
        assert (differs == 0).float().mean() > 0.7, (kind, vocab, width, differs)
        assert is_kept.any(1).all()
        assert torch.equal(values[is_kept] + 0.0, found_values[is_kept] + 0.0), (kind, vocab, width)
        assert torch.equal(ids[is_kept], found_ids[is_kept]), (kind, vocab, width)
