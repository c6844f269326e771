"""From logits to tokens: an ordered list of stages, each run only where a row needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pelton.core.plan import PROCESSOR_FAILED, Int32Array
from pelton.device.protocol import Device
from pelton.ops.lm_head_sample import DrawRows
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import RowTensors
from pelton.sampling.logits_source import LogitsSource
from pelton.sampling.row_lists import NO_LISTS
from pelton.sampling.rows import Need, SamplingRows
from pelton.sampling.stages.allowed_ids import allowed_ids
from pelton.sampling.stages.bad_words import bad_words
from pelton.sampling.stages.draw import draw
from pelton.sampling.stages.logit_bias import logit_bias
from pelton.sampling.stages.min_p import min_p
from pelton.sampling.stages.min_tokens import min_tokens
from pelton.sampling.stages.penalties import penalties
from pelton.sampling.stages.processors import processors
from pelton.sampling.stages.temperature import temperature
from pelton.sampling.stages.top_k_top_p import top_k_top_p
from pelton.sampling.tile import Span, Tile

ANY = Need(~0)
_LISTS = Need.ALLOWED_IDS | Need.LOGIT_BIAS | Need.BAD_WORDS
_HISTORY = Need.PENALTIES | Need.PROCESSORS

# The order can be observed, and is vLLM's. A bias adds before the repetition penalty scales; a
# processor sees what all of these left, and masks come before whatever weighs legal tokens; min_p,
# top-k and top-p work on what the temperature left.
STAGES: tuple[tuple[Need, Callable[[Tile], None]], ...] = (
    (Need.ALLOWED_IDS, allowed_ids),
    (Need.LOGIT_BIAS, logit_bias),
    (Need.MIN_TOKENS, min_tokens),
    (Need.PENALTIES, penalties),
    (Need.BAD_WORDS, bad_words),
    (Need.PROCESSORS, processors),
    (Need.RANDOM, temperature),
    (Need.MIN_P, min_p),
    (Need.TOP_K | Need.TOP_P, top_k_top_p),
    (ANY, draw),
)

# On a CPU about this many logits go through all stages at once, so that they stay in its cache.
_CPU_TILE = 1 << 18


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What the host knows of one step's sampling.

    is_plain: no row asks for more than a temperature: there are no spans then, and all is up to
        ops/lm_head_sample.
    spans: cover rows 0:N otherwise. logprob_spans: half-open ranges of rows that asked.
    logprob_width: the largest number of top log-probabilities that a row asked for.
    pool: the device's lists as this step finds them.
    """

    is_plain: bool
    spans: tuple[Span, ...]
    logprob_spans: tuple[tuple[int, int], ...]
    logprob_width: int
    pool: torch.Tensor = field(compare=False)


# Of a step that is sampled already.
NOTHING_PLANNED = SamplePlan(True, (), (), 0, torch.empty(0, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Device buffers for up to max_rows verification rows; rows from N on are not written.

    token_ids: [max_rows] int32, always in [0, V). status: [max_rows] int32, OK, NAN_LOGITS,
        ALL_MASKED or PROCESSOR_FAILED of core/plan.py; unless OK the id is a placeholder, 0.
    token_logprobs [max_rows] float32, ranks [max_rows] int32; top_ids int32 and top_logprobs
        float32, [max_rows, max_logprobs]: only rows in logprob_spans and the first logprob_width
        columns are written. Rank = 1 + number of larger logits.
    """

    token_ids: torch.Tensor
    status: torch.Tensor
    token_logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def allocate(cls, device: Device, max_rows: int, max_logprobs: int) -> SampleOutput:
        return cls(
            token_ids=device.zeros((max_rows,), torch.int32),
            status=device.zeros((max_rows,), torch.int32),
            token_logprobs=device.zeros((max_rows,), torch.float32),
            ranks=device.zeros((max_rows,), torch.int32),
            top_ids=device.zeros((max_rows, max_logprobs), torch.int32),
            top_logprobs=device.zeros((max_rows, max_logprobs), torch.float32),
        )


class Sampler:
    """One token per verification row.

    Args:
        state: row state, for the tokens that a row has so far.
        tile_elements: logits that go through the stages together; None: all rows at once. Tokens
            do not depend on it.
    """

    def __init__(self, rows: SamplingRows, state: RowTensors, *, tile_elements: int | None) -> None:
        self._rows = rows
        self._state = state
        self._max_tile_rows = (
            None if tile_elements is None else max(1, tile_elements // rows.vocab_size)
        )

    @classmethod
    def for_device(cls, device: Device, rows: SamplingRows, state: RowTensors) -> Sampler:
        """Cache-sized tiles on a CPU, and everything at once where launches are what costs."""
        on_cpu = device.torch_device.type == "cpu"
        return cls(rows, state, tile_elements=_CPU_TILE if on_cpu else None)

    def is_plain(self, slots: Int32Array) -> bool:
        """Whether the host has nothing to say about these rows: what is drawn follows from the
        device's row state alone."""
        return not self._rows.asks_more_np[slots].any()

    def plain_plan(self) -> SamplePlan:
        """Of any plain rows, padding included."""
        return SamplePlan(True, (), (), 0, self._rows.lists.pool.tensor)

    def plan(
        self, slots: Int32Array, max_positions: Int32Array, num_uncertain: int = 0
    ) -> SamplePlan:
        """Decide on the host which stages run for which rows.

        slots: [N], of each verification row.
        max_positions: [N], no position of `run` is more than this one, nor less by more than
            num_uncertain: 0 without drafts in flight, else how many of them may yet be rejected.
            Wider bounds cost time, wrong ones would let an end token through before min_tokens or
            hide a token from the penalties.
        """
        rows = self._rows
        pool = rows.lists.pool.tensor
        if not len(slots):
            return self.plain_plan()
        is_past_min = max_positions - num_uncertain + 1 >= rows.min_len_np[slots]
        needs = np.where(
            is_past_min, rows.needs_np[slots] & ~int(Need.MIN_TOKENS), rows.needs_np[slots]
        )
        num_logprobs = rows.num_logprobs_np[slots]
        width = int(num_logprobs.max())
        if width < 0 and not np.any(needs & ~int(Need.RANDOM)):
            return self.plain_plan()
        if self._max_tile_rows is None:
            ranges = [(0, len(slots))]
        else:
            ranges = _runs(needs, self._max_tile_rows, whole=0)
        spans = tuple(
            self._span(start, stop, needs[start:stop], slots[start:stop], max_positions[start:stop])
            for start, stop in ranges
        )
        if width < 0:
            return SamplePlan(False, spans, (), 0, pool)
        asks = (num_logprobs >= 0).astype(np.int32)
        asking = tuple(
            (start, stop)
            for start, stop in _runs(asks, self._max_tile_rows or len(slots))
            if asks[start]
        )
        return SamplePlan(False, spans, asking, width, pool)

    def _span(
        self,
        start: int,
        stop: int,
        needs: Int32Array,
        slots: Int32Array,
        max_positions: Int32Array,
    ) -> Span:
        rows = self._rows
        all_needs = Need(int(np.bitwise_or.reduce(needs)))
        looks_back = (needs & int(_HISTORY)) != 0
        return Span(
            start,
            stop,
            all_needs,
            int(rows.top_k_np[slots].max()),
            int(rows.num_stop_ids_np[slots].max()),
            rows.lists.sizes(slots) if all_needs & _LISTS else NO_LISTS,
            int(max_positions[looks_back].max()) + 1 if all_needs & _HISTORY else 0,
            tuple(
                (row, rows.processors[slot])
                for row, slot in enumerate(slots.tolist())
                if all_needs & Need.PROCESSORS and slot in rows.processors
            ),
        )

    def run(
        self,
        plan: SamplePlan,
        source: LogitsSource,
        slots: torch.Tensor,
        positions: torch.Tensor,
        out: SampleOutput,
    ) -> None:
        """The kernel: to be launched, never called by the host.

        source: of logits [N, V], which stay unchanged. slots: [N] int64, as in `plan`.
        positions: [N] int32, of each row's input token. The drawn token gets index position + 1,
            which is also what its noise is made of, together with the request's seed.
        """
        if plan.is_plain:
            rows = self._rows
            temperature, seeds = rows.temperature.tensor[:, 0], rows.seed.tensor[:, 0]
            of_rows = DrawRows(slots, positions, temperature, seeds)
            n = len(slots)
            source.draw(of_rows, out.token_ids[:n], out.status[:n])
            return
        logits = source.logits()
        for span in plan.spans:
            self._sample(span, plan.pool, logits, slots, positions, out)
        width = plan.logprob_width
        logprobs = step_kernel("logprobs", logits.device.type)
        for start, stop in plan.logprob_spans:
            logprobs(
                logits[start:stop],
                out.token_ids[start:stop],
                out.token_logprobs[start:stop],
                out.ranks[start:stop],
                out.top_ids[start:stop, :width],
                out.top_logprobs[start:stop, :width],
            )

    def _sample(
        self,
        span: Span,
        pool: torch.Tensor,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        out: SampleOutput,
    ) -> None:
        at = slice(span.start, span.stop)
        raw = logits[at]
        out_ids = out.token_ids[at]
        out_max = raw.new_empty(len(raw), dtype=torch.float32)
        failed_rows: list[int] = []
        if not span.needs:
            step_kernel("argmax", raw.device.type)(raw, out_ids, out_max)
            raw_max = out_max
        else:
            raw_max = raw.amax(-1).to(torch.float32)
            tile = Tile(
                span=span,
                rows=self._rows,
                state=self._state,
                pool=pool,
                slots=slots[at],
                positions=positions[at],
                scores=raw.to(torch.float32, copy=True),
                token_ids=None,
                out_ids=out_ids,
                out_max=out_max,
            )
            for needs, stage in STAGES:
                if span.needs & needs:
                    stage(tile)
            failed_rows = tile.failed_rows
        # The raw maximum too: a mask may have hidden a NaN.
        step_kernel("judge", raw.device.type)(raw_max, out_max, out_ids, out.status[at])
        for row in failed_rows:
            out.status[at][row] = PROCESSOR_FAILED
            out_ids[row] = 0


def _runs(
    values: npt.NDArray[np.int32], max_len: int, *, whole: int | None = None
) -> list[tuple[int, int]]:
    """Half-open ranges of equal values, cut to max_len unless the value is `whole`."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [
        (first, min(first + step, stop))
        for start, stop in pairwise(edges)
        for step in [stop - start if values[start] == whole else max_len]
        for first in range(start, stop, step)
    ]
