"""Results come to memory that is not pinned without keeping the host waiting."""

from __future__ import annotations

import pytest
import torch

from pelton.device.cpu import CPUDevice
from pelton.device.cuda import CUDADevice
from pelton.device.fake import FakeDevice
from pelton.device.table import STAGING_MODES

# Some tens of milliseconds.
_CYCLES = 50_000_000


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_what_is_delivered_is_there_when_an_event_behind_it_has_been_waited_for(mode):
    device = FakeDevice(mode)
    source = device.zeros((4,), torch.int32)
    hosts = [device.host_buffer((4,), torch.int32) for _ in range(3)]
    events = []
    for value, host in enumerate(hosts, start=1):
        device.launch(torch.Tensor.fill_, source, value)
        device.deliver(host, source)
        events.append(device.record_event())
    device.launch(torch.Tensor.fill_, source, 9)  # the next step's
    assert device.num_done == 0, "nobody has waited"
    events[1].wait()
    assert [host.tolist() for host in hosts] == [[1] * 4, [2] * 4, [0] * 4]
    events[0].wait()
    device.synchronize()
    assert [host.tolist() for host in hosts] == [[1] * 4, [2] * 4, [3] * 4]


def test_an_event_lands_nothing_that_was_delivered_after_it():
    device = FakeDevice("pageable")
    source = device.zeros((1,), torch.int32)
    event = device.record_event()
    host = device.host_buffer((1,), torch.int32)
    device.launch(torch.Tensor.fill_, source, 5)
    device.deliver(host, source)
    event.wait()
    assert device.num_done == 0
    assert host.tolist() == [0]


def test_late_copies_land_in_the_order_in_which_they_were_asked_for():
    """A slot's next owner comes last, also where its first one was given up."""
    device = FakeDevice("pageable")
    host = device.host_buffer((1,), torch.int32)
    for value in (1, 2):
        source = device.zeros((1,), torch.int32)
        device.launch(torch.Tensor.fill_, source, value)
        device.deliver(host, source)
    device.record_event().wait()
    assert host.tolist() == [2]


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_a_device_that_runs_inline_delivers_at_once(mode):
    device = CPUDevice(1, mode)
    host = device.host_buffer((2,), torch.int32)
    device.deliver(host, torch.full((2,), 3, dtype=torch.int32))
    assert host.tolist() == [3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", STAGING_MODES)
def test_delivering_never_keeps_the_host_waiting(mode):
    device = CUDADevice(0, mode)
    source = device.zeros((1000,), torch.int32)
    host = device.host_buffer((1000,), torch.int32)
    assert host.is_pinned() == (mode != "pageable")
    device.deliver(host, source)  # what the first time makes is made
    device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        device.launch(torch.cuda._sleep, _CYCLES)
        device.launch(torch.Tensor.fill_, source, 7)
        device.deliver(host, source)
        event = device.record_event()
        device.launch(torch.Tensor.fill_, source, 8)
        device.launch(torch.cuda._sleep, _CYCLES)
        assert not event.is_done()
        event.wait()
        assert not device.record_event().is_done(), "no wait for what comes behind it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert host.tolist() == [7] * 1000
