"""A JSON object whose keys are read with types: nothing is guessed or skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from pelton.checkpoint.limits import MAX_SIZE
from pelton.errors import CheckpointError, UnsupportedError


class ConfigReader:
    """A JSON object whose keys are read with a type. null counts as absent, as transformers has it.

    Errors name the file (or `where`, for a nested object), the key and its value. Raises
    CheckpointError for what is missing or has the wrong type, UnsupportedError for `require`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        self.read.add(key)
        return self.values.get(key)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {key} must be {wanted}, got {self.values.get(key)!r}."
        )

    def _given(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.where}: the required key {key!r} is missing.")
        return value

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """An integer from low to high; required unless there is a default."""
        value = self._given(key) if default is None else self.get(key)
        if value is None:
            return cast(int, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number > 0; required unless there is a default."""
        value = self._given(key) if default is None else self.get(key)
        if value is None:
            return cast(float, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key) if default is None else self.get(key)
        if value is None:
            return cast(str, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def nested(self, key: str) -> ConfigReader | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse values that change the model in a way that is not implemented. Absent is fine."""
        value = self.get(key)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in allowed
        ):
            wanted = " or ".join(json.dumps(one) for one in (*allowed, None))
            raise UnsupportedError(
                f"{self.where}: {key}={json.dumps(value)} is not supported; it must be {wanted}."
            )
