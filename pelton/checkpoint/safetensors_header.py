"""What a safetensors file's header says, without torch and without reading a weight.

Source of the format: the safetensors README ("Format"): u64 little-endian header length, a JSON
object, then the tensors' bytes; `data_offsets` count from the end of the header.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pelton.errors import CheckpointError

# Bytes per element.
DTYPE_SIZES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """start and end: half-open byte range in the file, from its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise CheckpointError(f"key {key!r} occurs twice in the header")
        result[key] = value
    return result


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A JSON list of non-negative integers as a tuple, or None for anything else."""
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _tensor(name: str, entry: Any, first: int, file_size: int) -> SafetensorsTensor:
    if not isinstance(entry, dict):
        raise CheckpointError(f"tensor {name!r} is described by {entry!r}, not by an object")
    dtype = entry.get("dtype")
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZES:
        raise CheckpointError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if shape is None:
        raise CheckpointError(f"tensor {name!r} has the impossible shape {entry.get('shape')!r}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"tensor {name!r} has the impossible data_offsets {entry.get('data_offsets')!r}"
        )
    start, end = first + offsets[0], first + offsets[1]
    if end > file_size:
        raise CheckpointError(
            f"tensor {name!r} ends at byte {end} but the file has {file_size}; it is truncated"
        )
    needed = math.prod(shape) * DTYPE_SIZES[dtype]
    if end - start != needed:
        raise CheckpointError(
            f"tensor {name!r} ({dtype}, shape {shape}) needs {needed} bytes, its range has "
            f"{end - start}"
        )
    return SafetensorsTensor(dtype, shape, start, end)


def read_safetensors_header(path: Path) -> dict[str, SafetensorsTensor]:
    """Tensors by name, in the order of their bytes. Raises CheckpointError naming the file and the
    tensor for anything that is not a whole, consistent file."""
    try:
        with path.open("rb") as file:
            return parse_safetensors_header(file, _MAX_HEADER_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}.") from None


def parse_safetensors_header(file: BinaryIO, max_bytes: int) -> dict[str, SafetensorsTensor]:
    """As `read_safetensors_header`, of an open file whose header is no longer than max_bytes. The
    errors name no file, and end without a full stop."""
    file_size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"the file has {file_size} bytes, too few for a header")
    (header_size,) = struct.unpack("<Q", prefix)
    if header_size > max_bytes:
        raise CheckpointError(
            f"it claims a header of {header_size} bytes (at most {max_bytes} are legal); it is not "
            "a safetensors file"
        )
    if 8 + header_size > file_size:
        raise CheckpointError(
            f"it claims a header of {header_size} bytes but has {file_size}; it is truncated"
        )
    text = file.read(header_size)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError("its header is not a JSON object")
    notes = header.get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(one, str) for one in notes.values()):
        raise CheckpointError("__metadata__ in its header is not an object of strings")
    first = 8 + header_size
    tensors = {
        name: _tensor(name, entry, first, file_size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    previous, previous_end = "", first
    for name, tensor in ordered.items():
        if tensor.start < previous_end and tensor.start < tensor.end:
            raise CheckpointError(f"tensors {previous!r} and {name!r} overlap")
        if tensor.start > previous_end:
            raise CheckpointError(
                f"{tensor.start - previous_end} bytes before tensor {name!r} are of no tensor"
            )
        previous, previous_end = name, max(previous_end, tensor.end)
    if previous_end < file_size:
        raise CheckpointError(f"the last {file_size - previous_end} bytes are of no tensor")
    return ordered
