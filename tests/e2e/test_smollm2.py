"""Real text from real weights: SmolLM2-135M-Instruct, the embedded model, against transformers."""

from __future__ import annotations

import pytest
import torch

from pelton import LLM, SamplingParams
from pelton.checkpoint.embedded import embedded_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Q: What is 17 + 25?\nA:",
    "The three primary colours are",
    "import numpy as np\n\n# Compute the mean of a list\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at",
    "To be, or not to be,",
    "SELECT name FROM users WHERE",
    "Les trois mousquetaires sont",
    "1, 1, 2, 3, 5, 8,",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "Photosynthesis is the process by which",
    "The quick brown fox jumps over the lazy dog. " * 8,
    '{"name": "Ada", "age":',
    "Ingredients:\n- 2 eggs\n- 100 g flour\n-",
    "In 1969, Neil Armstrong",
    "   leading spaces and\ttabs\n\n",
    "Emoji 🎉 and accents: café, naïve,",
]


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", quantization="dequantise", max_num_seqs=20, max_model_len=512)


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoModelForCausalLM

    file = embedded_model()
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


@torch.no_grad()
def assert_greedy(oracle, output):
    """transformers is fed prompt and answer at once: if its choice after every position is the
    answer's next token, its own greedy answer is the same."""
    answer = output.outputs[0].token_ids
    logits = oracle(torch.tensor([output.prompt_token_ids + answer])).logits[0]
    choice = logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
    assert choice == answer, output.prompt


def test_greedy_tokens_equal_transformers(llm, oracle):
    """20 prompts x 64 tokens in one batch."""
    assert len(PROMPTS) == 20
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == 64
        assert_greedy(oracle, output)


@torch.no_grad()
def test_a_generation_of_transformers_itself(llm, oracle):
    """The same with transformers' own loop and key-value cache, for one prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    ids = torch.tensor([output.prompt_token_ids])
    expected = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
    )
    assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


def test_chat_answers_as_transformers_would(llm, oracle):
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of Italy?"}],
        SamplingParams(temperature=0.0, max_tokens=32),
        use_tqdm=False,
    )
    assert output.prompt.endswith("<|im_start|>assistant\n")
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
    assert_greedy(oracle, output)
