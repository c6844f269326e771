"""Memory of weights: aligned zeros that belong to one owner, and go when the last one has gone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pelton.device.native.memory import _CHUNK_BYTES, _HUGE_PAGE, weight_memory


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 100_000, _CHUNK_BYTES + 3])
def test_aligned_zeros_of_the_size_asked_for(num_bytes):
    memory = weight_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.dtype == torch.uint8
    assert memory.data_ptr() % 64 == 0
    assert not memory.any()
    memory.fill_(255)  # so that whoever got the same bytes next would see it


def test_pieces_lie_one_behind_the_other_and_never_overlap():
    pieces = [weight_memory(size) for size in (100, 64, 3_000_000, 5, _CHUNK_BYTES, 7)]
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    for number, piece in enumerate(pieces):
        assert (piece == number + 1).all()


def test_a_piece_may_be_written_whoever_made_the_chunk():
    with torch.inference_mode():
        for _ in range(2):  # the second needs a chunk of its own, and leaves some of it
            weight_memory(_CHUNK_BYTES - 64)
    weight_memory(64).fill_(1)


def test_what_nobody_holds_is_given_back():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    weight_memory(_CHUNK_BYTES)  # whatever was begun is not the next one's
    before = resident()
    for _ in range(4):
        weight_memory(_CHUNK_BYTES).fill_(1)
    gc.collect()
    assert resident() - before < 2 * _CHUNK_BYTES


def test_begins_at_a_huge_page():
    assert weight_memory(_CHUNK_BYTES).data_ptr() % _HUGE_PAGE == 0
