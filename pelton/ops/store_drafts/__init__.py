"""store_drafts(rows, step, num_sampled, drafts, vocab_size, counts): proposals become row state.

rows, step: as in ops/step_tensors.py, rows advanced past the step and changed in place.
num_sampled: [B] int32; drafts: [B, K] int32, any values; counts: [B] int32, written: how many
drafts each row has.
A row's drafts are its proposals up to the first that no step could verify: an id outside
[0, vocab_size), or a place whose successor would lie past the context (the token table's end). The
rest are -1, and so are all drafts of a row that did not sample. Padding rows change nothing but the
reserved row and count 0.
"""

from pelton.ops.store_drafts.reference import store_drafts

__all__ = ["KERNELS", "store_drafts"]

KERNELS = {"cuda": "pelton.ops.store_drafts.triton:store_drafts"}
