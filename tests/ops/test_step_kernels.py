"""The C kernels around a model's layers write what the references write, element for element."""

from __future__ import annotations

import pytest
import torch
from support.steps import check_no_verification_rows, check_staged_write, check_step, ints

from pelton.device.native.library import library
from pelton.ops.step_kernels import step_kernel
from pelton.ops.take_packed_rows import cpu as take_packed_rows

needs_library = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")


def both(op: str):
    """The C kernel and the reference of an op."""
    native, reference = step_kernel(op, "cpu"), step_kernel(op, "a device without kernels")
    assert native is not reference
    return native, reference


@needs_library
@pytest.mark.parametrize("seed", range(12))
def test_inputs_draws_and_rows_are_the_references(seed):
    check_step(lambda op: both(op)[0], seed)


@needs_library
def test_a_step_without_verification_rows_yields_nothing():
    for verify in both("verify"):
        check_no_verification_rows(verify)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_taken(dtype, index_dtype):
    table = torch.arange(7 * 5).view(7, 5).to(dtype)
    index = torch.tensor([6, 0, 0, 3], dtype=index_dtype)
    for take in both("take_rows"):
        out = torch.full((4, 5), torch.nan, dtype=dtype)
        take(table, index, out)
        assert torch.equal(out, table[index.long()])
        take(table, index[:0], out[:0])


@needs_library
def test_words_are_written_where_they_belong():
    for write in both("staged_write"):
        check_staged_write(write)


@needs_library
def test_blocks_of_every_pool_are_zeroed():
    for zero in both("zero_blocks"):
        pools = [torch.ones(5, 2, 3), torch.ones(5, 7, dtype=torch.uint8)]
        zero(pools, ints(4, 1))
        for pool in pools:
            assert pool.flatten(1).any(1).tolist() == [True, False, True, True, False]
        zero(pools, ints())


def test_without_a_library_the_reference_serves(monkeypatch, request):
    step_kernel.cache_clear()  # chosen once in a process
    request.addfinalizer(step_kernel.cache_clear)
    monkeypatch.setattr("pelton.ops.step_kernels.library", lambda: None)
    from pelton.ops.verify import verify

    assert step_kernel("verify", "cpu") is verify


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_taken_from_what_products_read(dtype):
    for num_rows, width in ((40, 33), (16, 64), (5, 1)):
        weight = torch.randn(num_rows, width).to(dtype)
        index = torch.randint(0, num_rows, (9,), dtype=torch.int32)
        out = torch.full((9, width + 2), torch.nan, dtype=dtype)
        take_packed_rows.bind(weight.clone())(index, out[:, :width])
        assert torch.equal(out[:, :width], weight[index.long()])
        assert out[:, width:].isnan().all()
