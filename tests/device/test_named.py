"""Names of devices."""

from __future__ import annotations

import pytest
import torch

from pelton.device import cuda
from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice
from pelton.device.named import named_device
from pelton.device.table import STAGING_MODES


@pytest.mark.parametrize("mode", STAGING_MODES)
@pytest.mark.parametrize(("name", "kind"), [("cpu", CPUDevice), ("fake", FakeDevice)])
def test_a_name_makes_its_device_in_the_mode_that_is_asked_for(name, kind, mode):
    device = named_device(name, num_threads=1, staging_mode=mode)
    assert type(device) is kind
    assert device.host_memory.mode == mode


def test_threads_are_the_cpu_s():
    threads = torch.get_num_threads()
    named_device("cpu", num_threads=threads + 1, staging_mode="auto")
    assert torch.get_num_threads() == threads + 1
    named_device("cpu", num_threads=threads, staging_mode="auto")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_a_gpu_has_a_number(name, index, monkeypatch):
    monkeypatch.setattr(cuda, "CUDADevice", lambda *args: args)
    assert named_device(name, num_threads=1, staging_mode="pinned") == (index, "pinned")
