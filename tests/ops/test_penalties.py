from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.penalties import penalties


def oracle(logits, tokens, prompt_len, num_tokens, repetition, frequency, presence):
    """One row, token by token."""
    x = logits.astype(np.float64).copy()
    valid = [t for t in tokens[:num_tokens] if 0 <= t < len(x)]
    outputs = [t for t in tokens[prompt_len:num_tokens] if 0 <= t < len(x)]
    for token in range(len(x)):
        if token in valid:
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        count = outputs.count(token)
        x[token] -= frequency * count
        if count:
            x[token] -= presence
    return x


def make(num_rows, vocab, width, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-1, vocab + 1, (num_rows, width)).astype(np.int32)
    prompt_len = rng.integers(0, width + 1, num_rows).astype(np.int32)
    num_tokens = np.minimum(prompt_len + rng.integers(0, 20, num_rows), width).astype(np.int32)
    values = [
        rng.choice(choices, num_rows).astype(np.float32)
        for choices in ([0.5, 1, 1.3], [-1.5, 0, 0.7], [-2, 0, 1.1])
    ]
    logits = rng.normal(0, 3, (num_rows, vocab)).astype(np.float32)
    logits[:, 0] = 0.0
    return logits, tokens, prompt_len, num_tokens, *values


@pytest.mark.parametrize(("num_rows", "vocab", "width"), [(1, 1, 1), (7, 33, 50), (5, 513, 3)])
def test_against_the_oracle(num_rows, vocab, width):
    given = make(num_rows, vocab, width, seed=vocab)
    logits = torch.tensor(given[0])
    penalties(logits, *map(torch.tensor, given[1:]))
    for row in range(num_rows):
        np.testing.assert_allclose(
            logits[row].numpy(), oracle(*(array[row] for array in given)), rtol=1e-5, atol=1e-5
        )


def test_a_row_is_bitwise_the_same_alone_and_with_a_longer_table():
    given = [torch.tensor(array) for array in make(9, 65, 30, seed=1)]
    batch = given[0].clone()
    penalties(batch, *given[1:])
    for row in range(9):
        alone = given[0][row : row + 1].clone()
        wider = torch.nn.functional.pad(given[1][row : row + 1], (0, 11), value=3)
        penalties(alone, wider, *(array[row : row + 1] for array in given[2:]))
        assert torch.equal(alone[0], batch[row])


def test_neutral_values_change_no_bit():
    logits = torch.tensor([[1.5, -0.0, 0.0, -torch.inf, torch.nan, 1e-38]])
    before = logits.clone()
    tokens = torch.arange(6, dtype=torch.int32)[None]
    one, zero = torch.ones(1), torch.zeros(1)
    lengths = torch.tensor([2], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    penalties(logits, tokens, *lengths, one, zero, zero)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
