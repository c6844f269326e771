"""Every candidate against the reference in float64, and the reference against the formula."""

from __future__ import annotations

import functools
import importlib

import numpy as np
import pytest
import torch
from support.bidirectional import (
    check_attention,
    metadata,
    run,
    signature_of,
)
from support.interpreted import needs_triton, run_interpreted

from pelton.device.cpu import CPUDevice
from pelton.device.native.library import library
from pelton.errors import UnsupportedError
from pelton.ops.bidirectional_attention import CANDIDATES, reference
from pelton.ops.registry import bind

needs_library = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
FACTORIES = {
    "reference": reference.bidirectional_attention,
    "native": lambda *args, **weights: importlib.import_module(
        "pelton.ops.bidirectional_attention.cpu"
    ).bidirectional_attention(*args, **weights),
}
BY_NAME = ["reference", pytest.param("native", marks=needs_library)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    CPUDevice(1)


def test_the_formula():
    """One head, by loops."""
    signature = signature_of(torch.float64, num_heads=1, num_kv_heads=1, head_dim=2, window=1)
    qkv = torch.randn(4, 6, dtype=torch.float64)
    out = run(reference.bidirectional_attention(signature), signature, qkv, None, [3, 1])
    query, key, value = qkv.numpy().reshape(4, 3, 2).transpose(1, 0, 2)
    for i in range(3):
        seen = [j for j in range(3) if abs(i - j) <= 1]
        weights = np.array([np.exp(0.3 * (query[i] @ key[j])) for j in seen])
        expected = (weights[:, None] * value[seen]).sum(0) / weights.sum()
        np.testing.assert_allclose(out[i].numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(out[3].numpy(), value[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_against_float64(name, dtype):
    """Rows short and long: prefill.c takes those of 24 tokens and more in bfloat16."""
    check = functools.partial(check_attention, FACTORIES[name], dtype)
    check([1, 23, 24, 2, 130], num_padding=2)
    check([300, 1, 1], num_heads=3, num_kv_heads=3, head_dim=33)
    check([], num_padding=1)
    for window in (1, 5, 64, 129, 1000):
        check([150, 40, 3], window=window, rotary_dim=16)
    check([70, 9], has_norms=True, rotary_dim=8, head_dim=24)
    check([70, 9], has_norms=True)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_request_does_not_see_its_batch(dtype):
    """Alone, among others and with another number of threads: the same bits, with gcc 12."""
    signature = signature_of(dtype, window=20, num_kv_heads=4)
    kernel = FACTORIES["native"](signature)
    lengths = [1, 90, 23, 260, 2]
    qkv = torch.randn(sum(lengths), 12 * 16).to(dtype)
    whole = run(kernel, signature, qkv, None, lengths)
    for threads in (1, 2):
        CPUDevice(threads)
        ends = np.cumsum(lengths)
        for end, length in zip(ends, lengths, strict=True):
            alone = run(kernel, signature, qkv[end - length : end], None, [length])
            assert torch.equal(alone, whole[end - length : end]), (threads, length)


def test_what_is_taken():
    def names(**changes):
        return bind("bidirectional_attention", CANDIDATES, signature_of(**changes)).names

    assert names(dtype=torch.float64) == ("reference",)
    assert names(dtype=torch.float32, batch_invariant=True) == ("reference",)
    if library() is not None:
        assert names(dtype=torch.bfloat16) == ("native",)
    with pytest.raises(UnsupportedError, match="for NVIDIA GPUs"):
        bind("bidirectional_attention", CANDIDATES[:2], signature_of(torch.float64))


def test_metadata_of_no_rows():
    assert metadata([]).max_query_len == 0


@needs_triton
def test_in_the_interpreter():
    run_interpreted("bidirectional")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton(dtype):
    from pelton.ops.bidirectional_attention.triton import bidirectional_attention

    check = functools.partial(check_attention, bidirectional_attention, dtype, device="cuda")
    check(lengths=[1, 23, 16, 17, 130, 513], num_padding=3)
    for window in (0, 5, 64, 129):
        check(lengths=[300, 40, 3], window=window, rotary_dim=16)
    check(lengths=[700, 1], num_heads=12, num_kv_heads=12, head_dim=64, scale=0.125)
    check(lengths=[70, 9], has_norms=True, rotary_dim=128, head_dim=128, scale=0.03)
    check(lengths=[70, 9], num_heads=2, num_kv_heads=1, head_dim=256, scale=0.06)
