"""The floors, counted once more the slow way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pelton.bench import cost
from pelton.bench.weights import plain_parameters
from pelton.config.model import ModelConfig, RopeConfig
from pelton.config.quant import QuantConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=56,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=50,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=RopeConfig(rotary_dim=10, theta=1e4),
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    max_position=64,
    checkpoint_dtype="float32",
)


@pytest.mark.parametrize("is_tied", [True, False])
def test_weight_bytes_are_the_matrices_of_a_step(is_tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=is_tied)
    parameters = plain_parameters(config, torch.bfloat16, torch.device("cpu"))
    matrices = {name: p.tensor for name, p in parameters.items() if p.tensor.dim() == 2}
    if not is_tied:
        del matrices["embed.weight"]
    assert cost.weight_bytes(config, "bfloat16") == sum(m.nbytes for m in matrices.values())


@pytest.mark.parametrize(("kv_dtype", "head_bytes"), [("float32", 10 * 4), ("int8", 10 + 2)])
def test_decode_bytes_average_over_the_steps(kv_dtype: str, head_bytes: int) -> None:
    weights = cost.weight_bytes(CONFIG, "float32")
    per_token = 2 * 2 * 2 * head_bytes  # K and V, layers, heads, bytes with the scale
    # 3 outputs are a prefill and 2 steps, which attend to 6 and 7 tokens.
    steps = [weights + 3 * n * per_token for n in (6, 7)]
    found = cost.decode_bytes(
        CONFIG, "float32", kv_dtype=kv_dtype, batch_size=3, input_len=5, output_len=3
    )
    assert found == sum(steps) / len(steps)


def test_prefill_flops_count_every_product() -> None:
    parameters = plain_parameters(CONFIG, torch.float32, torch.device("cpu"))
    layers = sum(
        p.tensor.numel() for n, p in parameters.items() if "layers" in n and p.tensor.dim() == 2
    )
    expected = 0
    for position in range(7):
        expected += 2 * layers
        expected += 2 * 2 * 2 * 4 * 10 * (position + 1)  # QK and PV, 2 flops, layers, heads
    expected += 2 * 50 * 32
    assert cost.prefill_flops(CONFIG, batch_size=3, input_len=7) == 3 * expected


def test_quantised_weights_are_read_as_they_are():
    plain = cost.weight_bytes(CONFIG, "float32")
    elements = plain // 4
    half = QuantConfig(scheme="gguf", num_elements=elements // 2, num_bytes=elements // 4)
    assert cost.weight_bytes(CONFIG, "float32", half) == plain - 4 * (elements // 2) + elements // 4
    more = QuantConfig(scheme="gguf", num_elements=2 * elements, num_bytes=elements)
    assert cost.weight_bytes(CONFIG, "float32", more) == elements // 2
