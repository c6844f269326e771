"""What quantised keys and values cost on real text from real weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pelton import LLM, SamplingParams

TEXTS = [Path(__file__).parents[2] / "docs" / name for name in ("architecture.md", "step.md")]
# Of perplexity, beside exact keys and values. Measured: docs/performance.md.
MOST = {"int8": 1.004, "fp8": 1.03, "fp8_e5m2": 1.06}


def perplexity(kv_cache_dtype: str) -> float:
    llm = LLM(
        dtype="float32",
        quantization="dequantise",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=2,
        max_model_len=1025,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for path in TEXTS:
        ids = llm.get_tokenizer().encode(path.read_text())[:1024].tolist()
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            total -= found[token].logprob
            count += 1
    llm.close()
    return math.exp(total / count)


@pytest.mark.long
def test_perplexity():
    exact = perplexity("auto")
    ratios = {name: perplexity(name) / exact for name in MOST}
    assert all(ratio < MOST[name] for name, ratio in ratios.items()), ratios
    assert len({exact, *ratios.values()}) == 1 + len(MOST), "codes are read"
    assert abs(ratios["int8"] - 1) < abs(ratios["fp8"] - 1) < abs(ratios["fp8_e5m2"] - 1)
