"""Weights from GGUF files: in their blocks, or dequantised as they are read, to values that are
bitwise those of ggml."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from pelton.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from pelton.checkpoint.name_map import NameRules
from pelton.checkpoint.source import Checkpoint
from pelton.errors import UnsupportedError
from pelton.layers.parameter import Parameter
from pelton.weights.ggml.dequantise import QUANTISED_TYPES, dequantise
from pelton.weights.safetensors import map_file
from pelton.weights.source import Blocks

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFSource:
    """One file, or all parts of a split one."""

    def __init__(self, header: GGUFHeader) -> None:
        self._tensors = header.tensors
        paths = {tensor.path for tensor in header.tensors.values()}
        self._maps = {path: map_file(path) for path in paths}
        self._left: dict[Path, int] = {}  # pages

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Parameter],
        rules: NameRules,
        seed: int,
    ) -> Self:
        return cls(read_gguf_header(checkpoint.files[0]))

    def names(self) -> Sequence[str]:
        tensors = self._tensors
        return sorted(tensors, key=lambda name: (tensors[name].path, tensors[name].start))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        tensor = self._tensors[name]
        kind = tensor.type
        if kind.name not in _FLOATS and kind.name not in QUANTISED_TYPES:
            raise UnsupportedError(
                f"{tensor.path}: tensor {name!r} has type {kind.name}, which is not "
                f"supported; supported: {', '.join((*_FLOATS, *QUANTISED_TYPES))}."
            )
        if tensor.end == tensor.start:
            return torch.empty(tensor.shape).narrow(dim, start, size)
        data = self._bytes(tensor)
        if tensor.start % 8:
            data = data.clone()
        if kind.name in _FLOATS:
            return data.view(_FLOATS[kind.name]).view(tensor.shape).narrow(dim, start, size)
        # A row is a run of whole blocks, so that only a cut along it can split a block.
        per_row = tensor.shape[-1] // kind.block_size
        blocks = data.view(*tensor.shape[:-1], per_row, kind.block_bytes)
        if dim < len(tensor.shape) - 1:
            return _numbers(kind.name, kind.block_size, blocks.narrow(dim, start, size))
        first, last = start // kind.block_size, -(-(start + size) // kind.block_size)
        values = _numbers(kind.name, kind.block_size, blocks.narrow(-2, first, last - first))
        return values.narrow(-1, start - first * kind.block_size, size)

    def blocks(self, name: str) -> Blocks | None:
        tensor = self._tensors[name]
        if tensor.type.name not in QUANTISED_TYPES or tensor.end == tensor.start:
            return None
        data = self._bytes(tensor)
        return Blocks(tensor.type.name, data.view(*tensor.shape[:-1], -1))

    def _bytes(self, tensor: GGUFTensor) -> torch.Tensor:
        self._leave_behind(tensor)
        return torch.frombuffer(
            self._maps[tensor.path],
            dtype=torch.uint8,
            count=tensor.end - tensor.start,
            offset=tensor.start,
        )

    def _leave_behind(self, tensor: GGUFTensor) -> None:
        """Give the file's pages before the tensor back; whoever reads them again gets them again.
        Tensors are read in the file's order, so that they do not add up to a second model."""
        page = mmap.PAGESIZE
        first, last = self._left.get(tensor.path, 0), tensor.start // page
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.path].madvise(mmap.MADV_DONTNEED, first * page, (last - first) * page)
            self._left[tensor.path] = last


def _numbers(kind: str, block_size: int, blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [..., blocks, bytes] -> float32 [..., blocks * block_size]."""
    flat = blocks.reshape(-1, blocks.shape[-1])
    out = torch.empty(flat.shape[0], block_size, dtype=torch.float32)
    dequantise(kind, flat, out)
    return out.view(*blocks.shape[:-2], -1)
