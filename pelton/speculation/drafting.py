"""What happens between a step's sampling and the next step's verification."""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from pelton.config.engine import EngineConfig
from pelton.device.protocol import Device, Event
from pelton.ops.step_kernels import step_kernel
from pelton.speculation.protocol import SampledStep, Speculator
from pelton.speculation.table import SPECULATORS


class Drafting(Protocol):
    """counts_drafts: whether `run` tells the host how many drafts each row has."""

    counts_drafts: bool

    def run(self, step: SampledStep, sampled: Event, counts: torch.Tensor) -> Event:
        """Queue proposals for the step's rows; `sampled` has passed when its tokens are on the
        host. counts: [live rows] int32 host memory. Returns the event of the step's result."""
        ...


class NoDrafting:
    """Without speculation."""

    counts_drafts = False

    def run(self, step: SampledStep, sampled: Event, counts: torch.Tensor) -> Event:
        return sampled


class DraftStore:
    """A speculator's proposals, made safe, as the rows' drafts."""

    def __init__(self, device: Device, speculator: Speculator, config: EngineConfig) -> None:
        self._device = device
        self._store_drafts = step_kernel("store_drafts", device.torch_device.type)
        self._speculator = speculator
        self._vocab_size = config.model.vocab_size
        max_rows, num_drafts = config.scheduler.max_num_seqs, config.num_speculative_tokens
        self._drafts = device.zeros((max_rows, num_drafts), torch.int32)
        self._counts = device.zeros((max_rows,), torch.int32)
        self.counts_drafts = speculator.needs.draft_counts

    def run(self, step: SampledStep, sampled: Event, counts: torch.Tensor) -> Event:
        num_rows = step.batch.descriptor.num_rows
        drafts, proposed = self._drafts[:num_rows], self._counts[:num_rows]
        self._speculator.propose(step, drafts)
        self._device.launch(
            self._store_drafts,
            step.rows,
            step.batch.step,
            step.num_sampled,
            drafts,
            self._vocab_size,
            proposed,
        )
        if not self.counts_drafts:
            return sampled
        self._device.deliver(counts, proposed[: len(counts)])
        return self._device.record_event()


def make_drafting(device: Device, config: EngineConfig) -> Drafting:
    """What the configuration names."""
    if config.num_speculative_tokens == 0:
        return NoDrafting()
    module, name = SPECULATORS[config.speculation.method].split(":")
    speculator = getattr(importlib.import_module(module), name)(device, config)
    return DraftStore(device, speculator, config)
