"""Ways to make drafts, by name."""

SPECULATORS: dict[str, str] = {
    "ngram": "pelton.speculation.ngram:NgramSpeculator",
}


def register(name: str, target: str) -> None:
    """Add a method from outside the tree; `target` is "module:Class" of a Speculator, made with
    (device, EngineConfig)."""
    SPECULATORS[name] = target
