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


def test_what_is_compiled_is_loaded_too_when_the_outermost_ends():
    """Launchers are built and kernels loaded by the threads that compiled, and nobody waits in
    between."""
    from support.rehearsed_kernel import add_two

    device = CUDADevice()
    tensor = device.zeros((64,), torch.float32)
    with device.compiling():
        with device.rehearsing():
            add_two[(1,)](tensor, 64)
        with device.compiling():
            add_two.warmup(tensor, 32, grid=(1,))
        assert not tensor.any()
    kernels = list(add_two.device_caches[0][0].values())
    assert len(kernels) == 2
    assert all(kernel.module is not None for kernel in kernels)
