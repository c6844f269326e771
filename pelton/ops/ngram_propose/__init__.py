"""ngram_propose(rows, step, drafts, min_n, max_n, width): drafts by looking back in the text.

rows, step: as in ops/step_tensors.py. drafts: [B, K] int32, written whole. width: columns of the
token table to look at, at least every sampling row's total_len.
Per batch row: among the places where the last n tokens stand earlier in the known tokens, those of
the longest n in [min_n, max_n], and of these the right-most, since a text goes on like its recent
past. The drafts are the tokens after that place; where they reach the end of the text, which is
near when the place is, they go on from the place again, as a text with that period does, so that a
match always gives K drafts. -1 in all columns of a row without a match.
Rows that did not sample get any drafts. Source of the method: prompt lookup decoding (Saxena,
2023); the shapes depend on the arguments' shapes alone.
"""

from pelton.ops.ngram_propose.reference import ngram_propose

__all__ = ["KERNELS", "ngram_propose"]

KERNELS = {"cuda": "pelton.ops.ngram_propose.triton:ngram_propose"}
