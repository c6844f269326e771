"""The reference against the ops that it is made of, rows mixed; what it does not touch."""

from __future__ import annotations

import pytest
import torch
from support.heads import head_of, make_rows, signature_of

from pelton.core.plan import ALL_MASKED, NAN_LOGITS, OK
from pelton.device.native.library import library
from pelton.ops import lm_head_sample
from pelton.ops.gumbel_argmax.reference import gumbel_noise, row_keys, token_bits
from pelton.ops.lm_head_sample import reference
from pelton.ops.norm_linear.cpu import packed
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind


def expected(logits, rows):
    """Row by row in float32 as the contract says -> ids."""
    found = []
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist())):
        scores = logits[row].float()
        if rows.temperature[slot] > 0:
            keys = row_keys(
                rows.seeds[slot : slot + 1], torch.tensor([position + 1], dtype=torch.int32)
            )
            ids = torch.arange(len(scores), dtype=torch.int32)[None]
            scores = scores / rows.temperature[slot] + gumbel_noise(token_bits(ids, *keys))[0]
        found.append((scores == scores.max()).nonzero()[0].item())
    return found


@pytest.mark.parametrize("vocab", [1, 2, 513, 1031, 8193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [1, 1 << 18])
def test_the_bound_op_draws_what_the_contract_says(tile, dtype, vocab, monkeypatch):
    monkeypatch.setitem(reference._TILE_ELEMENTS, "cpu", tile)
    torch.manual_seed(0)
    weight, norm_weight = torch.randn(vocab, 24).to(dtype), torch.rand(24).to(dtype)
    hidden = torch.randn(30, 24).to(dtype)
    head = head_of(weight, norm_weight, 1e-6)
    op = bind(
        "lm_head_sample",
        [kind for kind in lm_head_sample.CANDIDATES if kind.name == "composed"],
        signature_of(weight),
        head=head,
        weight=weight,
        norm_weight=norm_weight,
    )
    for num_rows, temperatures in ((1, (0.0,)), (17, (0.0,)), (17, (0.0, 1.0, 0.4)), (1, (0.7,))):
        rows = make_rows(num_rows, temperatures=temperatures)
        indices = torch.randperm(30)[:num_rows]
        logits = torch.full((num_rows, vocab), torch.nan, dtype=dtype)
        out_ids = torch.full((num_rows + 2,), -7, dtype=torch.int32)
        status = out_ids.clone()
        op(num_rows, hidden, indices, rows, logits, out_ids[:num_rows], status[:num_rows])
        exact = torch.empty(num_rows, vocab, dtype=dtype)
        head(hidden[indices], exact)
        assert out_ids.tolist() == [*expected(exact, rows), -7, -7]
        assert status.tolist() == [OK] * num_rows + [-7, -7]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1e-38])
@pytest.mark.parametrize("vocab", [2, 700, 1025])
def test_broken_rows_are_told(vocab, temperature):
    rows = make_rows(4, temperatures=(temperature,))
    logits = 100 + torch.randn(4, vocab)
    logits[1, vocab - 1] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    out_ids, status = torch.full((2, 4), -7, dtype=torch.int32)
    reference.draw(logits, rows, out_ids, status)
    overflows = temperature == 1e-38  # logits / temperature are infinite: told, too
    assert status.tolist() == [NAN_LOGITS if overflows else OK, NAN_LOGITS, NAN_LOGITS, ALL_MASKED]
    assert out_ids[1:].tolist() == [0, 0, 0]
    assert 0 <= out_ids[0] < vocab


def test_ties_give_the_lowest_id():
    logits = torch.zeros(2, 3000, dtype=torch.bfloat16)
    logits[:, [7, 900, 2999]] = 5.0
    out_ids, status = torch.full((2, 2), -7, dtype=torch.int32)
    reference.draw(logits, make_rows(2, temperatures=(0.0,)), out_ids, status)
    assert out_ids.tolist() == [7, 7]


needs_library = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")


def draw_native(weight, norm_weight, hidden, indices, rows, **changes):
    """ids, status; what lies behind them is checked."""
    num_rows = len(indices)
    kernel = bind(
        "lm_head_sample",
        lm_head_sample.CANDIDATES,
        signature_of(weight, **changes),
        head=None,
        weight=weight,
        norm_weight=norm_weight,
    )
    assert kernel.names == ("native",)
    out_ids, status = torch.full((2, num_rows + 1), -7, dtype=torch.int32)
    logits = torch.empty(0)
    kernel(num_rows, hidden, indices, rows, logits, out_ids[:-1], status[:-1])
    assert (int(out_ids[-1]), int(status[-1])) == (-7, -7)
    return out_ids[:-1].tolist(), status[:-1].tolist()


@needs_library
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_native_kernel_draws_from_the_logits_that_it_does_not_store(
    dtype, is_invariant, num_threads
):
    """Its logits are bit for bit those of the product, so tokens are equal, ties included."""
    found = library()
    generator = torch.Generator().manual_seed(0)
    found.set_num_threads(num_threads)
    try:
        for vocab, width in ((1, 5), (17, 40), (33, 64), (1031, 24)):
            weight = torch.randn(vocab, width, generator=generator).to(dtype)
            norm_weight = torch.rand(width, generator=generator).to(dtype)
            hidden = torch.randn(500, width + 3, generator=generator).to(dtype)[:, :-3]
            for num_rows in (1, 3, 8, 9, 40, 400):
                rows = make_rows(num_rows)
                indices = torch.randperm(500, generator=generator)[:num_rows]
                logits = torch.empty(num_rows, vocab, dtype=dtype)
                signature = ProductSignature(
                    in_features=width,
                    out_features=vocab,
                    dtype=dtype,
                    device_type="cpu",
                    batch_invariant=is_invariant,
                    norm_eps=1e-6,
                )
                packed(signature, weight, norm_weight)(hidden[indices], logits, logits)
                ids, status = draw_native(
                    weight, norm_weight, hidden, indices, rows, batch_invariant=is_invariant
                )
                assert ids == expected(logits, rows)
                assert status == [OK] * num_rows
    finally:
        found.set_num_threads(torch.get_num_threads())


@needs_library
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1e-38])
@pytest.mark.parametrize("vocab", [2, 40])
def test_broken_rows_are_told_by_the_native_kernel(vocab, temperature):
    """One column of +1 and -1: rows see their weights, turned or not."""
    rows = make_rows(2, temperatures=(temperature,))
    weight, hidden = 100 + torch.rand(vocab, 1), torch.tensor([[1.0], [-1.0]])
    weight[vocab - 1] = torch.inf
    ids, status = draw_native(weight, torch.ones(1), hidden, torch.arange(2), rows)
    assert (ids[0], status[0]) == (0, NAN_LOGITS)
    # Divided by almost nothing, the finite ones are -inf, too.
    assert (status[1], ids[1] < vocab - 1) == (ALL_MASKED if temperature == 1e-38 else OK, True)
    weight[:] = torch.inf
    assert draw_native(weight.clone(), torch.ones(1), hidden, torch.arange(2), rows) == (
        [0, 0],
        [NAN_LOGITS, ALL_MASKED],
    )
    weight[:] = 1.0
    weight[0] = torch.nan
    assert draw_native(weight.clone(), torch.ones(1), hidden, torch.arange(2), rows) == (
        [0, 0],
        [NAN_LOGITS] * 2,
    )


@needs_library
def test_what_the_native_kernel_does_not_take():
    weight = torch.zeros(2, 2)
    for changes in ({"softcap": 3.0}, {"logits_divisor": 2.0}, {"dtype": torch.float64}):
        bound = bind(
            "lm_head_sample",
            lm_head_sample.CANDIDATES,
            signature_of(weight, **changes),
            head=None,
            weight=weight,
            norm_weight=weight[0],
        )
        assert bound.names == ("composed",)
