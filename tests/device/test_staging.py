"""Three ways of host memory to the device: which one is picked, and that each of them holds.

Case 1 of bug_reports.md; specs/staging_and_pooling.md 1.7 and 1.9.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pelton
from pelton.device.cpu import CPUDevice
from pelton.device.cuda import CUDADevice
from pelton.device.fake import FakeDevice
from pelton.device.protocol import Device
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError

DEVICES = {
    **{f"fake/{mode}": lambda mode=mode: FakeDevice(mode) for mode in STAGING_MODES},
    **{f"cpu/{mode}": lambda mode=mode: CPUDevice(1, mode) for mode in STAGING_MODES},
}


@pytest.fixture(
    params=[
        *DEVICES,
        *(pytest.param(f"cuda/{mode}", marks=pytest.mark.gpu) for mode in STAGING_MODES),
    ]
)
def device(request: pytest.FixtureRequest) -> Device:
    name, _, mode = request.param.partition("/")
    return CUDADevice(0, mode) if name == "cuda" else DEVICES[request.param]()


def kept(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel that is launched now finds in it."""
    copy = device.empty(tuple(tensor.shape), tensor.dtype)
    device.launch(torch.Tensor.copy_, copy, tensor)
    host = device.host_buffer(tuple(tensor.shape), tensor.dtype)
    device.deliver(host, copy)
    return host


def test_a_kernel_sees_the_words_of_every_publish(device):
    """T1."""
    block = device.staging_block(2048)
    for turn, n in enumerate((0, 3, 3, 4, 5, 3, 1024, 1025, 2)):
        words = np.arange(n, dtype=np.int32) * (turn + 1)
        block.words[:n] = words
        seen = kept(device, block.publish(n))
        device.synchronize()
        assert np.array_equal(seen.numpy(), words)


def test_what_was_published_is_kept_until_the_fence_and_not_longer(device):
    """T4. Overwritten behind the fence, the words that kernels have read stay what they were."""
    block = device.staging_block(4)
    block.words[:] = [1, 2, 3, 4]
    seen = kept(device, block.publish(4))
    fence = device.record_event()
    fence.wait()
    block.words[:] = -1
    device.synchronize()
    assert seen.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_words_overwritten_before_the_fence_show_on_the_fake_device(mode):
    """T4 the other way round: the net has no hole, whatever the mode."""
    device = FakeDevice(mode)
    block = device.staging_block(4)
    block.words[:] = [1, 2, 3, 4]
    seen = kept(device, block.publish(4))
    block.words[:] = -1
    device.synchronize()
    assert seen.tolist() == [-1] * 4


@pytest.mark.parametrize(("mode", "copies"), [("aliased", 0), ("pinned", 1), ("pageable", 1)])
def test_only_the_copying_modes_copy(mode, copies):
    device = FakeDevice(mode)
    device.staging_block(4).publish(3)
    assert device.num_copies_to_device == copies


class OneTimeCopy(FakeDevice):
    """As under confidential computing: the view is a copy of the first content."""

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return super().alias(host.clone())


class NoView(FakeDevice):
    def alias(self, host: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("operation not supported\nCUDA kernel errors might be ...")


class FirstWriteOnly(FakeDevice):
    """A view that is refreshed once."""

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        view = super().alias(host.clone())
        self.launch(torch.Tensor.copy_, view, host)
        return view


class ReadOnly(FakeDevice):
    """The host never sees what kernels write."""

    def launch(self, kernel, *args):
        if len(args) == 2 and args[1] is getattr(self, "view", None):
            args = (args[0], args[1].as_subclass(torch.Tensor).clone())
        super().launch(kernel, *args)

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        self.view = super().alias(host)
        return self.view


class NothingPinned(FakeDevice):
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("pinned memory was asked for, and plain memory given")


@pytest.mark.parametrize(
    ("kind", "mode", "reason"),
    [
        (FakeDevice, "aliased", "twice"),
        (OneTimeCopy, "pinned", "write 1 of the host was not seen"),
        (NoView, "pinned", "in place: operation not supported$"),
        (FirstWriteOnly, "pinned", "write 2 of the host was not seen"),
        (ReadOnly, "pinned", "kernel's write was not seen"),
        (NothingPinned, "pageable", "plain memory given"),
    ],
)
def test_what_is_promised_is_tried(kind, mode, reason):
    """T5."""
    device = kind()
    assert device.host_memory.mode == mode
    assert re.search(reason, device.host_memory.reason)
    block = device.staging_block(4)
    for value in (5, 6):
        block.words[:] = value
        seen = kept(device, block.publish(4))
        device.synchronize()
        assert seen.tolist() == [value] * 4


@pytest.mark.parametrize(
    ("kind", "asked"),
    [(OneTimeCopy, "aliased"), (NothingPinned, "aliased"), (NothingPinned, "pinned")],
)
def test_a_mode_that_does_not_work_is_refused_when_asked_for(kind, asked):
    with pytest.raises(ConfigError, match=f"staging_mode='{asked}' does not work.*Use 'auto'"):
        kind(asked)


@pytest.mark.parametrize("asked", STAGING_MODES)
def test_a_mode_that_works_is_taken_when_asked_for(asked):
    assert FakeDevice(asked).host_memory.mode == asked


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_a_large_cold_table_lies_with_the_host_where_the_device_reads_it_there(mode):
    """T2, T6."""
    device = FakeDevice(mode, cold_bytes=4000)
    pinned: list[int] = []
    make = device.pinned

    def recorded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        host = make(shape, dtype)
        pinned.append(host.data_ptr())
        return host

    device.pinned = recorded  # type: ignore[method-assign]
    small, large = (device.cold_table(f"t{n}", (n, 10), torch.int32) for n in (99, 100))
    again = device.cold_table("t100", (100, 10), torch.int32)  # measured first, then made
    lies_with_host = [table.data_ptr() in pinned for table in (small, large, again)]
    assert lies_with_host == [False, mode == "aliased", mode == "aliased"]
    for table in (small, large, again):
        seen = kept(device, table)
        device.synchronize()
        assert not seen.any()
        with pytest.raises(AssertionError):
            table.tolist()  # nothing but kernels
    host, on_device = device.host_memory.host_bytes, device.host_memory.device_bytes
    assert (host, on_device) == ((4000, 0) if mode == "aliased" else (0, 4000))
    line = device.describe_staging()
    assert line.startswith(f"Staging memory of fake: {mode} (asked for)")
    where = "host" if mode == "aliased" else "device"
    assert line.endswith(f"; 4000 bytes of large tables lie in {where} memory.")


def test_no_large_table_is_told_as_none():
    device = FakeDevice("pageable")
    device.cold_table("t", (100, 10), torch.int32)
    line = device.describe_staging()
    assert line.endswith("; 0 bytes of large tables lie in device memory."), line


def test_upper_rooms_never_name_a_mode():
    """The mode is a word of device/, and of those who let users choose it."""
    root = Path(pelton.__file__).parent
    may = {"device", "config", "setup", "bench", "cli"}
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0]
        found = re.search(
            r"host_memory|\baliased\b|pageable|is_pinned|pin_memory", path.read_text()
        )
        assert room in may or found is None, f"{path}: {found}"


@pytest.mark.gpu
def test_the_gpu_reads_host_memory_in_place():
    device = CUDADevice()
    assert device.host_memory.mode == "aliased", device.describe_staging()
    table = device.host_memory
    table._cold_bytes = 4
    seen = device.cold_table("t", (3, 5), torch.int32)
    device.launch(torch.Tensor.fill_, seen, 7)
    assert kept(device, seen).shape == (3, 5)
    device.synchronize()
    assert seen.is_cuda
    assert seen.tolist() == [[7] * 5] * 3
