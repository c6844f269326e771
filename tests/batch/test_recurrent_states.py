from __future__ import annotations

import pytest
import torch

from pelton.batch.recurrent_states import RecurrentStates
from pelton.core.kv.spec import LayerKV, RecurrentSpec
from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice


def layer(index: int, recurrent: RecurrentSpec | None) -> LayerKV:
    return LayerKV(
        index=index,
        num_kv_heads=1,
        head_dim=4,
        block_size=4,
        page_bytes=0,
        dtype="bfloat16",
        kind="full" if recurrent is None else "recurrent",
        recurrent=recurrent,
    )


def spec(conv_dtype: str) -> RecurrentSpec:
    return RecurrentSpec(
        ssm_shape=(2, 3, 5), ssm_dtype="float32", conv_shape=(3, 7), conv_dtype=conv_dtype
    )


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 208), ("bfloat16", 176)])
def test_bytes_of_a_state(dtype, num_bytes):
    """120 + 84 or 120 + 42, rounded up to a multiple of 16."""
    assert spec(dtype).state_bytes == num_bytes
    assert layer(0, spec(dtype)).state_bytes == num_bytes
    assert layer(0, None).state_bytes == 0


@pytest.mark.parametrize("device", [CPUDevice(1), FakeDevice()], ids=["cpu", "fake"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_of_one_memory(device, dtype):
    layers = [layer(0, spec(dtype)), layer(1, None), layer(2, spec(dtype))]
    states = RecurrentStates(device, layers, num_rows=3, num_drafts=4)
    assert states.layer_indices == (0, 2)
    assert states.bytes_per_row == 2 * 5 * spec(dtype).state_bytes
    tensors = states.tensors(2)
    assert tensors.ssm.shape == (3, 5, 2, 3, 5)
    assert tensors.conv.shape == (3, 5, 3, 7)
    assert tensors.conv.dtype == getattr(torch, dtype)
    assert tensors.raw.is_contiguous()
    # Rows and ring are one axis for kernels.
    assert tensors.ssm.view(15, 2, 3, 5).shape[0] == tensors.conv.view(15, 3, 7).shape[0] == 15

    def fill() -> None:
        tensors.raw.zero_()
        tensors.ssm[1, 2] = 1.0
        tensors.conv[1, 2] = 1.0

    device.launch(fill)
    device.synchronize()
    host = device.host_buffer(tuple(tensors.raw.shape), torch.uint8)
    device.copy_to_host(host, tensors.raw)
    device.synchronize()
    element = tensors.conv.element_size()
    assert host[1, 2].any()
    assert torch.equal(host[1, 2, :120].view(torch.float32), torch.ones(30))
    conv = host[1, 2, 120 : 120 + 21 * element].view(getattr(torch, dtype))
    assert torch.equal(conv, torch.ones(21, dtype=getattr(torch, dtype)))
    host[1, 2] = 0
    assert not host.any()


def test_no_recurrent_layers():
    states = RecurrentStates(CPUDevice(1), [layer(0, None)], num_rows=3, num_drafts=0)
    assert states.layer_indices == ()
    assert states.bytes_per_row == 0
