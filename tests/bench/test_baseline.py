"""The plain loop is right: its tokens are transformers'."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pelton.bench.baseline import PlainLoop
from pelton.bench.weights import plain_parameters
from pelton.config.model import ModelConfig, RopeConfig
from pelton.errors import UnsupportedError

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=RopeConfig(rotary_dim=8, theta=10000.0),
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    max_position=128,
    checkpoint_dtype="float32",
)

# Where transformers keeps what the parts of a fused weight are.
_FUSED = {
    "qkv": ("self_attn", {"q": "q_proj", "k": "k_proj", "v": "v_proj"}),
    "o": ("self_attn", {None: "o_proj"}),
    "gate_up": ("mlp", {"gate": "gate_proj", "up": "up_proj"}),
    "down": ("mlp", {None: "down_proj"}),
}
_PLAIN = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}


def _oracle(config: ModelConfig) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
            max_position_embeddings=config.max_position,
            initializer_range=0.3,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.float().eval()


def _weights(model: torch.nn.Module, config: ModelConfig) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    weights = {}
    for name, parameter in plain_parameters(config, torch.float32, torch.device("cpu")).items():
        *layer, stem, kind = name.split(".")
        for part in parameter.parts:
            if stem in _FUSED:
                block, names = _FUSED[stem]
                source = f"model.{'.'.join(layer)}.{block}.{names[part]}.{kind}"
            else:
                prefix = f"model.{'.'.join(layer)}." if layer else ""
                source = f"{prefix}{_PLAIN[stem]}.{kind}"
            parameter.part_tensor(part).copy_(state[source])
        weights[name] = parameter.tensor
    return weights


@pytest.mark.parametrize("is_tied", [False, True])
def test_greedy_tokens_equal_transformers(is_tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=is_tied)
    model = _oracle(config)
    loop = PlainLoop(config, _weights(model, config), 64)
    prompts = np.random.default_rng(1).integers(0, config.vocab_size, (3, 17), dtype=np.int32)
    made = loop.generate(prompts, 20)

    assert made.dtype == np.int32
    ids = torch.from_numpy(prompts).long()
    gaps = []
    with torch.inference_mode():
        for _ in range(20):
            logits = model(ids).logits[:, -1]
            best = logits.topk(2).values
            gaps.append((best[:, 0] - best[:, 1]).min().item())
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    assert min(gaps) > 1e-4, "the fixture must not hang on the last bits"
    np.testing.assert_array_equal(made, ids[:, 17:].numpy())
    assert len(np.unique(made)) > 10, "a stuck model proves nothing"


def test_a_batch_gives_each_row_its_own_tokens() -> None:
    model = _oracle(CONFIG)
    loop = PlainLoop(CONFIG, _weights(model, CONFIG), 64)
    prompts = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (4, 5), dtype=np.int32)
    alone = [loop.generate(row[None], 8)[0] for row in prompts]
    np.testing.assert_array_equal(loop.generate(prompts, 8), np.stack(alone))


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"rope": RopeConfig(rotary_dim=4, theta=1e4)}],
    ids=["activation", "partial rotation"],
)
def test_unknown_shapes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="without --baseline"):
        PlainLoop(dataclasses.replace(CONFIG, **change), {}, 8)
