from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.logprobs import logprobs


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def run(logits, token_ids, width):
    num_rows = len(logits)
    out = (
        torch.full((num_rows,), -7.0),
        torch.full((num_rows,), -7, dtype=torch.int32),
        torch.full((num_rows, width), -7, dtype=torch.int32),
        torch.full((num_rows, width), -7.0),
    )
    logprobs(logits, torch.as_tensor(token_ids, dtype=torch.int32), *out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 255, 8193, 49152])
@pytest.mark.parametrize("width", [0, 1, 3, 20])
def test_against_float64(vocab, dtype, width):
    """Case 17: `width` distinct entries, sorted, wherever the sampled token is."""
    width = min(width, vocab)
    logits = (torch.randn(6, vocab) * 4).to(dtype)
    token_ids = logits.argmax(-1)
    token_ids[::2] = vocab - 1
    values, ranks, top_ids, top_values = run(logits, token_ids, width)
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for row, token in enumerate(token_ids.tolist()):
        assert values[row].item() == pytest.approx(exact[row, token], abs=1e-5)
        assert ranks[row] == 1 + (exact[row] > exact[row, token]).sum()
        order = np.lexsort((np.arange(vocab), -exact[row]))[:width]
        assert top_ids[row].tolist() == order.tolist()
        assert len(set(top_ids[row].tolist())) == width
        np.testing.assert_allclose(top_values[row].numpy(), exact[row][order], atol=1e-5)


def test_rows_do_not_depend_on_the_batch():
    logits = torch.randn(64, 10001)
    token_ids = torch.arange(64)
    batch = run(logits, token_ids, 7)
    for row in range(64):
        alone = run(logits[row : row + 1], token_ids[row : row + 1], 7)
        assert all((a[0] == b[row]).all() for a, b in zip(alone, batch))
