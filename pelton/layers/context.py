"""What a layer needs beside its weights. Two lifetimes: the build, and one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from pelton.attention.backend import AttentionBackend
from pelton.batch.recurrent_states import RecurrentStates
from pelton.ops.bidirectional_attention import BidirectionalMetadata
from pelton.ops.paged_attention import AttentionMetadata
from pelton.ops.recurrent import RecurrentMetadata


class Communicator(Protocol):
    """The ranks that share each layer (tensor parallel)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        ...

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """tensor: [...] of each rank -> out: [size, ...], contiguous, in the order of the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """No others: nothing to do."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        return None

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out[0].copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """How layers are built: where, in what type, as which rank, with which kernels.

    kv_codes: what keys and values are quantised to, or None. layers: those of this pipeline stage;
    None: all. is_elsewhere: another stage holds what is built, which is a shape without memory here
    (torch's device "meta"), and is never bound.
    """

    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend
    kv_codes: torch.dtype | None = None
    batch_invariant: bool = False
    rank: int = 0
    size: int = 1
    layers: range | None = None
    is_elsewhere: bool = False

    def of_layer(self, index: int, num_layers: int) -> BuildContext:
        """For layer `index`; -1 is what stands before them all, num_layers what stands behind."""
        held = self.layers
        if held is None or min(max(index, 0), num_layers - 1) in held:
            return self
        return replace(self, is_elsewhere=True)

    def weight(self, *shape: int) -> torch.Tensor:
        """Memory for a weight; whoever loads it fills it."""
        device = torch.device("meta") if self.is_elsewhere else self.device
        return torch.empty(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Columns of the step buffers, the same for all layers of a model, on this rank; 0 for what no
    layer uses."""

    hidden: int
    qkv: int
    attention: int
    gate_up: int
    activation: int
    projected: int = 0
    convolved: int = 0
    scanned: int = 0
    partial: int = 0
    normed: int = 0


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Fixed device memory that a forward pass works in; each [tokens, its width].

    hidden: the residual stream. Layers overwrite the others in turn. projected, convolved, scanned:
    what recurrent layers make of it, one after the other. partial: a product that joins the
    residual stream by a step of its own; normed: that or the stream itself, normed.
    """

    hidden: torch.Tensor
    qkv: torch.Tensor
    attention: torch.Tensor
    gate_up: torch.Tensor
    activation: torch.Tensor
    projected: torch.Tensor
    convolved: torch.Tensor
    scanned: torch.Tensor
    partial: torch.Tensor
    normed: torch.Tensor

    def first(self, num_tokens: int) -> StepBuffers:
        """Views of the first num_tokens rows."""
        return StepBuffers(
            self.hidden[:num_tokens],
            self.qkv[:num_tokens],
            self.attention[:num_tokens],
            self.gate_up[:num_tokens],
            self.activation[:num_tokens],
            self.projected[:num_tokens],
            self.convolved[:num_tokens],
            self.scanned[:num_tokens],
            self.partial[:num_tokens],
            self.normed[:num_tokens],
        )


@dataclass(frozen=True, slots=True)
class RopeTensors:
    """Of this step's tokens: cos [T, 1, rotary_dim], sin [T, 1, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(slots=True, kw_only=True)
class StepContext:
    """`ctx`: one forward pass. ropes: one per rotary table of the model. Per layer: kv, its pool;
    metadata, that of its KV group, or that of all recurrent layers. states: of recurrent layers."""

    num_tokens: int
    buffers: StepBuffers
    ropes: Sequence[RopeTensors]
    metadata: Sequence[AttentionMetadata | RecurrentMetadata | BidirectionalMetadata]
    kv: Sequence[torch.Tensor]
    states: RecurrentStates
    communicator: Communicator = field(default_factory=OneRank)
