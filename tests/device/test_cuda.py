"""The CUDA device: order, events and copies that do not wait."""

from __future__ import annotations

import pytest
import torch

from pelton.device.cuda import CUDADevice
from pelton.errors import ConfigError

needs_gpu = pytest.mark.gpu


def slow(device: CUDADevice) -> None:
    """About a tenth of a second of work."""
    torch.cuda._sleep(200_000_000)


@needs_gpu
def test_events_pass_when_the_work_before_them_has_ended():
    device = CUDADevice(0)
    device.synchronize()
    assert not device.runs_inline
    device.launch(slow, device)
    event = device.record_event()
    assert not event.is_done(), "recording and launching wait for nothing"
    event.wait()
    assert event.is_done()


@needs_gpu
def test_copies_are_ordered_and_do_not_wait():
    device = CUDADevice(0)
    source = device.host_buffer((1024,), torch.int32)
    target = device.host_buffer((1024,), torch.int32)
    assert source.is_pinned()
    assert target.is_pinned()
    source.fill_(5)
    tensor = device.zeros((1024,), torch.int32)
    device.launch(torch.Tensor.add_, tensor, 1)  # a kernel's first use loads it, which waits
    device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        device.launch(slow, device)
        device.copy_to_device(tensor, source)
        device.launch(torch.Tensor.add_, tensor, 1)
        device.copy_to_host(target, tensor)
        event = device.record_event()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not event.is_done()
    assert (target == 0).all(), "the copy is queued behind the slow kernel"
    event.wait()
    assert (target == 6).all()


@needs_gpu
def test_memory_lies_where_it_should():
    device = CUDADevice(0)
    assert device.zeros((3,), torch.float32).device == device.torch_device
    assert device.empty((3,), torch.float32).device == device.torch_device
    assert device.host_buffer((0,), torch.int32).numpy().size == 0


@needs_gpu
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"cuda:99.*GPU\(s\) found"):
        CUDADevice(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="device='cpu'"):
        CUDADevice(0)
