"""Custom logits processors by name.

A processor is a function `process(scores, row, **arguments)`. scores: [V] float32, one row's logits
after biases, penalties and bad words and before the temperature, to be changed in place; row: a
ProcessedRow of pelton/sampling/processors.py. It runs within a step: on a GPU it must not read a
tensor's values on the host (`.item()`, `if tensor:`), and its tensors live on scores' device. A
request asks for it with SamplingParams(logits_processors={"name": {"argument": value}}) or
logits_processors=["name"].
"""

from pelton.errors import ConfigError, RequestError

PROCESSORS: dict[str, str] = {}


def register(name: str, target: str) -> None:
    """Make a processor known in this process; `target` is "module:function".

    Raises ConfigError if the target is no such string.
    """
    module, colon, function = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (module and colon and function):
        raise ConfigError(f'a logits processor is given as "module:function", got {target!r}.')
    PROCESSORS[name] = target


def processor_target(name: str) -> str:
    """ "module:function" of a processor. Raises RequestError for a name that is not registered."""
    target = PROCESSORS.get(name)
    if target is None:
        known = ", ".join(sorted(PROCESSORS)) or "none"
        raise RequestError(
            f"logits_processors names {name!r}, which is not registered; known: {known}. "
            "pelton.sampling.table.register(name, 'module:function') adds one.",
            field="logits_processors",
        )
    return target
