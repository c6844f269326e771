"""A rehearsal compiles what launches would need, and runs none of it. Run on the lent machine."""

from __future__ import annotations

import pytest
import torch

from pelton.device.cuda import CUDADevice

pytestmark = pytest.mark.gpu


def test_launches_compile_and_do_not_run():
    from support.rehearsed_kernel import add_one

    device = CUDADevice()
    tensor = device.zeros((64,), torch.float32)
    with device.rehearsing():
        add_one[(1,)](tensor, 64)
    assert not tensor.any()
    assert len(add_one.device_caches[0][0]) == 1
    add_one[(1,)](tensor, 64)
    assert (tensor == 1).all()
    assert len(add_one.device_caches[0][0]) == 1, "what was compiled is what is launched"
