"""derive_inputs(parent_step, parent, row_map, out_step, out): a batch made of pieces of a batch.

row_map: [3, B'] int32 = for each derived row its parent row, its first query token within that
row, and its number of query tokens. out_step is the host's, whole; `out` is gathered from the
parent. A derived row sees the tokens of its parent row up to its own end: seq_len shrinks by the
query tokens past it. Samples are not derived: sampling runs once, on the parent.
"""

from pelton.ops.derive_inputs.reference import derive_inputs

__all__ = ["derive_inputs"]
