"""Ways to pool by name: "module:Class", a `Method` of pelton/pooling/methods.py."""

METHODS: dict[str, str] = {
    "last": "pelton.pooling.methods:Last",
    "cls": "pelton.pooling.methods:Cls",
    "mean": "pelton.pooling.methods:Mean",
    "all": "pelton.pooling.methods:All",
    "step": "pelton.pooling.methods:Step",
}


def register(name: str, target: str) -> None:
    """Add a method from outside the tree; `target` is "module:Class"."""
    METHODS[name] = target
