"""Real text from real weights: SmolLM2-135M-Instruct, the embedded model, against transformers."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pelton import LLM, SamplingParams
from pelton.checkpoint.embedded import embedded_model
from pelton.device.native.library import library

needs_kernels = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")

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


# The beginnings of a novel, Jane Austen, 1813, and of the Declaration of Independence, 1776.
TEXTS = [
    (Path(__file__).parent / name).read_text()
    for name in ("pride_and_prejudice.txt", "declaration.txt")
]


@needs_kernels
@pytest.mark.parametrize("max_num_batched_tokens", [1024, 8])
@pytest.mark.parametrize("quantization", ["gguf", "dequantise"])
@torch.no_grad()
def test_perplexity_is_that_of_transformers(llm, oracle, quantization, max_num_batched_tokens):
    """Within 0.5 %, of the file's blocks and in bfloat16, where many rows are multiplied at a time
    (with AMX) and where few are (the blocks in integers)."""
    prompts = [llm.get_tokenizer().encode(text).tolist() for text in TEXTS]
    expected = [
        torch.nn.functional.cross_entropy(
            oracle(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="sum"
        )
        for ids in prompts
    ]
    other = LLM(
        dtype="bfloat16",
        quantization=quantization,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    outputs = other.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    other.close()
    found = [
        -sum(row[token].logprob for token, row in zip(ids[1:], output.prompt_logprobs[1:]))
        for ids, output in zip(prompts, outputs)
    ]
    num_tokens = sum(len(ids) - 1 for ids in prompts)
    ratio = math.exp((sum(found) - float(sum(expected))) / num_tokens)
    print(f"{num_tokens} tokens, ratio of perplexities {ratio:.5f}")
    assert 0.995 < ratio < 1.005
    assert ratio != 1


MEASURED = """
import gc, re
from pathlib import Path
import pelton.worker.worker as worker
from pelton import LLM

def private():
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"^Private_(?:Clean|Dirty): *(\\d+)", text, re.M))

load = worker.load_model

def measured(*given, **named):
    gc.collect()
    before = private()
    model = load(*given, **named)
    gc.collect()
    print("KiB:", private() - before)
    return model

worker.load_model = measured
LLM(num_gpu_blocks_override=9, max_model_len=64, max_num_seqs=1, num_threads=1)
"""


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells")
def test_private_memory_of_the_weights():
    """What loading adds: the packed weights, and no page of the file."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = 1024 * int(done.stdout.split("KiB:")[1].split()[0])
    print(f"{found / 1e6:.1f} MB")
    assert 90e6 < found < 106e6
