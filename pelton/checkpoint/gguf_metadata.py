"""A GGUF file's metadata, read with types: nothing is guessed or skipped."""

from __future__ import annotations

import math
import reprlib

from pelton.checkpoint.gguf_header import GGUFHeader
from pelton.checkpoint.limits import MAX_SIZE
from pelton.errors import CheckpointError, UnsupportedError


class Metadata:
    """The keys "PREFIX.name" of a file. Errors name the file, the key and its value.

    prefix: an architecture, or "tokenizer.ggml". read: keys that were asked for.
    """

    def __init__(self, header: GGUFHeader, prefix: str) -> None:
        self.header = header
        self.prefix = prefix
        self.read: set[str] = set()

    def key(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def get(self, name: str) -> object:
        """The value as it stands, or None."""
        self.read.add(self.key(name))
        return self.header.metadata.get(self.key(name))

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        # Some values are lists of 100,000 strings.
        value = reprlib.repr(self.get(name))
        return CheckpointError(
            f"{self.header.path}: {self.key(name)} must be {wanted}, got {value}."
        )

    def refused(self, name: str, wanted: str) -> UnsupportedError:
        value = reprlib.repr(self.get(name))
        return UnsupportedError(
            f"{self.header.path}: {self.key(name)}={value} is not supported; it must be {wanted}."
        )

    def _given(self, name: str) -> object:
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self.header.path}: the required key {self.key(name)!r} is missing."
            )
        return value

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """An integer from low to high; required unless there is a default."""
        value = self._given(name) if default is None else self.get(name)
        if value is None:
            assert default is not None
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; required unless there is a default."""
        value = self._given(name) if default is None else self.get(name)
        if value is None:
            assert default is not None
            return default
        if type(value) not in (int, float):
            raise self.wrong(name, "a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number) or number <= 0:
            raise self.wrong(name, "a finite number above 0")
        return number

    def text(self, name: str, default: str | None = None) -> str:
        value = self._given(name) if default is None else self.get(name)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value
