"""mask_bad_words(logits, words, recent): forbid tokens that would complete a word, in place.

logits: [N, V] float32 -> -inf at the last token of each word whose other tokens come just before.
words: [N, B, P] int32, each word's tokens from its last to its first, then -1; -1 first: no word.
recent: [N, P - 1] int32, the row's output from its newest token back; -1 where it has no more.
"""

from pelton.ops.mask_bad_words.reference import mask_bad_words

__all__ = ["mask_bad_words"]
