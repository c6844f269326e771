"""What each request asked of the sampler, by slot: on the device, and what the host must know."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntFlag

import numpy as np
import torch

from pelton.batch.participant import StepParticipant
from pelton.batch.staged import Staging
from pelton.config.params import SamplingParams
from pelton.core.plan import NewRow, SlotRef
from pelton.errors import RequestError
from pelton.sampling.processors import Processor, load_processors
from pelton.sampling.row_lists import RowLists

MAX_STOP_IDS = 128
_INT32_MAX = 2**31 - 1


class Need(IntFlag):
    """Which work a row asks for beyond the argmax of its raw logits."""

    RANDOM = 1
    MIN_TOKENS = 2
    MIN_P = 4
    TOP_K = 8
    TOP_P = 16
    ALLOWED_IDS = 32
    LOGIT_BIAS = 64
    PENALTIES = 128
    BAD_WORDS = 256
    PROCESSORS = 512


class SamplingRows(StepParticipant):
    """Staged tensors of [num_rows, 1] and host mirrors.

    stop_ids: [num_rows, MAX_STOP_IDS]. penalties: [num_rows, 3], repetition, frequency, presence.
    lists: whatever has any length. processors: slot -> the functions of a row that has some.

    A greedy row (temperature 0) has top_k 1, top_p 1, min_p 0, whatever its request said.
    Mirrors, [num_rows]: needs_np, Need flags; top_k_np and min_len_np, as on the device;
    num_stop_ids_np; num_logprobs_np, -1 = none; asks_more_np, for more than a temperature.

    Args:
        num_rows: slots, reserved ones included.
        max_logprobs: the most a request may ask for.
    """

    def __init__(
        self, staging: Staging, *, num_rows: int, vocab_size: int, max_logprobs: int
    ) -> None:
        self.vocab_size = vocab_size
        self.max_logprobs = min(max_logprobs, vocab_size)
        self.temperature = staging.tensor("temperature", num_rows, 1, torch.float32)
        self.top_p = staging.tensor("top_p", num_rows, 1, torch.float32)
        self.min_p = staging.tensor("min_p", num_rows, 1, torch.float32)
        self.top_k = staging.tensor("top_k", num_rows, 1, torch.int32)
        self.seed = staging.tensor("seed", num_rows, 1, torch.int64)
        self.min_len = staging.tensor("min_len", num_rows, 1, torch.int32)
        self.stop_ids = staging.tensor("stop_ids", num_rows, MAX_STOP_IDS, torch.int32)
        self.penalties = staging.tensor("penalties", num_rows, 3, torch.float32)
        self.lists = RowLists(staging, num_rows)
        self.processors: dict[int, tuple[Processor, ...]] = {}
        self.needs_np = np.zeros(num_rows, np.int32)
        self.top_k_np = np.ones(num_rows, np.int32)
        self.min_len_np = np.zeros(num_rows, np.int32)
        self.num_stop_ids_np = np.zeros(num_rows, np.int32)
        self.num_logprobs_np = np.full(num_rows, -1, np.int32)
        self.asks_more_np = np.zeros(num_rows, np.bool_)

    def add_request(self, row: NewRow) -> None:
        """Stage and mirror every field.

        Raises RequestError for token ids outside the vocabulary, more than MAX_STOP_IDS end tokens
        together with min_tokens, more logprobs than the engine allows, bad words that were not
        tokenised, and logits processors that cannot be found.
        """
        params = row.params
        for field, ids in params.token_id_fields():
            _check_ids(field, ids, self.vocab_size)
        stop_ids = self._stop_ids(row)
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if num_logprobs > self.max_logprobs:
            raise RequestError(
                f"logprobs must be at most {self.max_logprobs} (max_logprobs of the engine, and no "
                f"more than its vocabulary), got {num_logprobs}: ask for fewer.",
                field="logprobs",
            )
        if params.bad_words and not params.bad_words_token_ids:
            raise RequestError(
                "bad_words need a tokenizer, and were given none.", field="bad_words"
            )
        processors = load_processors(params.processors)

        needs = _list_needs(params)
        temperature, top_p, min_p, top_k = params.temperature, 1.0, 0.0, 1
        if not params.is_greedy:
            needs |= Need.RANDOM
            top_p, min_p = params.top_p, params.min_p
            top_k = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
            needs |= Need.MIN_P if min_p > 0 else Need(0)
            needs |= Need.TOP_K if top_k < self.vocab_size else Need(0)
            needs |= Need.TOP_P if top_p < 1 else Need(0)
        min_len = min(row.prompt_len + params.min_tokens, _INT32_MAX)
        if stop_ids:
            needs |= Need.MIN_TOKENS

        slot = row.ref.slot
        self.lists.add(row.ref, params)
        self.processors.pop(slot, None)
        if processors:
            self.processors[slot] = processors
        self.penalties.stage(
            slot,
            0,
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
        )
        self.temperature.stage(slot, 0, [temperature])
        self.top_p.stage(slot, 0, [top_p])
        self.min_p.stage(slot, 0, [min_p])
        self.top_k.stage(slot, 0, [top_k])
        self.seed.stage(slot, 0, [row.seed])
        self.min_len.stage(slot, 0, [min_len])
        self.stop_ids.stage(slot, 0, stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids)))
        self.needs_np[slot] = needs
        self.top_k_np[slot] = top_k
        self.min_len_np[slot] = min_len
        self.num_stop_ids_np[slot] = len(stop_ids)
        self.num_logprobs_np[slot] = num_logprobs
        self.asks_more_np[slot] = bool(needs & ~Need.RANDOM) or num_logprobs >= 0

    def remove_request(self, ref: SlotRef) -> None:
        """Let go of what takes memory; all else waits for the row's next owner."""
        self.lists.remove(ref)

    def _stop_ids(self, row: NewRow) -> list[int]:
        """The tokens to forbid until min_tokens are out: none without min_tokens."""
        params = row.params
        asked = params.stop_token_ids or ()
        if params.min_tokens == 0:
            return []
        stop_ids = sorted({*row.eos_token_ids, *asked})
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens works with at most {MAX_STOP_IDS} end tokens, and this request has "
                f"{len(stop_ids)} (stop_token_ids and the model's own): give fewer stop_token_ids "
                f"or min_tokens=0.",
                field="stop_token_ids",
            )
        return stop_ids


def _list_needs(params: SamplingParams) -> Need:
    """Needs of what a greedy row may have too."""
    asked = {
        Need.ALLOWED_IDS: params.allowed_token_ids is not None,
        Need.LOGIT_BIAS: bool(params.logit_bias),
        Need.PENALTIES: params.has_penalties,
        Need.BAD_WORDS: bool(params.bad_words_token_ids),
        Need.PROCESSORS: bool(params.logits_processors),
    }
    needs = Need(0)
    for need, is_asked in asked.items():
        needs |= need if is_asked else Need(0)
    return needs


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{field} must be in [0, {vocab_size}), the model's vocabulary, got {token}.",
                field=field,
            )
