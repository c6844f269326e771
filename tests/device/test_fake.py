"""The fake device is the net that the engine's tests hang in: it must catch what it claims to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pelton.device.fake import FakeDevice, FakeDeviceTensor, HostReadError

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t[0, 0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "numpy of a view": lambda t: t[0].numpy(),
    "np.asarray": lambda t: np.asarray(t),
    "np.from_dlpack": lambda t: np.from_dlpack(t),
    "torch.from_dlpack": lambda t: torch.from_dlpack(t),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to dtype": lambda t: t.double(),
    "clone": lambda t: t.clone(),
    "bool": lambda t: bool(t[0, 0]),
    "int": lambda t: int(t[0, 0]),
    "float": lambda t: float(t[0, 0]),
    "index": lambda t: [1, 2, 3][t[0, 0]],
    "slice": lambda t: [1, 2, 3][: t[0, 0]],
    "format": lambda t: f"{t[0, 0]:d}",
    "contains": lambda t: 3 in t,
    "equal": lambda t: torch.equal(t, t),
    "compare": lambda t: t == 0,
    "any": lambda t: t.any(),
    "nonzero": lambda t: t.nonzero(),
    "is_nonzero": lambda t: t[0, 0].is_nonzero(),
    "copy to host": lambda t: torch.zeros(2, 4, dtype=torch.int32).copy_(t),
    "assign to host": lambda t: torch.zeros(2, 4, dtype=torch.int32).__setitem__(slice(None), t),
    "pickle": lambda t: pickle.dumps(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "storage": lambda t: t.untyped_storage().tolist(),
}
WORK: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda t: t + 1,
    "add in place": lambda t: t.add_(1),
    "set item": lambda t: t.__setitem__(0, 1),
    "fill": lambda t: t.fill_(1),
    "out=": lambda t: torch.add(torch.ones(2, 4).int(), 1, out=t),
    "zeros_like": lambda t: torch.zeros_like(t),
    "cat": lambda t: torch.cat([torch.zeros(1, 4, dtype=torch.int32), t]),
    "matmul": lambda t: torch.ones(3, 2, dtype=torch.int32) @ t,
    "index with a list": lambda t: t[[0, 1]],
    "index with a list in a tuple": lambda t: t[:, [0, 1]],
    "index with a host tensor": lambda t: t[torch.tensor([0])],
    "index with an array": lambda t: t[np.array([0, 1])],
    "index with a mask": lambda t: t[np.array([True, False])],
    "index of host memory": lambda t: torch.arange(9)[t[0].long()],
    "host memory indexed by it": lambda t: torch.arange(9)[t[0]],
    "reshape that copies": lambda t: t.t().reshape(-1),
    "flatten that copies": lambda t: t.t().flatten(),
    "contiguous": lambda t: t.t().contiguous(),
    "replace data": lambda t: setattr(t, "data", torch.zeros(1)),
}


def device_tensor(device: FakeDevice) -> torch.Tensor:
    return device.zeros((2, 4), torch.int32)


@pytest.mark.parametrize("name", READS)
def test_host_reads_raise(name):
    with pytest.raises(HostReadError):
        READS[name](device_tensor(FakeDevice()))


@pytest.mark.parametrize("name", WORK)
def test_work_outside_launches_raises_and_changes_nothing(name):
    device = FakeDevice()
    tensor = device_tensor(device)
    with pytest.raises(HostReadError):
        WORK[name](tensor)
    assert read(device, tensor).tolist() == [[0] * 4] * 2


def test_views_are_allowed_and_stay_on_the_device():
    device = FakeDevice()
    tensor = device_tensor(device)
    views = [
        tensor[0],
        tensor[:, 1:3],
        tensor[..., None],
        tensor.view(-1),
        tensor.view(torch.int64),
        tensor.reshape(4, 2),
        tensor.flatten(),
        tensor.t(),
        tensor.transpose(0, 1),
        tensor.permute(1, 0),
        tensor.unsqueeze(0),
        tensor[None].squeeze(0),
        tensor.narrow(1, 0, 2),
        tensor[0].expand(3, 4),
        *tensor,
        *tensor.unbind(0),
        *tensor.split(1),
        *tensor.chunk(2),
        tensor.detach(),
        tensor[2:],
    ]
    assert all(type(view) is FakeDeviceTensor for view in views)
    assert (tensor.shape, tensor.dtype, len(tensor), tensor.dim()) == ((2, 4), torch.int32, 2, 2)
    assert tensor.numel() == tensor.nelement() == 8
    assert tensor.is_contiguous()
    assert tensor.stride() == (4, 1)
    assert tensor.element_size() == 4
    assert "device" in repr(tensor)
    # A view is a view: what is written through it arrives in the tensor.
    device.launch(torch.Tensor.fill_, tensor[:, 1:3], 5)
    assert read(device, tensor).tolist() == [[0, 5, 5, 0]] * 2


def read(device: FakeDevice, tensor: torch.Tensor) -> torch.Tensor:
    """The legal way: a copy into host memory and a wait."""
    host = device.host_buffer(tuple(tensor.shape), tensor.dtype)
    device.copy_to_host(host, tensor)
    device.synchronize()
    return host


def test_launches_wait_and_run_in_order():
    device = FakeDevice()
    order: list[str] = []
    device.launch(order.append, "a")
    first = device.record_event()
    device.launch(order.append, "b")
    device.launch(order.append, "c")
    last = device.record_event()
    assert order == []
    assert device.max_queued == 3
    assert not first.is_done()
    first.wait()
    assert order == ["a"], "an event waits for what is before it and no more"
    assert first.is_done()
    assert not last.is_done()
    last.wait()
    first.wait()
    assert order == ["a", "b", "c"]
    device.synchronize()
    assert device.record_event().is_done(), "nothing is queued"
    assert device.num_done == 3


def test_copies_are_as_late_as_they_may_be():
    device = FakeDevice()
    tensor = device_tensor(device)
    source = torch.ones(2, 4, dtype=torch.int32)
    device.copy_to_device(tensor, source)
    source.fill_(9)  # too early: the device must see it
    assert read(device, tensor).tolist() == [[9] * 4] * 2
    target = device.host_buffer((2, 4), torch.int32)
    device.copy_to_host(target, tensor)
    device.launch(torch.Tensor.fill_, tensor, 3)
    assert (target == 0).all(), "read too early: nothing is there yet"
    device.synchronize()
    assert (target == 9).all(), "the copy stands before the fill in the queue"
    assert device.num_copies_to_device == 1


def test_fresh_memory_is_poisoned():
    device = FakeDevice()
    assert device.poisons
    assert not device.runs_inline
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert read(device, device.empty((3,), dtype)).isnan().all()
    for dtype in (torch.int32, torch.int64, torch.int8):
        assert (read(device, device.empty((3,), dtype)) == -7).all()
    assert (read(device, device.empty((3,), torch.uint8)) != 0).all()
    assert (read(device, device.zeros((3,), torch.float32)) == 0).all()


def test_a_kernel_that_fails_stops_the_one_who_waits_and_not_the_queue():
    device = FakeDevice()
    done: list[int] = []

    def broken() -> None:
        raise ZeroDivisionError

    device.launch(broken)
    device.launch(done.append, 1)
    event = device.record_event()
    with pytest.raises(ZeroDivisionError):
        event.wait()
    assert not event.is_done()
    event.wait()
    assert done == [1]


def test_kernels_see_plain_tensors():
    device = FakeDevice()
    tensor = device_tensor(device)
    seen: list[int] = []

    def kernel(values: torch.Tensor) -> None:
        values += 1
        seen.append(int(values.sum()))

    device.launch(kernel, tensor)
    device.synchronize()
    assert seen == [8]
    with pytest.raises(HostReadError):
        tensor.sum()
