"""lm_head_sample by kernels against the reference's draw on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pelton.core.plan import ALL_MASKED, NAN_LOGITS, OK
from pelton.ops.gumbel_argmax.reference import gumbel_argmax
from pelton.ops.lm_head_sample import DrawRows, HeadSignature, reference

NUM_SLOTS = 9


def make_rows(num_rows: int, *, temperatures: Any = (0.0, 1.0, 0.4, 0.0, 2.5)) -> DrawRows:
    """Rows of several slots, two of one slot among them; slots' state differs."""
    slots = torch.arange(num_rows).mul_(4).remainder_(NUM_SLOTS)
    choice = torch.tensor(temperatures)
    return DrawRows(
        slots=slots,
        positions=torch.arange(3, 3 + num_rows, dtype=torch.int32),
        temperature=choice[torch.arange(NUM_SLOTS) % len(choice)],
        seeds=torch.arange(NUM_SLOTS) * 10**15 - 7,
    )


def rows_on(device: str, rows: DrawRows) -> DrawRows:
    return DrawRows(
        rows.slots.to(device),
        rows.positions.to(device),
        rows.temperature.to(device),
        rows.seeds.to(device),
    )


def head_of(weight: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> Any:
    def head(hidden: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(F.rms_norm(hidden, hidden.shape[1:], norm_weight, eps), weight.t(), out=out)

    return head


def signature_of(weight: torch.Tensor, **changes: Any) -> HeadSignature:
    return HeadSignature(
        **{
            "hidden_size": weight.shape[1],
            "vocab_size": weight.shape[0],
            "dtype": weight.dtype,
            "device_type": weight.device.type,
            "norm_eps": 1e-6,
            **changes,
        }
    )


def check_draw(
    make_draw: Any, *, vocab: int, dtype: torch.dtype, device: str = "cpu", max_rows: int = 18
) -> None:
    """Of given logits, ties among them; make_draw(vocab) -> a draw like reference.draw."""
    torch.manual_seed(vocab)
    draw = make_draw(vocab)
    for num_rows, temperatures in ((1, (0.0,)), (5, (0.0, 1.0, 0.4)), (18, (0.7,))):
        if num_rows > max_rows:
            continue
        rows = make_rows(num_rows, temperatures=temperatures)
        logits = (torch.randn(num_rows, vocab) * 4).round().to(dtype)
        if num_rows == 5:
            logits[1, vocab - 1] = torch.nan
            logits[2, 0] = torch.inf
            logits[3] = -torch.inf
        ids, status = torch.full((2, num_rows), -7, dtype=torch.int32)
        reference.draw(logits, rows, ids, status)
        found = torch.full((2, num_rows + 1), -7, dtype=torch.int32, device=device)
        draw(logits.to(device), rows_on(device, rows), found[0, :-1], found[1, :-1])
        assert found[0].tolist() == [*ids.tolist(), -7], (num_rows, vocab, dtype)
        assert found[1].tolist() == [*status.tolist(), -7], (num_rows, vocab, dtype)
        if num_rows == 5:
            assert status.tolist() == [OK, NAN_LOGITS, NAN_LOGITS, ALL_MASKED, OK]


def check_gumbel_argmax(kernel: Any, *, vocab: int, device: str = "cpu") -> None:
    """Against the reference; scores may differ by the noise's last bits."""
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab) * 3
    logits[4, 0], logits[5] = torch.nan, -torch.inf
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0, 1.0, 1.0])
    seeds, positions = torch.arange(6) * 10**17, torch.arange(6, dtype=torch.int32)
    ids, best = torch.full((6,), -7, dtype=torch.int32), torch.full((6,), -7.0)
    gumbel_argmax(logits, None, temperature, seeds, positions, ids, best)
    on = [one.to(device) for one in (temperature, seeds, positions, torch.zeros_like(ids), best)]
    kernel(logits.to(device), None, *on)
    assert on[3][:4].tolist() == ids[:4].tolist()
    assert ((on[3] >= 0) & (on[3] < vocab)).all()
    torch.testing.assert_close(on[4][:4].cpu(), best[:4], rtol=1e-6, atol=1e-6)
    assert not bool(on[4][4] < torch.inf)
    assert on[4][5] == -torch.inf


def check_candidates(kernel: Any, *, num_candidates: int, device: str = "cpu") -> None:
    """A draw among candidates in any order, against the reference."""
    torch.manual_seed(num_candidates)
    num_rows = 6
    values = torch.randn(num_rows, num_candidates) * 3
    values[:, num_candidates // 2 + 1 :] = -torch.inf
    values[2] = values[2, 0]
    values[4, 0], values[5] = torch.nan, -torch.inf
    ids = torch.stack([torch.randperm(7 * num_candidates)[:num_candidates] for _ in values]).int()
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 1.0])
    seeds, positions = torch.arange(6) * 10**17, torch.arange(6, dtype=torch.int32)
    out_ids, best = torch.full((6,), -7, dtype=torch.int32), torch.full((6,), -7.0)
    gumbel_argmax(values, ids, temperature, seeds, positions, out_ids, best)
    args = (values, ids, temperature, seeds, positions, torch.zeros_like(out_ids), best.clone())
    on = [one.to(device) for one in args]
    kernel(*on)
    found_ids, found = on[5].cpu(), on[6].cpu()
    assert found_ids[:4].tolist() == out_ids[:4].tolist()
    torch.testing.assert_close(found[:4], best[:4], rtol=1e-6, atol=1e-6)
    assert all(found_ids[row] in ids[row] for row in range(num_rows))
    assert not bool(found[4] < torch.inf)
    assert found[5] == -torch.inf


def check_fused(
    make: Any, *, sizes: tuple[int, int], num_rows: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """make(signature, head, weight, norm_weight) -> kernel. Each token has to have one of the best
    scores, up to the last bits of products in another order; and rows of NaN are told."""
    vocab, hidden_size = sizes
    torch.manual_seed(num_rows)
    weight = (torch.randn(vocab, hidden_size) / hidden_size**0.5).to(dtype)
    norm_weight = (torch.rand(hidden_size) + 0.5).to(dtype)
    hidden = (torch.randn(30, hidden_size) * 7).to(dtype)
    hidden[7] = torch.nan
    on = [tensor.to(device) for tensor in (weight, norm_weight)]
    kernel = make(signature_of(on[0]), head_of(*on, 1e-6), *on)
    for temperatures in ((0.0,), (0.0, 1.0, 0.4)):
        rows = make_rows(num_rows, temperatures=temperatures)
        indices = (torch.arange(num_rows) * 11 + 3) % 30
        logits = torch.full((num_rows, vocab), torch.nan, dtype=dtype, device=device)
        found = torch.full((2, num_rows + 1), -7, dtype=torch.int32, device=device)
        args = (hidden.to(device), indices.to(device), rows_on(device, rows), logits)
        kernel(*args, found[0, :-1], found[1, :-1])
        exact = F.rms_norm(hidden.double(), (hidden_size,), norm_weight.double(), 1e-6)
        scores = (exact[indices] @ weight.double().T).float()
        scores = scores_of(scores, rows)
        is_nan = indices == 7
        status = torch.where(is_nan, NAN_LOGITS, OK)
        assert found[1].tolist() == [*status.tolist(), -7]
        assert found[0][:-1][is_nan.to(device)].sum() == 0
        chosen = scores.gather(1, found[0, :-1].cpu().long()[:, None])[:, 0]
        slack = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
        lost = (scores.amax(1) - chosen)[~is_nan]
        assert (lost <= slack).all(), (lost.max(), sizes, num_rows, dtype)


def scores_of(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """logits [N, V] float32 -> with temperature and noise, where rows have some."""
    from pelton.ops.gumbel_argmax.reference import gumbel_noise, row_keys, token_bits

    heat = rows.temperature[rows.slots][:, None]
    keys = row_keys(rows.seeds[rows.slots], rows.positions + 1)
    ids = torch.arange(logits.shape[1], dtype=torch.int32)[None]
    noisy = logits / torch.where(heat > 0, heat, 1.0) + gumbel_noise(token_bits(ids, *keys))
    return torch.where(heat > 0, noisy, logits)
