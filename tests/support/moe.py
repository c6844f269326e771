"""Weights of the moe op, and what it must give: token by token in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pelton.ops.moe import MoESignature

PLAIN = MoESignature(
    hidden_size=24,
    intermediate_size=17,
    num_experts=7,
    top_k=3,
    dtype=torch.float32,
    device_type="cpu",
    normalise_chosen=False,
)
BIASED: dict[str, Any] = {
    "has_router_bias": True,
    "has_gate_up_bias": True,
    "has_down_bias": True,
}
CASES: dict[str, dict[str, Any]] = {
    "weights as they are": {},
    "weights sum to one": {"normalise_chosen": True},
    "biases": BIASED,
    "gpt-oss": {**BIASED, "normalise_chosen": True, "swiglu_limit": 1.5, "swiglu_alpha": 1.702},
    "one expert": {"num_experts": 1, "top_k": 1},
    "one of many": {"num_experts": 33, "top_k": 1},
    "all of them": {"num_experts": 4, "top_k": 4, "normalise_chosen": True},
}


def weights_of(signature: MoESignature) -> dict[str, torch.Tensor]:
    s = signature
    shapes = {
        "router": (s.num_experts, s.hidden_size),
        "gate_up": (s.num_experts, 2 * s.intermediate_size, s.hidden_size),
        "down": (s.num_experts, s.hidden_size, s.intermediate_size),
    }
    if s.has_router_bias:
        shapes["router_bias"] = (s.num_experts,)
    if s.has_gate_up_bias:
        shapes["gate_up_bias"] = (s.num_experts, 2 * s.intermediate_size)
    if s.has_down_bias:
        shapes["down_bias"] = (s.num_experts, s.hidden_size)
    return {name: torch.randn(shape).to(s.dtype) for name, shape in shapes.items()}


def exact(signature: MoESignature, weights: dict[str, torch.Tensor], x: torch.Tensor) -> np.ndarray:
    """Token by token in float64."""
    s = signature
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    rows = []
    for token in x.double().numpy():
        logits = w["router"] @ token + w.get("router_bias", 0.0)
        chosen = sorted(range(s.num_experts), key=lambda e: (-logits[e], e))[: s.top_k]
        pool = chosen if s.normalise_chosen else list(range(s.num_experts))
        total = np.exp(logits[pool] - logits.max()).sum()
        row = np.zeros(s.hidden_size)
        for e in chosen:
            inner = w["gate_up"][e] @ token
            if s.has_gate_up_bias:
                inner = inner + w["gate_up_bias"][e]
            gate, up = np.split(inner, 2)
            if s.swiglu_limit is not None:
                gate = np.minimum(gate, s.swiglu_limit)
                up = np.clip(up, -s.swiglu_limit, s.swiglu_limit) + 1
            gate = gate / (1 + np.exp(-gate * (s.swiglu_alpha if s.swiglu_limit else 1)))
            result = w["down"][e] @ (gate * up)
            if s.has_down_bias:
                result = result + w["down_bias"][e]
            row += np.exp(logits[e] - logits.max()) / total * result
        rows.append(row)
    return np.array(rows).reshape(len(x), s.hidden_size)


def check_triton(make: Any, signature: MoESignature, num_rows: int, tolerance: float) -> None:
    """make(signature, **weights) -> kernel, on the signature's device."""
    torch.manual_seed(num_rows)
    device = signature.device_type
    weights = {
        name: (one / one.shape[-1] ** 0.5 if one.dim() > 1 else one)
        for name, one in weights_of(signature).items()
    }
    kernel = make(signature, **{name: one.to(device) for name, one in weights.items()})
    x = torch.randn(num_rows, signature.hidden_size).to(signature.dtype)
    out = torch.full((num_rows + 1, signature.hidden_size), torch.nan, dtype=x.dtype).to(device)
    out[num_rows] = 7.0
    kernel(x.to(device), out[:num_rows])
    expected = exact(signature, weights, x)
    size = max(np.abs(expected).max(), 1.0)
    error = np.abs(out[:num_rows].cpu().double().numpy() - expected).max(1) / size
    assert (out[num_rows] == 7.0).all()
    # A near tie of logits may be decided otherwise, in one row of many.
    assert (error <= tolerance).mean() >= 0.95, (signature, num_rows, error.max())
