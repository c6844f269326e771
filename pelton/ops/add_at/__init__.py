"""add_at(logits, token_ids, values): raise or lower single tokens, in place.

logits: [N, V] float32. token_ids: [N, M] int32, distinct within a row; ids outside [0, V) (padding
is -1) touch nothing. values: [N, M] float32, of any content where the id is none.
"""

from pelton.ops.add_at.reference import add_at

__all__ = ["add_at"]
