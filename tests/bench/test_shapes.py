"""Random models of known shapes."""

from __future__ import annotations

import pytest

from pelton.bench.shapes import SHAPES, with_shape
from pelton.config.engine import EngineArgs
from pelton.errors import ConfigError
from pelton.setup.check import check
from pelton.setup.resolve import num_parameters


@pytest.mark.parametrize(
    ("shape", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53)]
)
def test_shapes_have_the_published_sizes(shape, billions):
    checked = check(with_shape(EngineArgs(seed=3), shape))
    assert num_parameters(checked.model) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert checked.args.seed == 3
    assert checked.checkpoint.load_format == "dummy"


def test_no_shape_changes_nothing():
    args = EngineArgs(model="x")
    assert with_shape(args, None) is args


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"model_shape='qwen3-8' is not known.*qwen3-8b"):
        with_shape(EngineArgs(), "qwen3-8")
    for args in (EngineArgs(model="x"), EngineArgs(load_format="gguf")):
        with pytest.raises(ConfigError, match="leave one of them out"):
            with_shape(args, next(iter(SHAPES)))
