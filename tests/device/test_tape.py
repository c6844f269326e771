"""Recordings of devices whose kernels are calls."""

from __future__ import annotations

import pytest
import torch

from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice


def add(tensor: torch.Tensor, amount: int) -> None:
    tensor.add_(amount)


@pytest.mark.parametrize("kind", [CPUDevice, FakeDevice])
def test_a_recording_runs_nothing_until_it_is_replayed(kind):
    device = kind()
    tensor, host = device.zeros((2,), torch.int32), device.host_buffer((2,), torch.int32)

    def run() -> None:
        device.launch(add, tensor, 3)
        device.launch(torch.Tensor.mul_, tensor, 2)

    recording = device.record(run)
    assert len(recording) == 2

    def value() -> list[int]:
        device.copy_to_host(host, tensor)
        device.synchronize()
        return host.tolist()

    assert value() == [0, 0]
    recording.replay()
    assert value() == [6, 6]
    device.launch(add, tensor, 1)
    recording.replay()
    assert value() == [20, 20]


def test_a_replay_is_queued_like_launches():
    device = FakeDevice()
    tensor = device.zeros((1,), torch.int32)
    recording = device.record(lambda: device.launch(add, tensor, 1))
    recording.replay()
    event = device.record_event()
    recording.replay()
    assert not event.is_done()
    event.wait()
    assert device.num_done == 1


@pytest.mark.parametrize("kind", [CPUDevice, FakeDevice])
def test_recordings_do_not_nest_or_copy_host_memory(kind):
    device = kind()
    tensor, host = device.zeros((1,), torch.int32), device.host_buffer((1,), torch.int32)
    for inner in (
        lambda: device.record(lambda: None),
        lambda: device.copy_to_device(tensor, host),
        lambda: device.copy_to_host(host, tensor),
    ):
        with pytest.raises(AssertionError, match="recording"):
            device.record(inner)
    device.record(lambda: device.launch(add, tensor, 1)).replay()
