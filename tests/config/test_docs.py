from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from pelton.config.docs import field_texts
from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.config.server import ServerArgs
from pelton.setup.refusals import REFUSALS


@dataclass
class Base:
    """Both.

    one / two: a thing,
        which is long.
    three: of the base.
    """


@dataclass
class Derived(Base):
    """More.

    three: of the other.

    four: 4
    not an entry: nothing
    """


def test_entries_of_docstrings() -> None:
    assert field_texts(Derived) == {
        "one": "a thing, which is long.",
        "two": "a thing, which is long.",
        "three": "of the other.",
        "four": "4",
    }


@pytest.mark.parametrize("kind", [SamplingParams, ServerArgs, EngineArgs])
def test_every_field_that_users_type_is_described(kind: type) -> None:
    no_version_does = {"best_of", "structured_outputs", *(one.field for one in REFUSALS)}
    silent = {field.name for field in fields(kind)} - field_texts(kind).keys() - no_version_does
    assert not silent, f"the docstring of {kind.__name__} says nothing of {sorted(silent)}"
