"""What a GGUF file's header says, without torch and without reading a weight.

Source of the format: ggml's docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pelton.errors import CheckpointError


class GGMLType(NamedTuple):
    """A tensor type: `block_size` elements are stored in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}

# The types that weights/gguf.py can turn into numbers.
READABLE_TYPES = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)

MetadataValue: TypeAlias = (
    "int | float | bool | str | list[str] | list[MetadataValue] | npt.NDArray[np.generic]"
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape: in torch's order (rows first). start and end: byte range in the file `path`."""

    type: GGMLType
    shape: tuple[int, ...]
    start: int
    end: int
    path: Path


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """metadata: numbers, booleans and strings; arrays of numbers as numpy arrays, arrays of strings
    or of arrays as lists. tensors: by name, in the file's order. path: of the file, or of the first
    part of a split one. Shared between readers: do not change the containers."""

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GGUFTensor]
    alignment: int


_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype] = {
    code: np.dtype(text)
    for code, text in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
# Of a part of a split file, as llama.cpp's gguf-split writes it; parts are counted from 1.
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_DIMS = 4
_MAX_NESTING = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Cursor:
    """Reads forward through a file's bytes. `where` names what is being read, for errors."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0
        self.where = "the header"

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}")

    def _take(self, num_bytes: int) -> int:
        """Start of the next `num_bytes` bytes."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(
                f"needs {num_bytes} bytes at byte {start} but the file has {self.size}; "
                "it is truncated or corrupt"
            )
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self._take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self._take(8))[0])

    def count(self, what: str, min_bytes: int) -> int:
        """A u64 count of things of at least `min_bytes` each, which must fit into the rest."""
        value = self.u64()
        if value * min_bytes > self.size - self.position:
            raise self.fail(f"claims {value} {what}, more than the file can hold")
        return value

    def string(self) -> str:
        length = self.u64()
        start = self._take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("is not valid UTF-8") from None

    def strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary and its merges are some 100,000 strings.
        data, size, position = self.data, self.size, self.position
        unpack = _U64.unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    break
                result.append(data[start:position].decode("utf-8"))
        except struct.error:
            position = size + 1
        except UnicodeDecodeError:
            raise self.fail(f"item {len(result)} is not valid UTF-8") from None
        if position > size:
            raise self.fail(f"item {len(result)} runs past the file's end ({size} bytes)")
        self.position = position
        return result

    def value(self, code: int, depth: int = 0) -> MetadataValue:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            if depth == _MAX_NESTING:
                raise self.fail(f"nests arrays deeper than {_MAX_NESTING}")
            item = self.u32()
            if item == _STRING:
                return self.strings(self.count("strings", 8))
            if item == _ARRAY:
                count = self.count("arrays", 12)
                return [self.value(_ARRAY, depth + 1) for _ in range(count)]
            dtype = self._scalar_dtype(item)
            count = self.count("items", dtype.itemsize)
            return np.frombuffer(self.data, dtype, count, self._take(count * dtype.itemsize)).copy()
        dtype = self._scalar_dtype(code)
        scalar = np.frombuffer(self.data, dtype, 1, self._take(dtype.itemsize))[0].item()
        assert isinstance(scalar, (bool, int, float))
        return scalar

    def _scalar_dtype(self, code: int) -> np.dtype:
        if code not in _SCALARS:
            raise self.fail(f"has the unknown value type {code}")
        return _SCALARS[code]


def _read_tensor(cursor: _Cursor) -> tuple[str, GGMLType, tuple[int, ...], int]:
    """(name, type, shape, offset from the start of the data)."""
    name = cursor.string()
    cursor.where = f"tensor {name!r}"
    num_dims = cursor.u32()
    if num_dims > _MAX_DIMS:
        raise cursor.fail(f"has {num_dims} dimensions, at most {_MAX_DIMS} are legal")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    code = cursor.u32()
    if code not in GGML_TYPES:
        raise cursor.fail(f"has the unknown type {code}")
    offset = cursor.u64()
    kind = GGML_TYPES[code]
    if shape and shape[-1] % kind.block_size:
        raise cursor.fail(
            f"has rows of {shape[-1]} elements, not a multiple of {kind.name}'s {kind.block_size}"
        )
    return name, kind, shape, offset


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise CheckpointError(f"starts with {data[:4]!r}, not with b'GGUF'; it is no GGUF file")
    cursor.position = 4
    version = cursor.u32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (2, 3):
            raise CheckpointError("is a big-endian GGUF file; only little-endian ones are read")
        raise CheckpointError(f"has GGUF version {version}; versions 2 and 3 are read")
    num_tensors = cursor.count("tensors", 24)
    num_values = cursor.count("metadata values", 13)

    metadata: dict[str, MetadataValue] = {}
    for index in range(num_values):
        cursor.where = f"metadata value {index}"
        key = cursor.string()
        cursor.where = f"metadata {key!r}"
        if key in metadata:
            raise cursor.fail("occurs twice")
        metadata[key] = cursor.value(cursor.u32())

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment is {alignment!r}, not a power of two")

    raw: dict[str, tuple[GGMLType, tuple[int, ...], int]] = {}
    for index in range(num_tensors):
        cursor.where = f"tensor {index}"
        name, kind, shape, offset = _read_tensor(cursor)
        if name in raw:
            raise cursor.fail("occurs twice")
        raw[name] = kind, shape, offset

    first = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, (kind, shape, offset) in raw.items():
        start = first + offset
        end = start + math.prod(shape) // kind.block_size * kind.block_bytes
        if offset % alignment:
            raise CheckpointError(
                f"tensor {name!r}: offset {offset} is not a multiple of {alignment}"
            )
        if end > cursor.size:
            raise CheckpointError(
                f"tensor {name!r}: ends at byte {end} but the file has {cursor.size}; "
                "it is truncated"
            )
        tensors[name] = GGUFTensor(kind, shape, start, end, path)
    previous, previous_end = "", first
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < previous_end and tensor.start < tensor.end:
            raise CheckpointError(f"tensors {previous!r} and {name!r} overlap")
        previous, previous_end = name, max(previous_end, tensor.end)
    return GGUFHeader(path, version, metadata, tensors, alignment)


@functools.lru_cache(maxsize=64)
def _read(path: Path, size: int, mtime_ns: int) -> GGUFHeader:
    # Size and time are in the key so that a file that was replaced is read again.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(path, data)


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read metadata and the table of tensors; of a split file, of all its parts (see gguf_parts),
    with the first part's metadata. The last files' headers are remembered, because the
    configuration, the tokenizer and the weights each ask for them.

    Raises CheckpointError naming the file and the key or tensor for anything that is not a whole,
    little-endian GGUF file of version 2 or 3, and when parts are missing or do not belong together.
    """
    header = _read_one(path)
    if _split(header, "count", 1) <= 1:
        return header
    return _joined([_read_one(part) for part in gguf_parts(path)])


def _read_one(path: Path) -> GGUFHeader:
    try:
        status = path.stat()
        if status.st_size == 0:
            raise CheckpointError("is empty")
        return _read(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}.") from None


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of a model, given any of them: all parts of "NAME-00001-of-0000N.gguf", in order,
    or the file itself. Only names are looked at. Raises CheckpointError naming the missing parts.
    """
    name = PART_NAME.fullmatch(path.name)
    if name is None:
        return (path,)
    count = int(name["count"])
    parts = tuple(
        path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    )
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(
            f"{path}: of its {count} parts {len(missing)} are missing in {path.parent}: "
            f"{', '.join(missing)}."
        )
    return parts


def _split(header: GGUFHeader, key: str, default: int) -> int:
    value = header.metadata.get(f"split.{key}", default)
    if type(value) is not int or value < 0:
        raise CheckpointError(
            f"{header.path}: split.{key} must be an integer from 0, got {value!r}."
        )
    return value


def _joined(parts: Sequence[GGUFHeader]) -> GGUFHeader:
    tensors: dict[str, GGUFTensor] = {}
    for place, part in enumerate(parts):
        count, number = _split(part, "count", 1), _split(part, "no", 0)
        if (count, number) != (len(parts), place):
            raise CheckpointError(
                f"{part.path}: its metadata say split.no={number}, split.count={count}, but by its "
                f"name it must be split.no={place}, split.count={len(parts)}; parts are called "
                "NAME-00001-of-0000N.gguf and so on."
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"Tensor {name!r} is in both {tensors[name].path} and {part.path}."
                )
            tensors[name] = tensor
    expected = _split(parts[0], "tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{parts[0].path}: split.tensors.count is {expected}, but its {len(parts)} parts hold "
            f"{len(tensors)} tensors; a part is from another file."
        )
    return replace(parts[0], tensors=tensors)
