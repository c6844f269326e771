from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from pelton.errors import UnsupportedError
from pelton.ops.registry import Candidate, bind

CALLS: list[tuple[str, Any]] = []


def factory(name: str) -> Any:
    def make(signature: Any, **weights: Any) -> Any:
        CALLS.append((f"make {name}", (signature, weights)))
        return lambda *args: CALLS.append((name, args))

    return make


def candidate(name: str, max_rows: int | None = None, refusal: str | None = None) -> Candidate:
    return Candidate(name, f"registry_test_kernels:{name}", lambda signature: refusal, max_rows)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    module = types.ModuleType("registry_test_kernels")
    for name in ("small", "medium", "any"):
        setattr(module, name, factory(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    CALLS.clear()


def test_the_first_rung_that_is_high_enough_runs():
    candidates = (candidate("small", 1), candidate("medium", 8), candidate("any"))
    bound = bind("op", candidates, "signature", weight=3)
    assert bound.names == ("small", "medium", "any")
    assert [name for name, _ in CALLS] == ["make small", "make medium", "make any"]
    assert CALLS[0][1] == ("signature", {"weight": 3})
    CALLS.clear()
    for num_rows in (1, 2, 8, 9, 1000):
        bound(num_rows, "x")
    assert [name for name, _ in CALLS] == ["small", "medium", "medium", "any", "any"]
    assert CALLS[0][1] == ("x",)


def test_no_rows_go_to_the_rung_that_takes_any_number():
    bound = bind("op", (candidate("small", 1), candidate("any")), None)
    CALLS.clear()
    bound(0)
    assert [name for name, _ in CALLS] == ["any"]


def test_refused_candidates_are_not_loaded_and_later_ones_not_asked():
    def never(signature: Any) -> str | None:
        raise AssertionError("asked behind a candidate that takes all")

    candidates = (
        Candidate("missing", "no.such.module:kernel", lambda signature: "not on this device"),
        candidate("any"),
        Candidate("later", "no.such.module:kernel", never),
    )
    assert bind("op", candidates, None).names == ("any",)


def test_a_refusal_names_op_signature_and_every_reason():
    candidates = (
        candidate("small", 1),
        candidate("medium", refusal="has a bias"),
        candidate("any", refusal="only on GPUs"),
    )
    with pytest.raises(UnsupportedError) as caught:
        bind("linear", candidates, {"shape": (3, 5)})
    assert str(caught.value) == (
        "no kernel of linear for {'shape': (3, 5)}: small: only up to 1 rows; "
        "medium: has a bias; any: only on GPUs"
    )
