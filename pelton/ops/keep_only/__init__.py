"""keep_only(logits, token_ids): forbid all other tokens, in place.

logits: [N, V] float32 -> -inf but at the row's ids. token_ids: [N, M] int32; ids outside [0, V)
(padding is -1) are nobody's. A row whose first id is -1 has no list, and stays as it is.
"""

from pelton.ops.keep_only.reference import keep_only

__all__ = ["keep_only"]
