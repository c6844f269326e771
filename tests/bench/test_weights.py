"""Both sides of a comparison run the same model: their greedy tokens are equal in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.bench.measure import EngineSide, random_prompts
from pelton.bench.weights import load_plain_loop
from pelton.config.engine import EngineArgs
from pelton.engine.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with weights large enough that no two logits come near each other."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_engine_and_baseline_agree(folder: Path) -> None:
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": False,
    }
    llm = LLM(**chosen)
    try:
        prompts = random_prompts(97, 4, 19, seed=1)
        engine = EngineSide(llm).generate(prompts, 24)
        baseline = load_plain_loop(EngineArgs(**chosen), llm.config).generate(prompts, 24)
    finally:
        llm.close()
    np.testing.assert_array_equal(engine, baseline)
    assert len(np.unique(engine)) > 10, "a stuck model proves nothing"
