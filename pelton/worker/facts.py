"""What the device is, before anything is put on it."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import torch

from pelton.config.hardware import DeviceFacts
from pelton.device.cuda import import_triton
from pelton.device.memory import cpu_facts
from pelton.device.native.library import library
from pelton.errors import ConfigError

_log = logging.getLogger(__name__)


def device_facts(device: str, first: int = 0) -> DeviceFacts:
    """Facts about "cpu", "cuda", "cuda:N", "fake", or for "auto" the best there is.

    first: the GPU that "cuda" means, where several engines share them; the last one there is, if
        there are not so many, which `share_of` refuses.

    Raises ConfigError for a GPU that is not there.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        most = max(torch.cuda.device_count() - 1, 0)
        return _cuda_facts(int(index) if index else min(first, most))
    kernels = library()
    if kernels is not None:
        _log.info("CPU kernels of level %s serve.", kernels.level)
    facts = replace(cpu_facts(), has_cpu_kernels=kernels is not None)
    return replace(facts, kind="fake") if kind == "fake" else facts


def _cuda_facts(index: int) -> DeviceFacts:
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ConfigError(
            f"device='cuda:{index}' needs an NVIDIA GPU and a CUDA build of torch; {count} found. "
            "Use device='cpu'."
        )
    import_triton()
    free, total = torch.cuda.mem_get_info(index)
    host = cpu_facts()
    is_ampere = torch.cuda.get_device_capability(index) >= (8, 0)
    return DeviceFacts(
        kind="cuda",
        name=torch.cuda.get_device_name(index),
        total_bytes=total,
        free_bytes=free,
        num_cores=host.num_cores,
        fast_bf16=is_ampere,
        fast_fp16=True,
        host_free_bytes=host.free_bytes,
        has_triton=importlib.util.find_spec("triton") is not None,
        num_devices=torch.cuda.device_count(),
    )
