"""Experts cut over ranks: partial sums add up to the whole, biases once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.families import tiny_model
from support.tiny import make_config

from pelton.attention.reference_backend import ReferenceBackend
from pelton.checkpoint.name_map import NameRules, Rule
from pelton.errors import ConfigError
from pelton.layers.context import BuildContext
from pelton.layers.moe import Experts
from pelton.weights.dummy import DummySource
from pelton.weights.loader import load_weights

RULES = NameRules(
    rules=(
        Rule("m.{i}.router", "layers.{i}.router.weight"),
        Rule("m.{i}.router_bias", "layers.{i}.router.bias"),
        Rule("m.{i}.gate_up", "layers.{i}.gate_up.weight", ("gate.{e}", "up.{e}")),
        Rule("m.{i}.gate_up_bias", "layers.{i}.gate_up.bias", ("gate.{e}", "up.{e}")),
        Rule("m.{i}.down", "layers.{i}.down.weight", "{e}", "transpose"),
        Rule("m.{i}.down_bias", "layers.{i}.down.bias", "{e}"),
    )
)


def experts_of(rank: int, size: int, **changes: Any) -> Experts:
    folder = tiny_model("Qwen3Moe", moe_intermediate_size=20, num_experts=6, num_experts_per_tok=2)
    config = replace(make_config(folder).model, **changes)
    build = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float64,
        backend=ReferenceBackend(),
        rank=rank,
        size=size,
    )
    experts = Experts(build, config)
    parameters = experts.parameters("layers.0")
    load_weights(parameters, DummySource(parameters, RULES, seed=3), RULES, head_dim=16)
    experts.bind()
    return experts


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_ranks_add_up(has_bias, size):
    changes = {"expert_bias": has_bias, "router_bias": has_bias}
    x = torch.randn(19, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outs = []
    for count in (1, size):
        total = torch.zeros_like(x)
        for rank in range(count):
            partial = torch.full_like(x, torch.nan)
            experts_of(rank, count, **changes).run(x, partial)
            total += partial
        outs.append(total)
    assert outs[0].abs().max() > 1e-4
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-10, atol=1e-14)


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 cannot cut"):
        experts_of(0, 3)
