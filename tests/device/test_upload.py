"""Weights through pinned memory, on a GPU. Run on the lent machine."""

from __future__ import annotations

import pytest
import torch

from pelton.device import upload
from pelton.device.upload import DirectUpload, PinnedUpload, upload_to


def sources() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [
        torch.randn(5, 7, generator=made),
        torch.randn(300, 33, generator=made).to(torch.bfloat16),
        torch.randn(64, 40, generator=made).t(),
        torch.randn(3, 40, 50, generator=made)[:, 3:9],
        torch.randn(17, generator=made),
        torch.randn(0, 4, generator=made),
    ]


def check(how: upload.Upload, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pairs = [(torch.empty(s.shape, dtype=dtype, device=device), s) for s in sources()]
        for target, source in pairs:
            how.put(target, source)
        how.finish()
        for target, source in pairs:
            assert torch.equal(target.cpu(), source.to(dtype))
        how = upload_to(torch.device(device))


def test_in_host_memory():
    assert isinstance(upload_to(torch.device("cpu")), DirectUpload)
    check(DirectUpload(), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_bytes", [256, 4096, 2**20])
def test_through_pinned_buffers(buffer_bytes, monkeypatch):
    """Smaller buffers than a tensor, than a row, and more pieces than buffers."""
    monkeypatch.setattr(upload, "_BUFFER_BYTES", buffer_bytes)
    check(PinnedUpload(torch.device("cuda")), "cuda")


@pytest.mark.gpu
def test_what_lies_on_the_gpu_is_copied_there_and_faults_are_raised():
    how = PinnedUpload(torch.device("cuda"))
    target, source = torch.empty(4, device="cuda"), torch.arange(4.0, device="cuda")
    how.put(target, source)
    how.finish()
    assert torch.equal(target, source)
    how = PinnedUpload(torch.device("cuda"))
    how.put(torch.empty(4, 2, device="cuda"), torch.ones(4, 3))
    with pytest.raises((RuntimeError, ValueError)):
        how.finish()
