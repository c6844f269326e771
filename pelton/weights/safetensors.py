"""Weights from safetensors files: slices of the mapped file, without a copy.

A pair NAME_blocks and NAME_scales of bytes is one MXFP4 tensor, dequantised as it is read. It goes
by the name of its blocks.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from pelton.checkpoint.name_map import NameRules
from pelton.checkpoint.safetensors_header import SafetensorsTensor, read_safetensors_header
from pelton.checkpoint.source import Checkpoint
from pelton.errors import CheckpointError, UnsupportedError
from pelton.layers.parameter import Parameter
from pelton.weights.mxfp4 import BLOCK, dequantise

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BLOCKS, _SCALES = "_blocks", "_scales"


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes. Copy-on-write, because torch has no read-only tensors."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class SafetensorsSource:
    """One or more files. Raises CheckpointError when a name occurs in two of them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._tensors: dict[str, tuple[Path, SafetensorsTensor]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in files:
            for name, tensor in read_safetensors_header(path).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"Tensor {name!r} is in both {self._tensors[name][0]} and {path}."
                    )
                self._tensors[name] = path, tensor
            self._maps[path] = map_file(path)
        self._last: tuple[tuple[str, int, int, int], torch.Tensor] | None = None
        self._scales = {
            name: name.removesuffix(_BLOCKS) + _SCALES
            for name, (_, tensor) in self._tensors.items()
            if name.endswith(_BLOCKS) and tensor.dtype == "U8"
        }
        for name, scales in self._scales.items():
            self._check_pair(name, scales)

    def _check_pair(self, name: str, scales: str) -> None:
        path, blocks = self._tensors[name]
        if scales not in self._tensors:
            raise CheckpointError(f"{path}: tensor {name!r} has no {scales!r} beside it.")
        other = self._tensors[scales][1]
        if (
            other.dtype != "U8"
            or blocks.shape[-1:] != (BLOCK // 2,)
            or other.shape != blocks.shape[:-1]
        ):
            raise CheckpointError(
                f"{path}: {name!r} of shape {blocks.shape} and {scales!r} of {other.dtype}, shape "
                f"{other.shape}, are not MXFP4 blocks of {BLOCK} numbers with a byte for each."
            )

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Parameter],
        rules: NameRules,
        seed: int,
    ) -> Self:
        return cls(checkpoint.files)

    def names(self) -> Sequence[str]:
        hidden = set(self._scales.values())
        return [name for name in self._tensors if name not in hidden]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors[name][1].shape
        return (*shape[:-2], shape[-2] * BLOCK) if name in self._scales else shape

    def blocks(self, name: str) -> None:
        return None

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        if name in self._scales:
            return self._read_mxfp4(name, dim, start, size)
        path, tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{path}: tensor {name!r} has dtype {tensor.dtype}, which is not supported for "
                f"weights; supported: {', '.join(_DTYPES)}."
            )
        data = self._data(name).view(_DTYPES[tensor.dtype])
        return data.view(tensor.shape).narrow(dim, start, size)

    def _read_mxfp4(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        shape = self.shape(name)
        blocks = self._data(name).view(self._tensors[name][1].shape)
        scales = self._data(self._scales[name]).view(blocks.shape[:-1])
        if dim == len(shape) - 1:
            return dequantise(blocks, scales).narrow(dim, start, size)
        # Several parts of an expert are read from its matrix, one after the other.
        asked = name, dim, start, size
        if self._last is None or self._last[0] != asked:
            cut = (t.narrow(dim, start, size) for t in (blocks, scales))
            self._last = asked, dequantise(*cut)
        return self._last[1]

    def _data(self, name: str) -> torch.Tensor:
        """The tensor's bytes, [n] uint8."""
        path, tensor = self._tensors[name]
        count = tensor.end - tensor.start
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        data = torch.frombuffer(
            self._maps[path], dtype=torch.uint8, count=count, offset=tensor.start
        )
        # Nothing in the format aligns the data; kernels want whole elements aligned.
        return data.clone() if tensor.start % 8 else data
