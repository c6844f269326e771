"""Model families by the architecture name of config.json."""

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "pelton.models.llama:Llama",
}


def register(architecture: str, target: str) -> None:
    """Add a family from outside the tree; `target` is "module:Class"."""
    MODELS[architecture] = target
