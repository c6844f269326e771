"""What requests give as lists: allowed tokens, biases, bad words. Who gives none pays nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pelton.batch.staged import Staging
from pelton.config.params import SamplingParams
from pelton.core.plan import Int32Array, SlotRef
from pelton.sampling.list_pool import ListPool, float_words

# Columns of RowLists.places: first word and number of words of each list in the pool.
ALLOWED_IDS = 0
BIAS_IDS = 2
BIAS_VALUES = 4
BAD_WORDS = 6
BAD_WORD_LEN = 8  # words are padded to the longest of their request: tokens of one
_NUM_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class ListSizes:
    """The longest lists of some rows: ids of allowed_token_ids and logit_bias, bad words, and the
    tokens of a bad word."""

    allowed_ids: int
    bias_ids: int
    bad_words: int
    bad_word_len: int


NO_LISTS = ListSizes(0, 0, 0, 0)


class RowLists:
    """Lists by slot. places: staged [num_rows, 9], see above; a row without lists has zeros.

    Mirror: sizes_np [num_rows, 4], the fields of ListSizes.
    """

    def __init__(self, staging: Staging, num_rows: int) -> None:
        self.places = staging.tensor("sampling_lists", num_rows, _NUM_COLUMNS, torch.int32)
        self.pool = ListPool(staging.device)
        self.sizes_np = np.zeros((num_rows, 4), np.int32)
        self._owned: dict[int, tuple[SlotRef, list[tuple[int, int]]]] = {}

    def add(self, ref: SlotRef, params: SamplingParams) -> None:
        """Stage the lists of a row's new owner, and let go of the old one's."""
        slot = ref.slot
        self._free(slot)
        allowed = np.array(params.allowed_token_ids or (), np.int32)
        biases = params.logit_bias or {}
        words = _bad_word_table(params.bad_words_token_ids)
        owned: list[tuple[int, int]] = []
        places: list[int] = []
        for content in (
            allowed,
            np.array(list(biases), np.int32),
            float_words(list(biases.values())),
            words.reshape(-1),
        ):
            start = 0
            if len(content):
                start = self.pool.add(content)
                owned.append((start, len(content)))
            places += [start, len(content)]
        if owned:
            self._owned[slot] = ref, owned
        self.places.stage(slot, 0, [*places, words.shape[1]])
        self.sizes_np[slot] = (len(allowed), len(biases), *words.shape)

    def remove(self, ref: SlotRef) -> None:
        if ref.slot in self._owned and self._owned[ref.slot][0] == ref:
            self._free(ref.slot)

    def sizes(self, slots: Int32Array) -> ListSizes:
        """slots: [n >= 1]."""
        return ListSizes(*self.sizes_np[slots].max(0).tolist())

    def _free(self, slot: int) -> None:
        if slot in self._owned:
            for start, num_words in self._owned.pop(slot)[1]:
                self.pool.remove(start, num_words)


def _bad_word_table(words: tuple[tuple[int, ...], ...]) -> Int32Array:
    """[num_words, longest] int32: tokens from a word's last to its first, then -1."""
    table = np.full((len(words), max(map(len, words), default=0)), -1, np.int32)
    for row, word in zip(table, words):
        row[: len(word)] = word[::-1]
    return table
