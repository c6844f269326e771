"""Every kernel against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from support.bidirectional import check_layer_norm

from pelton.device.cpu import CPUDevice
from pelton.ops.layer_norm import layer_norm
from pelton.ops.step_kernels import step_kernel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 384, 1000])
def test_on_the_cpu(width, dtype):
    torch.manual_seed(0)
    check_layer_norm(layer_norm, width, dtype)
    check_layer_norm(step_kernel("layer_norm", "cpu"), width, dtype)
    check_layer_norm(step_kernel("layer_norm", "cpu"), width, dtype, num_rows=0)


def test_threads_share_rows():
    torch.manual_seed(0)
    for threads in (1, 2):
        CPUDevice(threads)
        check_layer_norm(step_kernel("layer_norm", "cpu"), 500, torch.float32, num_rows=111)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 96, 384, 4100])
def test_on_a_gpu(width, dtype):
    check_layer_norm(step_kernel("layer_norm", "cuda"), width, dtype, "cuda")
