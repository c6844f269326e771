"""Weights from safetensors files: slices of the mapped file, without a copy."""

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

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


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
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        path, tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{path}: tensor {name!r} has dtype {tensor.dtype}, which is not supported for "
                f"weights; supported: {', '.join(_DTYPES)}."
            )
        count = tensor.end - tensor.start
        if count == 0:
            return torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype]).narrow(dim, start, size)
        data = torch.frombuffer(
            self._maps[path], dtype=torch.uint8, count=count, offset=tensor.start
        )
        if tensor.start % 8:
            # Nothing in the format aligns the data; kernels want whole elements aligned.
            data = data.clone()
        return data.view(_DTYPES[tensor.dtype]).view(tensor.shape).narrow(dim, start, size)
