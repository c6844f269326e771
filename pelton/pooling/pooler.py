"""Who is pooled how, and a step's work for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.config.pooling import NEEDS_TOKEN_IDS, PoolingConfig
from pelton.core.plan import NewRow, SlotRef
from pelton.device.protocol import Device
from pelton.models.protocol import Model
from pelton.pooling.heads import HeadKey, Heads, head_key
from pelton.pooling.methods import Chunk, Method, load_methods


@dataclass(frozen=True, slots=True)
class Group:
    """Chunks that share a method and a head.

    first, last: of the step's gathered hidden states. start: of its values among all; num_rows of
    `width` numbers.
    """

    method: Method
    key: HeadKey
    chunks: Sequence[Chunk]
    first: int
    last: int
    start: int
    num_rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch row's values lie. num_rows: None for a single vector."""

    row: int
    start: int
    num_rows: int | None
    width: int


@dataclass(frozen=True, slots=True)
class PoolingWork:
    """ranges: of the step's tokens, gathered one after the other. num_values: of all groups."""

    ranges: Sequence[tuple[int, int]]
    groups: Sequence[Group]
    places: Sequence[Place]
    num_values: int


class Pooler(StepParticipant):
    """Rows of any tasks and methods, in one step.

    Args:
        num_rows: slots, the reserved one included. max_tokens: of a step.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        config: PoolingConfig,
        *,
        num_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> None:
        hidden_size = model.config.hidden_size
        self._model = model
        self._heads = Heads(device, model, config, batch_invariant=batch_invariant)
        self._methods = load_methods(device, num_rows, hidden_size, batch_invariant=batch_invariant)
        self._rows: dict[int, NewRow] = {}
        self._normed = device.empty((max_tokens, hidden_size), dtype)

    def add_request(self, row: NewRow) -> None:
        """A synthetic row may ask for nothing."""
        self._rows.pop(row.ref.slot, None)
        if row.pooling is not None:
            self._rows[row.ref.slot] = row

    def remove_request(self, ref: SlotRef) -> None:
        self._rows.pop(ref.slot, None)

    def plan(self, batch: InputBatch) -> PoolingWork:
        """What is to be done of a step, on the host."""
        ends = batch.query_len_np.cumsum().tolist()
        counts = batch.query_len_np.tolist()
        # No draft is ever in flight, so that the bound is exact.
        positions = batch.computed_bound_np.tolist()
        by_head: dict[tuple[str, HeadKey], list[Chunk]] = {}
        for index, slot in enumerate(batch.slots_np.tolist()):
            row = self._rows.get(slot)
            if row is None:
                continue
            params = row.pooling
            assert params is not None
            assert params.method is not None
            needs_ids = NEEDS_TOKEN_IDS in self._methods[params.method].needs
            chunk = Chunk(
                row=index,
                slot=slot,
                first=ends[index] - counts[index],
                last=ends[index],
                position=positions[index],
                prompt_len=row.prompt_len,
                params=params,
                token_ids=row.token_ids if needs_ids else None,
            )
            by_head.setdefault((params.method, head_key(params)), []).append(chunk)
        return self._lay_out(by_head)

    def _lay_out(self, by_head: dict[tuple[str, HeadKey], list[Chunk]]) -> PoolingWork:
        ranges: list[tuple[int, int]] = []
        groups: list[Group] = []
        places: list[Place] = []
        gathered = start = 0
        for (name, key), chunks in by_head.items():
            method, width = self._methods[name], self._heads.width(key)
            wanted = [one for chunk in chunks for one in method.wanted(chunk)]
            ranges += wanted
            first, at = gathered, start
            gathered += sum(last - first for first, last in wanted)
            for chunk in chunks:
                count = method.num_features(chunk)
                if count or method.is_per_token:
                    places.append(
                        Place(chunk.row, at, count if method.is_per_token else None, width)
                    )
                at += count * width
            groups.append(
                Group(method, key, chunks, first, gathered, start, (at - start) // width, width)
            )
            start = at
        return PoolingWork(ranges, groups, places, start)

    def run(self, work: PoolingWork, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """The kernel. hidden: [T, H] behind the last layer; out: [num_values] float32."""
        normed = self._normed[: 0 if not work.groups else work.groups[-1].last]
        if len(normed):
            self._model.final(_gathered(hidden, work.ranges), normed)
        for group in work.groups:
            states = normed[group.first : group.last].float()
            features = group.method.features(states, group.chunks)
            if group.num_rows:
                end = group.start + group.num_rows * group.width
                values = self._heads.run(group.key, features)
                out[group.start : end].view(group.num_rows, group.width).copy_(values)


def _gathered(hidden: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows of hidden, by views: an index would have to travel to the device."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    pieces = [hidden[first:last] for first, last in joined]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
