"""The reference keeps what top_k_top_p keeps; see test_triton_steps.py for the kernel."""

from __future__ import annotations

import torch

from pelton.ops.keep_top import keep_top


def test_what_stays_and_what_goes():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0], [0.0, 9.0, 0.0, 0.0]])
    top_k = torch.tensor([2, 1, 4], dtype=torch.int32)
    keep_top(logits, top_k, torch.tensor([1.0, 1.0, 0.5]))
    inf = -torch.inf
    assert logits.tolist() == [[inf, 3.0, 3.0, inf], [inf, 3.0, inf, inf], [inf, 9.0, inf, inf]]
