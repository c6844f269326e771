"""How weights that a file holds quantised are kept, by the names of `quantization`."""

DEQUANTISE, GGUF = "dequantise", "gguf"

SCHEMES: dict[str, str] = {
    DEQUANTISE: "pelton.quant.dense:Dense",
    GGUF: "pelton.quant.gguf:GGUFBlocks",
}


def register(name: str, target: str) -> None:
    """Add a scheme from outside the tree; `target` is "module:Class"."""
    SCHEMES[name] = target
