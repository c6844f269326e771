"""Mamba 2 layers cut over ranks, and what they say of their state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runner.test_tensor_parallel import plan_of
from support.families import tiny_model
from support.ranks import ThreadRank, run_ranks
from support.tiny import checkpoint_of, make_config, make_device, prompts_of

from pelton.attention.reference_backend import ReferenceBackend
from pelton.config.engine import EngineConfig
from pelton.errors import ConfigError
from pelton.forward.in_flight import Final
from pelton.layers.context import BuildContext, OneRank
from pelton.models.granite_hybrid import GraniteHybrid
from pelton.runner.assemble import assemble
from pelton.setup.resolve import kv_layers
from pelton.worker.worker import load_model


def hybrid(**changes: Any) -> Path:
    values = {
        "num_hidden_layers": 3,
        "layer_types": ("linear_attention", "full_attention", "linear_attention"),
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_d_state": 5,
        "mamba_proj_bias": True,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.25,
    }
    return tiny_model("GraniteMoeHybrid", **{**values, **changes})


def build_rank(config: EngineConfig, folder: Path, rank: int, size: int) -> GraniteHybrid:
    build = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend=ReferenceBackend(),
        rank=rank,
        size=size,
    )
    with torch.inference_mode():
        model = load_model(config, build, checkpoint_of(folder))
    assert isinstance(model, GraniteHybrid)
    return model


def forward(folder: Path, size: int, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Per rank: hidden states [T, H] of one prefill step."""
    config = make_config(folder, attention_backend="reference")

    def work(communicator: ThreadRank) -> torch.Tensor:
        torch.set_num_threads(1)
        model = build_rank(config, folder, communicator.rank, size)
        runner = assemble(
            config,
            make_device("cpu"),
            model,
            ReferenceBackend(),
            communicator=communicator if size > 1 else OneRank(),
        ).runner
        with torch.inference_mode():
            in_flight = runner.start(plan_of(prompts))
            assert isinstance(in_flight, Final)
            return in_flight.hidden.clone()

    return run_ranks(size, work)


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (2, 6)])
def test_ranks_give_what_one_gives(size, groups):
    """Groups whole on a rank, several to a rank, and shared by ranks, whose norm is summed."""
    folder = hybrid(mamba_n_groups=groups)
    prompts = prompts_of([3, 7, 19], seed=size)
    (expected,) = forward(folder, 1, prompts)
    for hidden in forward(folder, size, prompts):
        scale = float(expected.abs().max())
        torch.testing.assert_close(hidden / scale, expected / scale, rtol=0, atol=1e-5)


def test_ranks_that_cut_through_groups_are_refused():
    folder = hybrid(mamba_n_groups=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 cannot cut"):
        build_rank(make_config(folder), folder, 0, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_ask_for_what_the_configuration_says(dtype):
    folder = hybrid(mamba_n_groups=2)
    config = make_config(folder)
    build = BuildContext(
        device=torch.device("cpu"), dtype=getattr(torch, dtype), backend=ReferenceBackend()
    )
    asked = GraniteHybrid(build, config.model).kv_layers(4)
    assert asked == kv_layers(config.model, 4, dtype, state_dtype=dtype)
    element = {"float32": 4, "bfloat16": 2}[dtype]
    state = 12 * 8 * 5 * 4 + 3 * (96 + 2 * 2 * 5) * element
    state = -(-state // 16) * 16
    assert [layer.state_bytes for layer in asked] == [state, 0, state]


def test_a_rank_has_its_share_of_the_state():
    folder = hybrid(mamba_n_groups=2)
    model = build_rank(make_config(folder), folder, 1, 4)
    recurrent = model.kv_layers(4)[0].recurrent
    assert recurrent.ssm_shape == (3, 8, 5)
    assert recurrent.conv_shape == (3, 3 * 8 + 2 * 5)


def test_small_numbers_are_not_rounded():
    """A_log and its kin stay float32 in a bfloat16 model; so does the state."""
    folder = hybrid()
    config = replace(make_config(folder), dtype="bfloat16")
    build = BuildContext(
        device=torch.device("cpu"), dtype=torch.bfloat16, backend=ReferenceBackend()
    )
    with torch.inference_mode():
        model = load_model(config, build, checkpoint_of(folder))
    mixer = model.layers[0].mixer
    expected = torch.log(torch.arange(1, 13).float())
    assert torch.equal(mixer.per_head["a_log"].tensor, expected)
    assert mixer.project.weight.tensor.dtype == torch.bfloat16
