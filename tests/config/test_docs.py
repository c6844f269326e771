from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from pelton.config.docs import field_texts
from pelton.config.params import SamplingParams
from pelton.config.server import ServerArgs


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


@pytest.mark.parametrize("kind", [SamplingParams, ServerArgs])
def test_every_field_that_users_type_is_described(kind: type) -> None:
    texts = field_texts(kind)
    no_version_does = {"best_of", "structured_outputs"}
    assert {field.name for field in fields(kind)} - no_version_does <= texts.keys()
