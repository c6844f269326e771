"""Taking packed bits apart. n: number of blocks. Bytes are uint8 tensors; low bits come first."""

from __future__ import annotations

import functools

import torch


def _repeated(byte: int) -> int:
    """A 64-bit word of eight such bytes."""
    return int.from_bytes(bytes([byte] * 8), "little")


@functools.cache
def _fields_of_bytes(width: int) -> torch.Tensor:
    """uint8 [256, 8 / width]: the fields of each byte."""
    shifts = torch.arange(0, 8, width)
    return (torch.arange(256).unsqueeze(1) >> shifts & ((1 << width) - 1)).to(torch.uint8)


def fields(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """uint8 [n, bytes] -> uint8 [n, bytes * 8 / width], fields of `width` bits.

    `run` bytes give their lowest fields first, then their next ones, and so on; then come the next
    `run` bytes. width: 1, 2 or 4. run: 1, 4 or a multiple of 8.
    """
    num_blocks = packed.shape[0]
    if run % 8:
        parts = torch.index_select(_fields_of_bytes(width), 0, packed.reshape(-1).int())
        return parts.view(num_blocks, -1, run, 8 // width).transpose(2, 3).reshape(num_blocks, -1)
    # Eight bytes at a time, because torch shifts bytes no faster than words.
    runs = words(packed, torch.int64).view(num_blocks, -1, run // 8)
    parts = runs.new_empty(*runs.shape[:2], 8 // width, run // 8)
    mask = _repeated((1 << width) - 1)
    for place in range(8 // width):
        torch.bitwise_and(runs >> width * place, mask, out=parts[:, :, place])
    return parts.view(num_blocks, -1).view(torch.uint8)


def half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def words(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [n, bytes] -> `dtype` (int16, int32 or int64) [n, bytes / itemsize], little-endian.

    A set highest bit makes a value negative: mask after shifting right.
    """
    # A clone, as a part of one block is contiguous too but need not be aligned.
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)
