"""Attention backends by name."""

BACKENDS: dict[str, str] = {
    "torch": "pelton.attention.torch_backend:TorchBackend",
    "native": "pelton.attention.native_backend:NativeBackend",
    "reference": "pelton.attention.reference_backend:ReferenceBackend",
    "triton": "pelton.attention.triton_backend:TritonBackend",
    "triton_invariant": "pelton.attention.triton_backend:TritonInvariantBackend",
    "invariant": "pelton.attention.invariant_backend:InvariantBackend",
}


def register(name: str, target: str) -> None:
    """Add a backend from outside the tree; `target` is "module:Class"."""
    BACKENDS[name] = target
