"""What the docstring of a class says of its fields: flags and the OpenAPI document repeat it, so
that each sentence exists once."""

from __future__ import annotations

import inspect
import re

_ENTRY = re.compile(r"^(\w+(?: / \w+)*): (.*)$")


def field_texts(kind: type) -> dict[str, str]:
    """Field name -> its words in the docstrings of the class and its bases: "name: text" or
    "one / two: text", with following indented lines."""
    texts: dict[str, str] = {}
    current: list[str] = []
    # A class without a docstring of its own has None here, whatever its bases have.
    docstrings = [inspect.cleandoc(base.__doc__ or "") for base in reversed(kind.__mro__[:-1])]
    for line in "\n\n".join(docstrings).splitlines():
        if entry := _ENTRY.match(line):
            current = entry[1].split(" / ")
            texts.update(dict.fromkeys(current, entry[2]))
        elif line.startswith(" "):
            for name in current:
                texts[name] += " " + line.strip()
        else:
            current = []
    return texts
