"""Which weights stay in blocks."""

from __future__ import annotations

import pytest

from pelton.device.native.forms import FORMS
from pelton.device.native.library import library
from pelton.ops.block_weight import Run
from pelton.quant.dense import Dense
from pelton.quant.gguf import GGUFBlocks
from pelton.quant.scheme import StoredRows

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")


def stored(*rows: tuple[str | None, int]) -> list[StoredRows]:
    starts = [sum(n for _, n in rows[:i]) for i in range(len(rows))]
    return [StoredRows(first, n, form) for first, (form, n) in zip(starts, rows, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_stays(form):
    weight = GGUFBlocks().allocate(256, stored((form, 20)))
    assert weight is not None
    assert weight.shape == (20, 256)


def test_neighbours_of_one_form_are_one_run():
    weight = GGUFBlocks().allocate(256, stored(("Q4_K", 32), ("Q4_K", 16), ("Q6_K", 5)))
    assert weight is not None
    assert weight.runs == (Run("Q4_K", 48), Run("Q6_K", 5))


@pytest.mark.parametrize(
    "rows",
    [
        [(None, 32)],
        [("Q2_K", 32)],
        [("IQ4_NL", 32)],
        [("Q4_K", 32), ("F16", 32)],
        [("Q8_0", 32), (None, 32)],
        [("Q8_0", 24), ("Q4_0", 32)],  # the second begins inside a panel
        [(form, 16) for form in ("Q8_0", "Q4_0", "Q8_0", "Q4_0", "Q8_0")],  # more than four runs
    ],
    ids=str,
)
def test_what_is_dequantised(rows):
    assert GGUFBlocks().allocate(256, stored(*rows)) is None


def test_without_quantisation_nothing_stays():
    assert Dense().allocate(256, stored(("Q8_0", 16))) is None
