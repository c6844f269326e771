"""Recorded launches: C calls without Python between them, and the rest as it was."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest
import torch

from pelton.device.native.calls import call
from pelton.device.native.library import library, loaded
from pelton.device.native.step_args import TakeRowsArgs
from pelton.device.native.tape import NativeTape
from pelton.ops.linear.cpu import packed
from pelton.ops.product import ProductSignature
from pelton.ops.take_rows.cpu import take_rows

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")


class Program:
    """out = rows of a table, as an index in memory says, times a weight; through fresh memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(50, 40, generator=generator)
        self.weight = torch.randn(48, 40, generator=generator)
        signature = ProductSignature(
            in_features=40, out_features=48, dtype=torch.float32, device_type="cpu"
        )
        self.product = packed(signature, self.weight)
        self.index = torch.zeros(3, dtype=torch.int64)
        self.out = torch.full((3, 48), torch.nan)

    def run(self) -> None:
        x = torch.empty(3, 60)[:, :40]
        take_rows(self.table, self.index, x)
        self.product(x, self.out)

    def double(self) -> None:
        self.out.mul_(2)

    def right(self) -> torch.Tensor:
        return self.table[self.index] @ self.weight.T


def test_native_launches_are_one_call_and_read_what_memory_holds_now():
    program = Program()
    tape = NativeTape([(program.run, ()), (program.run, ())], library())
    assert program.out.isnan().all(), "recording runs nothing"
    assert (len(tape), tape.num_python_calls, len(tape._steps)) == (2, 0, 1)
    gc.collect()
    torch.full((3, 60), torch.nan)  # where fresh memory would be, were it given back
    for index in ([1, 2, 3], [40, 0, 49]):
        program.index.copy_(torch.tensor(index))
        tape.replay()
        torch.testing.assert_close(program.out, program.right(), rtol=1e-5, atol=1e-5)


def test_a_hollow_tape_calls_and_computes_nothing():
    program = Program()
    launches = [(program.run, ()), (program.double, ()), (program.run, ())]
    tape = NativeTape(launches, library(), is_hollow=True)
    tape.replay()
    assert program.out.isnan().all()
    assert (len(tape), tape.num_python_calls) == (3, 1)
    NativeTape(launches, library()).replay()
    assert not program.out.isnan().any()


def test_what_torch_computes_stays_python_in_its_place():
    program = Program()
    launches = [(program.run, ()), (program.double, ()), (program.run, ()), (program.double, ())]
    tape = NativeTape(launches, library())
    assert (len(tape), tape.num_python_calls) == (4, 2)
    assert program.out.isnan().all()
    program.index.copy_(torch.tensor([7, 7, 9]))
    tape.replay()
    torch.testing.assert_close(program.out, 2 * program.right(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "is_zero",
    [
        lambda t: t.tolist() == [0, 0, 0],
        lambda t: t.numpy()[0] == 0,
        lambda t: int(t[0]) == 0,
        lambda t: not t.any(),
    ],
)
def test_a_launch_that_looks_at_memory_is_not_written_down(is_zero):
    program = Program()

    def run() -> None:
        program.run()
        # A decision by what the memory held while it was recorded would be wrong later.
        if not is_zero(program.index):
            program.double()

    tape = NativeTape([(run, ())], library())
    assert tape.num_python_calls == 1
    program.index.copy_(torch.tensor([7, 8, 9]))
    tape.replay()
    torch.testing.assert_close(program.out, 2 * program.right(), rtol=1e-5, atol=1e-5)


def test_without_a_library_all_stays_python():
    seen: list[int] = []
    tape = NativeTape([(seen.append, (1,)), (seen.append, (2,))], None)
    assert (tape.num_python_calls, seen) == (2, [])
    tape.replay()
    assert seen == [1, 2]


def test_a_fault_comes_out_of_the_replay():
    def broken() -> None:
        raise ZeroDivisionError

    tape = NativeTape([(broken, ())], library())
    with pytest.raises(ZeroDivisionError):
        tape.replay()
    program = Program()
    tape = NativeTape([(program.run, ())], library())
    tape._steps[0]._replay = lambda calls, count: 1
    with pytest.raises(MemoryError, match="pelton_linear"):
        tape.replay()


def test_a_call_keeps_the_numbers_that_it_was_given():
    """The structure is the kernel's own and changes with its next call."""
    table, index = torch.arange(8.0).view(4, 2), torch.tensor([3, 1])
    outs = [torch.zeros(2, 2), torch.zeros(2, 2)]
    args = TakeRowsArgs(
        table=table.data_ptr(), index=index.data_ptr(), row_bytes=8, table_stride=8, out_stride=8,
        num_rows=2, index_is_int64=1,
    )  # fmt: skip

    def run(out: torch.Tensor) -> None:
        args.out = out.data_ptr()
        call(loaded().functions.pelton_take_rows, args)

    NativeTape([(run, (out,)) for out in outs], library()).replay()
    for out in outs:
        assert torch.equal(out, table[index])


def test_a_call_that_fails_ends_the_replay():
    """What comes behind it is not run."""
    program = Program()
    fails = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda args: 1)
    fails.__name__ = "fails"

    def run() -> None:
        call(fails, TakeRowsArgs())
        program.run()

    tape = NativeTape([(run, ())], library())
    with pytest.raises(MemoryError, match="fails"):
        tape.replay()
    assert program.out.isnan().all()


def test_recording_imports_no_compiler():
    """torch's takes seconds to import."""
    program = """
import sys, torch
from pelton.device.native.library import library
from pelton.device.native.tape import NativeTape
x = torch.zeros(4)
tape = NativeTape([(lambda: x[:2], ()), (lambda: x.add_(1), ())], library())
assert tape.num_python_calls == 1
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False", "False"], done.stderr
