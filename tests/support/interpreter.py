"""Triton's interpreter, for processes of their own: import this before any kernel is defined.

Triton 3.6 turns its scalars, which are arrays of one element, into indexes in a way that numpy 2.4
no longer takes.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor
