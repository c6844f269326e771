"""From a qkv product to attention: what the composition adds to its parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.codes import CODES, decoded

from pelton.device.native.library import library
from pelton.ops.paged_attention import (
    SDPA,
    AttentionMetadata,
    AttentionSignature,
    invariant,
    reference,
)
from pelton.ops.qkv_attention import bind_composed, compose, cpu
from pelton.ops.qkv_attention.reference import store_qkv
from pelton.ops.registry import Kernel

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4


def metadata(
    slots: list[int], query_lens: list[int], seq_lens: list[int], table: list[list[int]]
) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
        kv_slots=torch.tensor(slots, dtype=torch.int64),
        num_rows=len(query_lens),
        query_lens=np.array(query_lens, np.int32),
        seq_len_bounds=np.array(seq_lens, np.int32),
        bounds_are_exact=True,
        num_decode_rows=0,
    )


SIGNATURE = AttentionSignature(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    scale=0.25,
    dtype=torch.float64,
    device_type="cpu",
)


def run(qkv: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, position: torch.Tensor):
    kernel = compose(SIGNATURE, reference.paged_attention(SIGNATURE), store_qkv(SIGNATURE))
    return run_kernel(kernel, qkv, kv, meta, position)


def run_kernel(
    kernel: Kernel,
    qkv: torch.Tensor,
    kv: torch.Tensor,
    meta: AttentionMetadata,
    position: torch.Tensor,
):
    angle = position[:, None] * 100.0 ** -(torch.arange(DIM // 2).double() / (DIM // 2))
    cos = torch.cat([angle.cos()] * 2, -1)[:, None]
    out = torch.full((len(qkv), HEADS * DIM), torch.nan, dtype=torch.float64)
    kernel(qkv, cos, angle.sin()[:, None], kv, meta, out)
    return out


def test_scores_depend_on_distance_only_and_values_are_stored_unrotated():
    torch.manual_seed(0)
    qkv = torch.randn(6, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float64)
    outs = []
    for shift in (0, 33):
        kv = torch.full((4, SIZE, 2, KV_HEADS, DIM), torch.nan, dtype=torch.float64)
        meta = metadata([12, 13, 14, 15, 4, 5], [6], [6], [[3, 1]])
        outs.append(run(qkv.clone(), kv, meta, torch.arange(6) + shift))
        values = qkv[:, (HEADS + KV_HEADS) * DIM :].view(6, KV_HEADS, DIM)
        assert torch.equal(kv.flatten(0, 1)[meta.kv_slots, 1], values)
        assert kv[[0, 2]].isnan().all(), "other blocks are not touched"
        assert kv[1, 2:].isnan().all()
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)


def test_rows_of_one_step_may_read_what_the_others_store():
    """Two rows that share a block stored in this very step: all stores come before any read."""
    torch.manual_seed(1)
    qkv = torch.randn(6, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float64)
    kv = torch.full((4, SIZE, 2, KV_HEADS, DIM), torch.nan, dtype=torch.float64)
    # Row 0 is tokens 4 and 5 of a sequence whose tokens 0..3 are row 1 of the same step.
    meta = metadata([8, 9, 4, 5, 6, 7], [2, 4], [6, 4], [[1, 2], [1, 0]])
    out = run(qkv.clone(), kv, meta, torch.tensor([4, 5, 0, 1, 2, 3]))
    order = [2, 3, 4, 5, 0, 1]
    whole_meta = metadata([4, 5, 6, 7, 8, 9], [6], [6], [[1, 2]])
    fresh = torch.full_like(kv, torch.nan)
    whole = run(qkv[order].clone(), fresh, whole_meta, torch.arange(6))
    torch.testing.assert_close(out[order], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_padding", [0, 1, 5])
def test_padding_tokens_touch_the_null_block_alone(num_padding):
    """Case 7."""
    torch.manual_seed(2)
    width = (HEADS + 2 * KV_HEADS) * DIM
    qkv = torch.randn(3 + num_padding, width, dtype=torch.float64)
    kv = torch.zeros((3, SIZE, 2, KV_HEADS, DIM), dtype=torch.float64)
    position = torch.tensor([0, 1, 2] + [0] * num_padding)
    out = run(qkv.clone(), kv, metadata([4, 5, 6] + [0] * num_padding, [3], [3], [[1]]), position)
    alone_kv = torch.zeros_like(kv)
    alone = run(qkv[:3].clone(), alone_kv, metadata([4, 5, 6], [3], [3], [[1]]), position[:3])
    assert torch.equal(out[:3], alone)
    assert (out[3:] == 0).all()
    assert torch.equal(kv[1:], alone_kv[1:])
    assert (kv[0, 1:] == 0).all()


def test_no_tokens():
    """An empty part of a cut batch."""
    empty = torch.zeros(0, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float64)
    kv = torch.zeros((1, SIZE, 2, KV_HEADS, DIM), dtype=torch.float64)
    assert run(empty, kv, metadata([], [], [], [[]]), torch.zeros(0)).shape == (0, HEADS * DIM)


def test_query_and_key_heads_are_normed_before_rotation():
    """As if the product had given normed heads; values stay as they are."""
    torch.manual_seed(3)
    qkv = torch.randn(5, HEADS + 2 * KV_HEADS, DIM, dtype=torch.float64) * 3
    q_norm, k_norm = torch.rand(2, DIM, dtype=torch.float64) + 0.5
    normed = qkv.clone()
    for heads, weight in ((slice(0, HEADS), q_norm), (slice(HEADS, HEADS + KV_HEADS), k_norm)):
        part = qkv[:, heads]
        normed[:, heads] = part / (part.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    signature = replace(SIGNATURE, qk_norm_eps=0.1)
    attend = reference.paged_attention(signature)
    pools, outs = [], []
    position = torch.arange(5) + 7
    for given, kernel in (
        (qkv, compose(signature, attend, store_qkv(signature, q_norm, k_norm))),
        (normed, compose(SIGNATURE, attend, store_qkv(SIGNATURE))),
    ):
        kv = torch.zeros((3, SIZE, 2, KV_HEADS, DIM), dtype=torch.float64)
        meta = metadata([4, 5, 6, 7, 8], [5], [5], [[1, 2]])
        outs.append(run_kernel(kernel, given.flatten(1).clone(), kv, meta, position))
        pools.append(kv)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("code", CODES)
def test_a_chunk_reads_its_own_codes(code):
    """Its own tokens' keys and values are as coarse as those before it: bit for bit the same in one
    chunk or several. Values are quantised unrotated."""
    torch.manual_seed(4)
    signature = replace(SIGNATURE, kv_codes=CODES[code])
    kernel = compose(signature, invariant.paged_attention(signature), store_qkv(signature))
    qkv = torch.randn(9, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float64)
    outs, pools = [], []
    for chunk in (9, 1, 4):
        kv = torch.full((4, SIZE, 2 * KV_HEADS * (DIM + 2)), 255, dtype=torch.uint8)
        parts = []
        for first in range(0, 9, chunk):
            end = min(first + chunk, 9)
            slots = [4 + i for i in range(first, end)]
            meta = metadata(slots, [end - first], [end], [[1, 2, 3]])
            position = torch.arange(first, end)
            parts.append(run_kernel(kernel, qkv[first:end].clone(), kv, meta, position))
        outs.append(torch.cat(parts))
        pools.append(kv)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(pool, pools[0]) for pool in pools)
    assert (pools[0][0] == 255).all(), "other slots are not touched"
    assert (pools[0].flatten(0, 1)[13:] == 255).all()
    found, _ = decoded(pools[0].flatten(0, 1)[4:13], KV_HEADS, DIM, CODES[code])
    values = qkv[:, (HEADS + KV_HEADS) * DIM :].view(9, KV_HEADS, DIM).numpy()
    assert (np.abs(found[:, 1] - values) <= np.abs(values).max(-1, keepdims=True) / 8).all()
    exact = torch.zeros((4, SIZE, 2, KV_HEADS, DIM), dtype=torch.float64)
    meta = metadata([4 + i for i in range(9)], [9], [9], [[1, 2, 3]])
    plain = run(qkv.clone(), exact, meta, torch.arange(9))
    error = (outs[0] - plain).abs().max()
    assert 1e-4 < error < 0.3
    assert (outs[0][0] - plain[0]).abs().max() > 1e-4, "the first token sees its own code"


def test_a_bound_ladder_names_the_attention_that_runs():
    plain = bind_composed(SDPA, SIGNATURE)
    capped = bind_composed(SDPA, replace(SIGNATURE, softcap=5.0))
    sinks = bind_composed(SDPA, replace(SIGNATURE, has_sinks=True), sinks=torch.zeros(HEADS))
    assert (plain.names, capped.names, sinks.names) == (("sdpa",), ("masked",), ("masked",))


@pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"), [(9, 3, 64, 64), (2, 1, 20, 12), (1, 1, 136, 128)]
)
def test_the_native_store_is_the_reference(dtype, is_normed, heads, kv_heads, dim, rotary_dim):
    """Few tokens on one thread, many on all; a slot below 0 is left out."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    signature = AttentionSignature(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=1.0,
        dtype=dtype,
        device_type="cpu",
        qk_norm_eps=1e-2 if is_normed else None,
    )
    weights = [draw(dim).abs() + 0.5 for _ in range(2)] if is_normed else []
    wide = replace(signature, dtype=torch.float64)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}.get(dtype, 6e-3)
    for num_tokens in (0, 1, 5, 70):
        qkv = draw(num_tokens, (heads + 2 * kv_heads) * dim + 7)[:, :-7]
        cos, sin = draw(num_tokens, 1, rotary_dim), draw(num_tokens, 1, rotary_dim // 2)
        cos = torch.cat([cos[..., : rotary_dim // 2]] * 2, -1)
        slots = torch.randperm(100, generator=generator)[:num_tokens]
        kv = torch.full((25, 4, 2, kv_heads, dim), torch.nan, dtype=dtype)
        right_qkv, right_kv = qkv.double(), kv.double()
        store_qkv(wide, *(weight.double() for weight in weights))(
            right_qkv, cos.double(), sin.double(), right_kv, slots
        )
        if num_tokens:
            right_kv.view(100, -1)[slots[0]] = torch.nan
            slots[0] = -1
        cpu.store_qkv(signature, *weights)(qkv, cos, sin, kv, slots)
        torch.testing.assert_close(qkv.double(), right_qkv, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            kv.double(), right_kv, rtol=tolerance, atol=tolerance, equal_nan=True
        )
