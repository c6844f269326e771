"""How large a model's sizes may be: far above any model, far below what no machine can hold.

Without them a damaged or hostile file shows as a process that ends without a word.
"""

from __future__ import annotations

# Of every integer, where nothing below is said: the longest contexts are some 10 million tokens.
MAX_SIZE = 2**24
MAX_LAYERS = 1024
MAX_HIDDEN = 2**17
MAX_INTERMEDIATE = 2**20
MAX_HEADS = 2**12
MAX_EXPERTS = 2**14
MAX_HEAD_DIM = 2**12
MAX_VOCAB = 2**22
