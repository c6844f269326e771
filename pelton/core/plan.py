"""The contract between the scheduler and whoever runs a step. Token ids are int32 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.prompt_embeds import PromptEmbeds

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

NO_BLOCKS: Int32Array = np.zeros(0, np.int32)

# Why a row's sample is not to be used (StepResult.status).
OK = 0
NAN_LOGITS = 1  # the row's largest logit is NaN or +inf
ALL_MASKED = 2  # no token is legal
BAD_TOKEN = 3  # the sampled id is outside [0, vocab)
PROCESSOR_FAILED = 4  # a logits processor of the request's raised
NAN_POOLED = 5  # a number of the row's pooled result is NaN or infinite


class SlotRef(NamedTuple):
    """A row of persistent state, and which of its successive owners is meant."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageCopies:
    """KV blocks and pages of host memory, pairwise; what one is copied to, the other tells.

    block_ids, page_ids: [n], no page twice.
    """

    block_ids: Int32Array
    page_ids: Int32Array

    @staticmethod
    def of(block_ids: Sequence[int], page_ids: Sequence[int]) -> PageCopies:
        if not block_ids and not page_ids:
            return NO_COPIES
        return PageCopies(
            block_ids=np.array(block_ids, np.int32), page_ids=np.array(page_ids, np.int32)
        )

    def __len__(self) -> int:
        return len(self.block_ids)


NO_COPIES = PageCopies(block_ids=np.zeros(0, np.int32), page_ids=np.zeros(0, np.int32))


@dataclass(slots=True, kw_only=True)
class NewRow:
    """A request that gets a row: new, or resumed after preemption (then it is new again).

    token_ids: [prefill_len], every token known on admission (a resumed request's earlier outputs
        included), so prompt_len <= prefill_len; placeholders where embeddings stand.
    prompt_embeds: the request's, if any of them has yet to be computed.
    num_computed_tokens: tokens whose KV is there: a prefix hit's, or what `restores` brings.
    block_ids: one [num_blocks] array per KV group: the row's whole block table.
    restores: copies from host pages to some of these blocks, before the step's forward pass.
    seed: of the request's noise, in [-2**63, 2**63).
    pooling: what is made of its hidden states, of a request that yields no tokens.
    second_segment: index of the token where the second part of a pair begins, or None.
    state_blocks: of the checkpoint that holds its recurrent state after num_computed_tokens tokens,
        to be read before anything else of the step; empty where there is none.
    """

    ref: SlotRef
    request_id: str
    token_ids: Int32Array
    prompt_len: int
    num_computed_tokens: int
    block_ids: tuple[Int32Array, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    second_segment: int | None = None
    state_blocks: Int32Array = field(default_factory=lambda: NO_BLOCKS)
    restores: PageCopies = NO_COPIES
    prompt_embeds: PromptEmbeds | None = None

    @property
    def prefill_len(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class BlockAppend:
    """Blocks added to a row's table of one group, at table indices first..first+len(block_ids)."""

    ref: SlotRef
    group: int
    first: int
    block_ids: Int32Array


@dataclass(slots=True, kw_only=True)
class StateSave:
    """Keep a row's recurrent state, after its first `length` tokens, in these blocks: that many it
    has computed when the step's forward pass has run."""

    ref: SlotRef
    length: int
    block_ids: Int32Array


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step, as a difference from the last. Rows are in batch order: few query tokens first.

    refs: [B] scheduled rows.
    num_scheduled_tokens: [B] query length of each row, >= 1.
    num_drafts: [B] how many of the row's query tokens are drafts (0 without a speculator).
    num_computed_bound: [B] upper bound of the row's computed tokens before this step. Exact when no
        draft is in flight; the device holds the truth.
    samples: [B] whether the row's last query token(s) yield tokens (false in mid-prefill). A
        sampling row has 1 + num_drafts verification rows.
    bounds_are_exact: whether num_computed_bound is what the device holds.
    known_tokens: [B] the token that a decoding row had last, -1 for other rows; None where every
        stage has sampled it itself.
    is_one_each: whether it is known that every row has one token, no draft, and samples.
    has_embeds: whether some of its query tokens may be embeddings of prompts.
    finished, preempted: rows freed since the last plan, sorted.
    state_saves: of scheduled rows; their blocks are nobody else's in this step.
    offloads: copies of preempted rows' blocks to host pages, before anything is written to a block.
    """

    step: int
    refs: list[SlotRef]
    num_scheduled_tokens: Int32Array
    num_drafts: Int32Array
    num_computed_bound: Int32Array
    samples: npt.NDArray[np.bool_]
    bounds_are_exact: bool = True
    is_one_each: bool = False
    known_tokens: Int32Array | None = None
    has_embeds: bool = False
    new_rows: list[NewRow] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    finished: list[SlotRef] = field(default_factory=list)
    preempted: list[SlotRef] = field(default_factory=list)
    state_saves: list[StateSave] = field(default_factory=list)
    offloads: PageCopies = NO_COPIES

    @property
    def num_rows(self) -> int:
        return len(self.refs)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


# Nothing happens in it.
EMPTY_PLAN = StepPlan(
    step=-1,
    refs=[],
    num_scheduled_tokens=np.zeros(0, np.int32),
    num_drafts=np.zeros(0, np.int32),
    num_computed_bound=np.zeros(0, np.int32),
    samples=np.zeros(0, np.bool_),
)


@dataclass(slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of sampled or of prompt tokens; N rows, row-major by batch row.

    offsets: [B + 1], the rows of batch row b are offsets[b]:offsets[b + 1].
    token_logprobs: [N], of the token itself; ranks: [N], 1 = most likely.
    top_ids, top_logprobs: [N, W], the W most likely tokens, sorted; W is the step's largest need.
    """

    offsets: Int32Array
    token_logprobs: Float32Array
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step yielded, rows as in its plan.

    token_ids: [B, 1 + K]; the first num_sampled[b] of a row are valid.
    num_sampled: [B], 0 in mid-prefill. status: [B], OK or a reason from the list above.
    num_proposed: [B], drafts that the row has for its next step, or None: K each.
    prompt_logprobs: of asking rows, whose first query token is at position p: p + 1 and on.
    pooled: batch row -> float32 of a pooling request's row: [D] when its last token was computed;
        for a task of tokens [t, D] in each step, of the t query tokens that its method takes.
    failed: rows that could not be added or run, with the exception; their other fields are void.
    """

    step: int
    token_ids: Int32Array
    num_sampled: Int32Array
    status: Int32Array
    logprobs: LogprobRows | None = None
    num_proposed: Int32Array | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: dict[int, Float32Array] = field(default_factory=dict)
    failed: dict[SlotRef, Exception] = field(default_factory=dict)
