"""Ranks as threads of one process, each with its shard of one checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.codes import CODES
from support.families import tiny_model
from support.plain import greedy, plain_tokens
from support.ranks import ThreadRank, run_ranks
from support.tiny import checkpoint_of, make_config, make_device, prompts_of, tiny_llama

from pelton.config.engine import EngineConfig
from pelton.core.plan import NewRow, SlotRef, StepPlan
from pelton.device.cpu import CPUDevice
from pelton.errors import ConfigError
from pelton.forward.in_flight import Final
from pelton.layers.context import BuildContext, OneRank
from pelton.models.decoder import Decoder
from pelton.runner.assemble import assemble, attention_backend
from pelton.worker.worker import load_model


def build_rank(config: EngineConfig, rank: int, size: int) -> tuple[Decoder, Any]:
    backend = attention_backend(config)
    build = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend=backend,
        rank=rank,
        size=size,
        batch_invariant=config.batch_invariant,
        kv_codes=None if config.cache.dtype == "float32" else CODES[config.cache.dtype],
    )
    with torch.inference_mode():
        model = load_model(config, build, checkpoint_of(CASES_FOLDER[config.model.vocab_size]))
    assert isinstance(model, Decoder)
    return model, backend


CASES_FOLDER: dict[int, Any] = {}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-query": {"num_key_value_heads": 1},
    "biases and tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "odd vocabulary": {"vocab_size": 997},
    "experts": {
        "family": "Qwen3Moe",
        "moe_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "experts, biases and sinks": {
        "family": "GptOss",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
    },
    "norms over all heads": {"family": "Olmo2"},
}


def plan_of(prompts: list[list[int]]) -> StepPlan:
    """One prefill step of whole prompts; blocks 1, 2, ..."""
    rows, first = [], 1
    for slot, prompt in enumerate(prompts):
        count = -(-len(prompt) // 4)
        rows.append(
            NewRow(
                ref=SlotRef(slot, 1),
                request_id=str(slot),
                token_ids=np.array(prompt, np.int32),
                prompt_len=len(prompt),
                num_computed_tokens=0,
                block_ids=(np.arange(first, first + count, dtype=np.int32),),
                params=greedy(),
                seed=0,
            )
        )
        first += count
    return StepPlan(
        step=0,
        refs=[row.ref for row in rows],
        num_scheduled_tokens=np.array([len(prompt) for prompt in prompts], np.int32),
        num_drafts=np.zeros(len(prompts), np.int32),
        num_computed_bound=np.zeros(len(prompts), np.int32),
        samples=np.ones(len(prompts), np.bool_),
        new_rows=rows,
    )


def forward(
    config: EngineConfig, size: int, prompts: list[list[int]], *, last_layer: int = 2
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Per rank: hidden states [T, H] after `last_layer` layers, logits [T, shard], all-reduces."""

    def work(communicator: ThreadRank) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.set_num_threads(1)
        model, backend = build_rank(config, communicator.rank, size)
        model.num_layers = last_layer
        device = make_device("cpu")
        assert isinstance(device, CPUDevice)
        runner = assemble(
            config,
            device,
            model,
            backend,
            communicator=communicator if size > 1 else OneRank(),
        ).runner
        with torch.inference_mode():
            in_flight = runner.start(plan_of(prompts))
            assert isinstance(in_flight, Final)
            hidden = in_flight.hidden.clone()
            logits = torch.empty(len(hidden), model.vocab_shard_size)
            model.head(hidden, logits)
        return hidden, logits, communicator.num_calls

    return run_ranks(size, work)


def config_of(case: str, **changes: Any) -> EngineConfig:
    values = dict(CASES[case])
    family = values.pop("family", None)
    folder = tiny_model(family, **values) if family else tiny_llama(**values)
    config = make_config(folder, **changes)
    CASES_FOLDER[config.model.vocab_size] = folder
    return config


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_hidden_states_and_logits(backend, case, size):
    """After each layer too: partial outputs add up. Fewer KV heads than ranks: replicated."""
    config = config_of(case, attention_backend=backend)
    prompts = prompts_of([3, 7, 19], seed=size)
    prompts = [[token % config.model.vocab_size for token in prompt] for prompt in prompts]
    for last_layer in (0, 1, 2):
        ((expected, logits, _),) = forward(config, 1, prompts, last_layer=last_layer)
        ranks = forward(config, size, prompts, last_layer=last_layer)
        for hidden, _, num_calls in ranks:
            assert torch.equal(hidden, ranks[0][0])
            scale = float(expected.abs().max())
            torch.testing.assert_close(hidden / scale, expected / scale, rtol=0, atol=1e-5)
            assert num_calls == 1 + (2 + config.model.joint_qk_norm) * last_layer
        joined = torch.cat([shard for _, shard, _ in ranks], 1)
        vocab_size = config.model.vocab_size
        assert joined.shape[1] == -(-vocab_size // size) * size
        scale = float(logits.abs().max())
        torch.testing.assert_close(
            joined[:, :vocab_size] / scale, logits / scale, rtol=0, atol=1e-5
        )
        assert torch.equal(joined[:, :vocab_size].argmax(1), logits.argmax(1))
        assert not joined[:, vocab_size:].any()


def test_greedy_token_of_the_ranks_is_the_plain_one():
    config = config_of("plain")
    prompts = prompts_of([3, 7, 19], seed=2)
    ranks = forward(config, 4, prompts)
    joined = torch.cat([shard for _, shard, _ in ranks], 1)
    last = np.cumsum([3, 7, 19]) - 1
    tokens = joined[last].argmax(1).tolist()
    assert tokens == [plain_tokens(prompt, greedy())[0] for prompt in prompts]


@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize("case", ["plain", "multi-query"])
def test_quantised_keys_and_values(case, kv_dtype):
    """A head has its own scales, so each rank quantises its heads as one rank would all. Partial
    sums differ in their last bits, which turns some number into the next code."""
    config = config_of(case, kv_dtype=kv_dtype)
    prompts = prompts_of([3, 7, 19], seed=2)
    ((expected, logits, _),) = forward(config, 1, prompts)
    ((exact, _, _),) = forward(config_of(case), 1, prompts)
    ranks = forward(config, 2, prompts)
    scale = float(expected.abs().max())
    for hidden, _, _ in ranks:
        assert torch.equal(hidden, ranks[0][0])
        off = (hidden - expected).abs().max() / scale
        assert off < 1e-3
        assert off < (exact - expected).abs().max() / scale / 5, "codes are what all ranks read"
    joined = torch.cat([shard for _, shard, _ in ranks], 1)
    assert torch.equal(joined.argmax(1), logits.argmax(1))


@pytest.mark.parametrize("size", [2, 4])
def test_a_lost_partial_sum_shows(size):
    """The comparison can fail: a rank that adds only its own part is found out."""
    config = config_of("plain")
    prompts = prompts_of([5], seed=2)
    ((expected, _, _),) = forward(config, 1, prompts)
    original = ThreadRank.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ThreadRank,
            "all_reduce",
            lambda self, tensor: original(self, tensor) if self.num_calls != 2 else _skip(self),
        )
        ranks = forward(config, size, prompts)
    assert not torch.allclose(ranks[0][0], expected, atol=1e-3)


def _skip(rank: ThreadRank) -> None:
    rank.calls.append(("skipped", ()))


def test_ranks_that_cut_through_heads_are_refused():
    config = config_of("plain")
    assert config.model.num_heads == 4
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        build_rank(config, 0, 3)
