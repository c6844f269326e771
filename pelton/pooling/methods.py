"""Which hidden states a prompt is pooled from, as streams over its chunks.

A method sees a prompt chunk by chunk and keeps what it must remember by the request's row, so any
chunking gives the same result. What it needs of a request beside hidden states, it declares.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pelton.config.pooling import NEEDS_TOKEN_IDS, MethodFacts, PoolingParams
from pelton.core.plan import Int32Array
from pelton.device.protocol import Device
from pelton.ops.step_kernels import step_kernel
from pelton.pooling.table import METHODS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a step computes of one prompt.

    row: in the batch. slot: of the request. first, last: its tokens in the step, half-open.
    position: of the first of them in the prompt, which has prompt_len tokens. token_ids:
    [prompt_len], for a method that has declared that it needs them, else None.
    """

    row: int
    slot: int
    first: int
    last: int
    position: int
    prompt_len: int
    params: PoolingParams
    token_ids: Int32Array | None

    @property
    def ends(self) -> bool:
        """Whether the prompt's last token is here."""
        return self.position + self.last - self.first == self.prompt_len


class Method:
    """One way to pool; an object of it serves all rows.

    is_per_token: whether its result has a row for each token it takes. needs: of a request.
    """

    is_per_token: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, device: Device, num_rows: int, hidden_size: int, *, batch_invariant: bool
    ) -> None:
        """num_rows: slots, the reserved one included. batch_invariant: whether results are to have
        the same bits however prompts are cut and batched."""

    def wanted(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Half-open ranges of the step's tokens whose hidden states it takes; on the host."""
        raise NotImplementedError

    def num_features(self, chunk: Chunk) -> int:
        """Rows that `features` gives of the chunk; on the host."""
        raise NotImplementedError

    def features(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        """On the device. hidden: [n, H] float32, what the chunks want, one after the other ->
        [m, H] float32, their features likewise."""
        raise NotImplementedError


class Last(Method):
    """The last token's hidden state."""

    def wanted(self, chunk: Chunk) -> list[tuple[int, int]]:
        return [(chunk.last - 1, chunk.last)] if chunk.ends else []

    def num_features(self, chunk: Chunk) -> int:
        return int(chunk.ends)

    def features(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        return hidden


class Cls(Method):
    """The first token's hidden state, kept until the prompt has ended."""

    def __init__(
        self, device: Device, num_rows: int, hidden_size: int, *, batch_invariant: bool
    ) -> None:
        self._kept = device.zeros((num_rows, hidden_size), torch.float32)

    def wanted(self, chunk: Chunk) -> list[tuple[int, int]]:
        return [(chunk.first, chunk.first + 1)] if chunk.position == 0 else []

    def num_features(self, chunk: Chunk) -> int:
        return int(chunk.ends)

    def features(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        begun = [chunk.slot for chunk in chunks if chunk.position == 0]
        for index, slot in enumerate(begun):
            self._kept[slot].copy_(hidden[index])
        return _rows(self._kept, [chunk.slot for chunk in chunks if chunk.ends])


class Mean(Method):
    """The mean of all tokens' hidden states: a running sum in float32; where bits matter, token
    after token."""

    def __init__(
        self, device: Device, num_rows: int, hidden_size: int, *, batch_invariant: bool
    ) -> None:
        self._sums = device.zeros((num_rows, hidden_size), torch.float32)
        kind = device.torch_device.type
        # On a CPU, a sum in torch's own order takes a tenth of the time.
        is_any = kind == "cpu" and not batch_invariant
        self._add_rows = _add_sum if is_any else step_kernel("add_rows", kind)

    def wanted(self, chunk: Chunk) -> list[tuple[int, int]]:
        return [(chunk.first, chunk.last)]

    def num_features(self, chunk: Chunk) -> int:
        return int(chunk.ends)

    def features(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        first = 0
        for chunk in chunks:
            last = first + chunk.last - chunk.first
            total = self._sums[chunk.slot]
            if chunk.position == 0:
                total.zero_()
            self._add_rows(hidden[first:last], total)
            if chunk.ends:
                total.div_(chunk.prompt_len)
            first = last
        return _rows(self._sums, [chunk.slot for chunk in chunks if chunk.ends])


class All(Method):
    """Every token's hidden state."""

    is_per_token = True

    def wanted(self, chunk: Chunk) -> list[tuple[int, int]]:
        return [(chunk.first, chunk.last)]

    def num_features(self, chunk: Chunk) -> int:
        return chunk.last - chunk.first

    def features(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        return hidden


class Step(Method):
    """The hidden states where the prompt has the token step_tag_id."""

    is_per_token = True
    needs = (NEEDS_TOKEN_IDS,)

    def wanted(self, chunk: Chunk) -> list[tuple[int, int]]:
        return [(chunk.first + int(at), chunk.first + int(at) + 1) for at in _tags(chunk)]

    def num_features(self, chunk: Chunk) -> int:
        return len(_tags(chunk))

    def features(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        return hidden


def _tags(chunk: Chunk) -> np.ndarray:
    """Where the chunk's tokens are the tag, from its first on."""
    assert chunk.token_ids is not None
    end = chunk.position + chunk.last - chunk.first
    return np.flatnonzero(chunk.token_ids[chunk.position : end] == chunk.params.step_tag_id)


def _add_sum(x: torch.Tensor, total: torch.Tensor) -> None:
    """As ops/add_rows, in any order."""
    total.add_(x.sum(dim=0))


def _rows(table: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """[len(slots), H], by views: an index would have to travel to the device."""
    if not slots:
        return table[:0]
    return torch.cat([table[slot : slot + 1] for slot in slots])


def load_methods(
    device: Device, num_rows: int, hidden_size: int, *, batch_invariant: bool
) -> dict[str, Method]:
    """One object of each method in the table."""
    return {
        name: method_class(target)(device, num_rows, hidden_size, batch_invariant=batch_invariant)
        for name, target in METHODS.items()
    }


def method_class(target: str) -> type[Method]:
    module, name = target.split(":")
    found: type[Method] = getattr(importlib.import_module(module), name)
    return found


def method_facts() -> tuple[MethodFacts, ...]:
    """What a front end must know of the methods in the table."""
    found = {name: method_class(target) for name, target in METHODS.items()}
    return tuple(
        MethodFacts(name, method.is_per_token, method.needs) for name, method in found.items()
    )
