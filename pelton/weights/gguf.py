"""Weights from a GGUF file, dequantised while they are read.

Source of the block layouts: ggml's ggml-common.h (block_q4_0, block_q4_1, block_q8_0). Values are
computed in float32 in ggml's order of operations, so they equal its own bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch

from pelton.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from pelton.checkpoint.name_map import NameRules
from pelton.checkpoint.source import Checkpoint
from pelton.errors import UnsupportedError
from pelton.layers.parameter import Parameter
from pelton.weights.safetensors import map_file


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 18 bytes] -> [blocks, 32]: float16 scale, 16 bytes of two values (low nibbles are
    elements 0..15); value = scale * (q - 8)."""
    scale = blocks.view(torch.float16)[:, :1].float()
    values = _nibbles(blocks[:, 2:])
    return values.sub_(8).mul_(scale)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 20 bytes] -> [blocks, 32]: as Q4_0 with a minimum; value = scale * q + minimum."""
    halves = blocks.view(torch.float16)
    values = _nibbles(blocks[:, 4:])
    return values.mul_(halves[:, :1].float()).add_(halves[:, 1:2].float())


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 34 bytes] -> [blocks, 32]: float16 scale, 32 int8; value = scale * q."""
    scale = blocks.view(torch.float16)[:, :1].float()
    return blocks[:, 2:].view(torch.int8) * scale


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 16] -> float32 [blocks, 32], low nibbles first."""
    values = torch.empty(packed.shape[0], 32, dtype=torch.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


_DEQUANTISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFSource:
    """One file."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self._map = map_file(header.path)

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
        return sorted(self._header.tensors, key=lambda name: self._header.tensors[name].start)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensors[name].shape

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        tensor = self._header.tensors[name]
        kind = tensor.type
        if kind.name not in _FLOATS and kind.name not in _DEQUANTISE:
            raise UnsupportedError(
                f"{self._header.path}: tensor {name!r} has type {kind.name}, which is not "
                f"supported; supported: {', '.join((*_FLOATS, *_DEQUANTISE))}."
            )
        if tensor.end == tensor.start:
            return torch.empty(tensor.shape).narrow(dim, start, size)
        data = torch.frombuffer(
            self._map, dtype=torch.uint8, count=tensor.end - tensor.start, offset=tensor.start
        )
        if tensor.start % 8:
            data = data.clone()
        if kind.name in _FLOATS:
            return data.view(_FLOATS[kind.name]).view(tensor.shape).narrow(dim, start, size)
        # A row is a run of whole blocks, so that only a cut along it can split a block.
        per_row = tensor.shape[-1] // kind.block_size
        blocks = data.view(*tensor.shape[:-1], per_row, kind.block_bytes)
        if dim < len(tensor.shape) - 1:
            blocks = blocks.narrow(dim, start, size)
            return self._dequantise(kind.name, blocks)
        first, last = start // kind.block_size, -(-(start + size) // kind.block_size)
        values = self._dequantise(kind.name, blocks.narrow(-2, first, last - first))
        return values.narrow(-1, start - first * kind.block_size, size)

    @staticmethod
    def _dequantise(kind: str, blocks: torch.Tensor) -> torch.Tensor:
        """uint8 [..., blocks, bytes] -> float32 [..., blocks * 32]."""
        flat = blocks.reshape(-1, blocks.shape[-1])
        return _DEQUANTISE[kind](flat).view(*blocks.shape[:-2], -1)
