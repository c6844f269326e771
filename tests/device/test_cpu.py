"""The CPU runs what it is given at once."""

from __future__ import annotations

import pytest
import torch

from pelton.device.cpu import CPUDevice


def test_launches_and_copies_have_ended_when_they_return():
    device = CPUDevice(1)
    assert device.runs_inline
    done: list[int] = []
    device.launch(done.append, 1)
    assert done == [1]
    target = device.zeros((3,), torch.int32)
    source = device.host_buffer((3,), torch.int32)
    source[:] = torch.tensor([1, 2, 3])
    device.copy_to_device(target, source)
    source.zero_()
    assert target.tolist() == [1, 2, 3], "a copy, not an alias"
    device.copy_to_host(source, target)
    assert source.tolist() == [1, 2, 3]
    event = device.record_event()
    assert event.is_done()
    event.wait()
    device.synchronize()


def test_memory_has_the_shape_and_type_asked_for():
    device = CPUDevice(1)
    for make in (device.zeros, device.empty, device.host_buffer):
        tensor = make((2, 3), torch.bfloat16)
        assert (tensor.shape, tensor.dtype) == ((2, 3), torch.bfloat16)
    assert (device.zeros((4,), torch.float32) == 0).all()


def test_threads_are_those_asked_for():
    before = torch.get_num_threads()
    try:
        CPUDevice(2)
        assert torch.get_num_threads() == 2
        CPUDevice()
        assert torch.get_num_threads() == 2, "None leaves them alone"
    finally:
        torch.set_num_threads(before)


def test_errors_of_a_kernel_reach_the_caller():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CPUDevice(1).launch(broken)
