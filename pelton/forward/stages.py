"""Which layers this rank runs, where their input comes from and where their output goes."""

from __future__ import annotations

from typing import Protocol

import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.prompt_embeds import PromptEmbedRows
from pelton.device.protocol import Device
from pelton.layers.context import StepContext
from pelton.models.protocol import Model


class Link(Protocol):
    """Between two neighbouring stages."""

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """hidden: [T, H]; queued."""
        ...

    def receive_hidden(self, hidden: torch.Tensor) -> None:
        """Fill [T, H]; queued."""
        ...


class Stage(Protocol):
    """lo, hi: layers of this stage, half-open; passes_on: whether another stage follows."""

    lo: int
    hi: int
    passes_on: bool

    def begin(self, batch: InputBatch, ctx: StepContext) -> None:
        """Queue whatever fills ctx.buffers.hidden."""
        ...

    def end(self, ctx: StepContext) -> None:
        """Queue what happens to ctx.buffers.hidden after the last layer of the stage."""
        ...


class WholeModel:
    """One stage: all layers."""

    passes_on = False

    def __init__(self, device: Device, model: Model, embeds: PromptEmbedRows) -> None:
        self._device = device
        self._model = model
        self._embeds = embeds
        self.lo, self.hi = 0, model.num_layers

    def begin(self, batch: InputBatch, ctx: StepContext) -> None:
        self._device.launch(
            self._model.embed,
            batch.inputs.input_ids,
            ctx.buffers.hidden,
            ctx.communicator,
            self._embeds.lay_over(batch),
        )

    def end(self, ctx: StepContext) -> None:
        return None


class FirstStage(WholeModel):
    """Layers 0:hi, then on to the next stage."""

    passes_on = True

    def __init__(
        self, device: Device, model: Model, embeds: PromptEmbedRows, hi: int, following: Link
    ) -> None:
        super().__init__(device, model, embeds)
        self.hi = hi
        self._following = following

    def end(self, ctx: StepContext) -> None:
        self._following.send_hidden(ctx.buffers.hidden)


class LaterStage:
    """Layers lo:hi on the previous stage's hidden states; `following` None = the last stage."""

    def __init__(self, lo: int, hi: int, previous: Link, following: Link | None = None) -> None:
        self.lo, self.hi = lo, hi
        self.passes_on = following is not None
        self._previous = previous
        self._following = following

    def begin(self, batch: InputBatch, ctx: StepContext) -> None:
        self._previous.receive_hidden(ctx.buffers.hidden)

    def end(self, ctx: StepContext) -> None:
        if self._following is not None:
            self._following.send_hidden(ctx.buffers.hidden)


class LocalLink:
    """Two stages in one process and on one device: a buffer between them."""

    def __init__(
        self,
        device: Device,
        *,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._hidden = device.zeros((max_tokens, hidden_size), dtype)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self._device.launch(torch.Tensor.copy_, self._hidden[: len(hidden)], hidden)

    def receive_hidden(self, hidden: torch.Tensor) -> None:
        self._device.launch(torch.Tensor.copy_, hidden, self._hidden[: len(hidden)])
