"""One request's state on the host."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.kv.block_pool import Block
from pelton.core.kv.host_pages import SavedKV
from pelton.core.plan import Int32Array, SlotRef
from pelton.core.pooled import Pooled
from pelton.core.prompt_embeds import PromptEmbeds, end_of_rows
from pelton.core.prompt_logprobs import PromptLogprobs
from pelton.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

# What a request that yields no tokens asks of the sampler.
_MAX_SHOWN = 40  # characters of a value in a message
_NOTHING = SamplingParams(temperature=0.0, detokenize=False)


class RequestStatus(enum.Enum):
    """WAITING: no row, no blocks (new, or preempted). RUNNING: a row, gets tokens. DRAINING: the
    steps in flight yield all it may have; its row is given back, its blocks not yet."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """A request from `Scheduler.add` to its end.

        0            num_confirmed   num_tokens                  num_tokens + num_placeholders
        |-- prompt --|---- outputs ------|--- not known yet, in flight ---|

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: [prompt_len], int32 or integers that fit it; where an embedding stands,
            its placeholder (core/prompt_embeds.py).
        second_segment: index of the token where the second text of a pair begins, or None.
        prompt_embeds: these embeddings, or None. Whoever only keeps a request's record may let go
            of them.
        params: of sampling; or of pooling, completed by the engine's PoolingConfig. A request that
            pools yields no tokens and ends with its prompt; its params then ask for nothing.
        priority: lower is served first, under policy "priority".
        cache_salt: requests with different salts share no cached block.
        adapter: what else decides the keys and values, or None.
        eos_token_ids: end the answer unless params.ignore_eos.
        seed: of the noise if params.seed is None; drawn when absent. In [-2**63, 2**63).

    Counts, in tokens:
        num_tokens: known ones. prefill_len: those known at the last admission.
        num_computed_tokens: whose KV launched steps have computed if every draft is accepted, so
            an upper bound; num_confirmed_tokens: by steps whose result has arrived (while waiting:
            in its last life).
        num_placeholders: outputs that launched steps may yield; num_in_flight_min: those that they
            yield at least (one per sampling step).
        num_cached_tokens: prompt tokens that the prefix cache provided at the first admission.
        max_total_len: prompt and output together end here (set by the scheduler).
        num_drafts_expected: drafts that its row has, by the newest result; K before the first.

    Raises RequestError if the ids are not integers.
    """

    __slots__ = (
        "adapter",
        "admitted_at",
        "arrival",
        "awaited_pooled",
        "awaited_prompt_logprobs",
        "block_capacity",
        "block_hashes",
        "blocks",
        "cache_salt",
        "embeds_end",
        "end_token_ids",
        "eos_token_ids",
        "error",
        "finish_reason",
        "key",
        "max_total_len",
        "next_settle_length",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_drafts_expected",
        "num_in_flight_min",
        "num_passed_blocks",
        "num_placeholders",
        "num_preemptions",
        "num_tokens",
        "params",
        "pooling",
        "prefill_len",
        "priority",
        "prompt_embeds",
        "prompt_len",
        "ref",
        "request_id",
        "saved",
        "second_segment",
        "seed",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Int32Array | Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        prompt_embeds: PromptEmbeds | None = None,
        second_segment: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.pooling = params if isinstance(params, PoolingParams) else None
        params = _NOTHING if isinstance(params, PoolingParams) else params
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.prompt_embeds = prompt_embeds
        self.second_segment = second_segment
        self.eos_token_ids = eos_token_ids
        if params.seed is not None:
            self.seed = params.seed
        else:
            self.seed = seed if seed is not None else secrets.randbits(64) - 2**63
        stop_token_ids = params.stop_token_ids or ()
        self.end_token_ids = frozenset(
            stop_token_ids if params.ignore_eos else (*eos_token_ids, *stop_token_ids)
        )

        self.token_ids = as_token_ids(prompt_token_ids)
        """[capacity] int32, of which the first num_tokens are known; those never change."""
        self.prompt_len = len(self.token_ids)
        self.num_tokens = self.prompt_len
        self.embeds_end = 0 if prompt_embeds is None else end_of_rows(self.token_ids)
        """The position after the last embedding's; 0 without embeddings."""
        self.awaited_prompt_logprobs: PromptLogprobs | None = None
        """Until they are complete, and handed out with the first output token."""
        if params.prompt_logprobs is not None:
            self.awaited_prompt_logprobs = PromptLogprobs(params.prompt_logprobs)
        self.awaited_pooled: Pooled | None = None
        """What has come of its result, of a request that pools."""
        if self.pooling is not None:
            self.awaited_pooled = Pooled(is_per_token=self.pooling.is_per_token)
        self.prefill_len = 0
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_placeholders = 0
        self.num_in_flight_min = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.admitted_at = 0.0
        """When it got its first row, on the clock of time.monotonic."""
        self.max_total_len = 0
        self.num_drafts_expected = 0

        self.arrival = -1
        """Its number in the order of arrivals; -1: `Scheduler.add` gives it the next one."""
        self.key: tuple[tuple[int, ...], int] = ((), 0)
        """Place in the policy's order, lower first; unique, and kept over preemptions."""
        self.status = RequestStatus.WAITING
        self.ref: SlotRef | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: Exception | None = None

        self.blocks: list[list[Block]] = []
        """Block table of each KV group; empty while waiting."""
        self.block_hashes: list[list[bytes]] = []
        """Per KV group the hashes of full blocks of known tokens."""
        self.num_cached_blocks: list[int] = []
        """Per KV group how many blocks, from the first, are in the prefix cache."""
        self.num_passed_blocks: list[int] = []
        """Per KV group how many blocks, from the first, its window has passed: given back."""
        self.saved: SavedKV | None = None
        """Host pages that hold its KV: from a preemption on until a step has shown that the next
        life has it."""
        self.block_capacity = 0
        self.next_settle_length = 0

    @property
    def max_prefix_hit(self) -> int:
        """Tokens that need not be computed again if their KV is at hand: the last one is computed
        for its logits, and so is every one whose logits a prompt log-probability needs, or whose
        hidden state is to be pooled."""
        if self.pooling is not None and self.pooling.sees_all_tokens:
            return 0
        if self.awaited_prompt_logprobs is not None:
            return self.awaited_prompt_logprobs.num_known
        return self.num_tokens - 1

    @property
    def yields_tokens(self) -> bool:
        return self.pooling is None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def is_drained(self) -> bool:
        """Whether the steps in flight yield all it may have. Only what is certain to come counts:
        a draft may be rejected."""
        return self.num_tokens + self.num_in_flight_min >= self.max_total_len

    @property
    def num_useful_drafts(self) -> int:
        """Drafts in its next step that can still yield tokens."""
        certain = self.num_tokens + self.num_in_flight_min
        return min(self.num_drafts_expected, self.max_total_len - certain - 1)

    @property
    def has_drafts_in_flight(self) -> bool:
        return self.num_placeholders > self.num_in_flight_min

    @property
    def known_token_ids(self) -> Int32Array:
        """[num_tokens] int32, read-only view."""
        view = self.token_ids[: self.num_tokens]
        view.flags.writeable = False
        return view

    @property
    def prompt_token_ids(self) -> Int32Array:
        """[prompt_len] int32, read-only: for people, with -1 where an embedding stands."""
        ids = self.known_token_ids[: self.prompt_len]
        if self.embeds_end:
            ids = np.maximum(ids, -1)
            ids.flags.writeable = False
        return ids

    @property
    def output_token_ids(self) -> Int32Array:
        """[num_output_tokens] int32, read-only view."""
        return self.known_token_ids[self.prompt_len :]

    def append(self, token: int) -> None:
        """One more known token. Arrays that were given out before keep their content."""
        if self.num_tokens == len(self.token_ids):
            grown = np.empty(max(2 * self.num_tokens, 16), dtype=np.int32)
            grown[: self.num_tokens] = self.token_ids
            self.token_ids = grown
        self.token_ids[self.num_tokens] = token
        self.num_tokens += 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens})"
        )


def check_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """What can be said of a new request without an engine: lengths and token ids.

    Raises RequestError naming field, value and limit.
    """
    length, embeds = request.prompt_len, request.prompt_embeds
    if length == 0:
        raise RequestError(
            "prompt_token_ids must hold at least 1 token, got 0.", field="prompt_token_ids"
        )
    most = max_model_len - 1 if request.yields_tokens else max_model_len
    if length > most:
        raise RequestError(
            f"The prompt has {length} tokens; with max_model_len={max_model_len} it may have "
            f"{most}. Shorten it or raise max_model_len.",
            field="prompt_token_ids" if embeds is None else "prompt_embeds",
        )
    ids: npt.NDArray[np.signedinteger] = request.known_token_ids
    if embeds is not None:
        _check_embeds(request, embeds)
        ids = ids[ids >= 0]
    fields: list[tuple[str, npt.NDArray[np.signedinteger]]] = [
        ("prompt_token_ids", ids),
        *((name, np.array(ids, np.int64)) for name, ids in request.params.token_id_fields()),
    ]
    for field, ids in fields:
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise RequestError(
                f"{field} must hold token ids from 0 to {vocab_size - 1}, got {int(wrong[0])}.",
                field=field,
            )
    _check_some_token_is_legal(request, vocab_size)


def _check_embeds(request: Request, embeds: PromptEmbeds) -> None:
    ids = request.known_token_ids
    if not np.array_equal(ids[ids < 0], -1 - np.arange(len(embeds))):
        raise RequestError(
            f"prompt_token_ids must have one placeholder for each of the {len(embeds)} rows of "
            "prompt_embeds, in order, and no other negative id.",
            field="prompt_token_ids",
        )
    if request.params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs need a prompt of token ids, and {len(embeds)} places of this one "
            "are embeddings: leave prompt_logprobs out.",
            field="prompt_logprobs",
        )


def _check_some_token_is_legal(request: Request, vocab_size: int) -> None:
    """For the first token; what later ones may be, nobody knows yet."""
    params = request.params
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        banned |= request.end_token_ids
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size if allowed is None else banned.issuperset(allowed):
        fields = fields_that_exclude(request)
        raise RequestError(
            f"{' and '.join(fields)} rule out every token for the first place of the answer (no "
            f"end token counts before min_tokens={params.min_tokens}); leave one of them out.",
            field=fields[0],
        )


def fields_that_exclude(request: Request) -> list[str]:
    """Fields of the request by which tokens may be ruled out altogether."""
    params = request.params
    return [
        name
        for name, excludes in (
            ("allowed_token_ids", params.allowed_token_ids is not None),
            ("bad_words", bool(params.bad_words_token_ids)),
            ("min_tokens", params.min_tokens > 0),
        )
        if excludes
    ]


def as_token_ids(ids: Int32Array | Sequence[int]) -> Int32Array:
    """A private int32 copy. Raises RequestError for what is no list of int32 numbers."""
    try:
        given = np.asarray(ids)
    except (ValueError, OverflowError, TypeError, RuntimeError) as fault:
        # Lists of different lengths, or a tensor that is sparse, or not in this machine's memory.
        raise RequestError(
            f"prompt_token_ids must be a list of integers: {str(fault).rstrip('.')}.",
            field="prompt_token_ids",
        ) from fault
    if given.size == 0 and given.ndim == 1:
        return np.empty(0, dtype=np.int32)
    if given.ndim == 1 and given.dtype.kind not in "iu":
        _refuse_first_wrong(ids if isinstance(ids, (list, tuple)) else given.tolist())
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise RequestError(
            f"prompt_token_ids must be a list of integers, got {given.dtype} of shape "
            f"{given.shape}.",
            field="prompt_token_ids",
        )
    limits = np.iinfo(np.int32)
    for extreme in (int(given.min()), int(given.max())):
        if not limits.min <= extreme <= limits.max:
            raise RequestError(
                f"prompt_token_ids must fit 32 bits, got {extreme}.", field="prompt_token_ids"
            )
    return given.astype(np.int32)


def _refuse_first_wrong(ids: Sequence[object]) -> None:
    """Raises RequestError for the first of ids that is no int32; returns if each is."""
    limits = np.iinfo(np.int32)
    for place, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            what = "must hold integers"
        elif not limits.min <= one <= limits.max:
            what = f"must hold integers from 0 to {limits.max}"
        else:
            continue
        shown = repr(one) if len(repr(one)) <= _MAX_SHOWN else repr(one)[:_MAX_SHOWN] + "..."
        raise RequestError(
            f"prompt_token_ids {what}, got {shown} at place {place}.", field="prompt_token_ids"
        )
