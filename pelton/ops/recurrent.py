"""What the ops of recurrent layers (causal_conv, selective_scan) share: a step and its states.

There are two kinds of kernels. Those in Triton read lengths on the device and find states by
themselves, so that a recorded step holds them. All others work on groups of rows of one length,
which the host knows, and on what `prepare` makes.

States lie in rings, [rows of state, ring, *shape]; batch/recurrent_states.py says where which.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pelton.core.plan import Int32Array

# Elements below which torch does not cut an elementwise call for its threads.
_UNCUT = 32768


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows first_row : first_row + num_rows of a batch, with query_len tokens each, which are
    tokens first_token : first_token + num_rows * query_len. may_be_fresh: some row may begin."""

    first_row: int
    num_rows: int
    first_token: int
    query_len: int
    may_be_fresh: bool = True

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_rows * self.query_len)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The group's part of [T, X], a view: [num_rows, query_len, X]."""
        return torch.unflatten(tensor[self.tokens], 0, (self.num_rows, self.query_len))


@dataclass(slots=True, kw_only=True)
class RecurrentMetadata:
    """A batch, as recurrent layers see it.

    Device: idx_mapping [B], query_start_loc [B + 1], seq_lens [B] int32. Host: ring, states per
    row; max_query_len, a bound of the step's shape; is_single, every token is a row of its own, in
    order, padding included. Host, not for kernels in Triton: the live rows, in groups, and
    num_tokens that are live.
    Filled by `prepare`, once per step: reads [B] int64, ring index (slot * ring + ...) of the state
    before a row's first token; is_fresh [B] bool, the row has none: it is zero; writes [B, ring]
    int64, column j: ring index of the state after the row's last token but j. Live rows alone are
    ever written, and of a row no more columns than it has tokens.
    """

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    ring: int
    max_query_len: int
    is_single: bool
    groups: tuple[RowGroup, ...]
    num_tokens: int
    reads: torch.Tensor = field(init=False)
    is_fresh: torch.Tensor = field(init=False)
    writes: torch.Tensor = field(init=False)


class RecurrentSignature(Protocol):
    """What the signatures of these ops have in common."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device_type(self) -> str: ...


def takes_triton(signature: RecurrentSignature) -> str | None:
    """Of a candidate in Triton."""
    return _why_not_triton(signature.dtype, signature.device_type)


def needs_lengths(dtype: torch.dtype, device_type: str) -> bool:
    """Whether the kernels of recurrent layers need rows' lengths on the host: all but Triton's."""
    return _why_not_triton(dtype, device_type) is not None


def _why_not_triton(dtype: torch.dtype, device_type: str) -> str | None:
    if device_type != "cuda":
        return "for a GPU"
    if dtype == torch.float64:
        return "counts in float32"
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def prepare(meta: RecurrentMetadata) -> None:
    """Runs on the device."""
    first = meta.idx_mapping.long() * meta.ring
    start = meta.seq_lens - meta.query_start_loc.diff()
    meta.is_fresh = start == 0
    meta.reads = first + (start - 1) % meta.ring
    from_end = torch.arange(1, meta.ring + 1, device=first.device)
    meta.writes = first[:, None] + (meta.seq_lens[:, None] - from_end) % meta.ring


def row_groups(query_lens: Int32Array, computed_bounds: Int32Array) -> tuple[RowGroup, ...]:
    """Neighbouring rows of equal query length together; rows without tokens are left out.

    computed_bounds: of tokens before the step, never too low, and 0 for rows that begin alone.
    """
    groups: list[RowGroup] = []
    token = 0
    first = 0
    for row, query_len in enumerate(query_lens.tolist()):
        last = row + 1 == len(query_lens) or query_lens[row + 1] != query_len
        if last:
            count = row + 1 - first
            if query_len:
                begins = bool((computed_bounds[first : row + 1] == 0).any())
                groups.append(RowGroup(first, count, token, query_len, begins))
            token += count * query_len
            first = row + 1
    return tuple(groups)


def read_states(states: torch.Tensor, meta: RecurrentMetadata, group: RowGroup) -> torch.Tensor:
    """[rows of the group, *shape]: a copy of the states before the group's tokens."""
    found = _flat(states).index_select(0, meta.reads[group.rows])
    if not group.may_be_fresh:
        return found
    # What lies in a fresh row's ring may be anything, NaN too: it is replaced, not multiplied.
    fresh = meta.is_fresh[group.rows].view(-1, *[1] * (found.dim() - 1))
    return found.masked_fill_(fresh, 0)


def write_states(
    states: torch.Tensor, meta: RecurrentMetadata, group: RowGroup, from_end: int, new: torch.Tensor
) -> None:
    """new: [rows of the group, *shape], the states after each row's last token but `from_end`."""
    _flat(states).index_copy_(0, meta.writes[group.rows, from_end], new.to(states.dtype))


def _flat(states: torch.Tensor) -> torch.Tensor:
    return states.view(-1, *states.shape[2:])


def each_row_alone(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """function(x) of an elementwise `function`, where a row's bits depend on that row alone.

    x: [T, X]. torch runs vector instructions over a contiguous tensor and scalar ones over what is
    left at its end, and for exp and its kin the two differ in last bits. Rows with a gap between
    them are each their own loop, and few enough of them are not cut for threads.
    """
    num_rows, width = x.shape
    apart = x.new_empty((num_rows, width + 1))[:, :width]
    apart.copy_(x)
    step = max((_UNCUT - 1) // max(width, 1), 1)
    pieces = [function(apart[i : i + step]) for i in range(0, max(num_rows, 1), step)]
    return torch.cat(pieces)
