"""mask_stop_ids(logits, stop_ids, is_active): forbid end tokens, in place.

logits: [N, V] float32 -> -inf at the row's stop ids where is_active.
stop_ids: [N, S] int32; ids outside [0, V) (padding is -1) touch nothing. is_active: [N] bool.
"""

from pelton.ops.mask_stop_ids.reference import mask_stop_ids

__all__ = ["mask_stop_ids"]
