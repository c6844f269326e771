"""Speculators for tests, put into the engine through speculation/table.py."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from pelton.config.engine import EngineConfig
from pelton.config.speculation import SpeculationConfig
from pelton.device.protocol import Device
from pelton.speculation.protocol import SampledStep, SpeculatorNeeds

VOCAB = 12
INT32 = np.iinfo(np.int32)


def ngram_drafts(count: int) -> SpeculationConfig:
    """So many drafts a step of one to three last tokens; none for 0."""
    if count == 0:
        return SpeculationConfig()
    return SpeculationConfig(
        method="ngram", num_speculative_tokens=count, prompt_lookup_min=1, prompt_lookup_max=3
    )


class ScriptedDrafter:
    """Knows every answer in advance, and proposes what its mode says.

    answers: the full token sequences that requests will have; mode: a name from MODES.
    """

    needs = SpeculatorNeeds()
    answers: ClassVar[list[list[int]]] = []
    mode = "right"
    MODES = ("right", "wrong", "random", "outside", "some", "none")

    def __init__(self, device: Device, config: EngineConfig) -> None:
        self._device = device
        self._rng = np.random.default_rng(0)

    def propose(self, step: SampledStep, drafts: torch.Tensor) -> None:
        self._device.launch(self._write, step, drafts)

    def _write(self, step: SampledStep, drafts: torch.Tensor) -> None:
        """On the device."""
        num_drafts = drafts.shape[1]
        for b, slot in enumerate(step.batch.step.idx_mapping.tolist()):
            total = int(step.rows.fields[slot, 2])
            known = step.rows.tokens[slot, :total].tolist()
            follow = next((a[total:] for a in self.answers if a[:total] == known), [])
            # Behind the answer's end, and for padding rows, anything: it must do no harm.
            right = np.array([*follow, *self._rng.integers(0, VOCAB, num_drafts)][:num_drafts])
            drafts[b] = torch.from_numpy(self._proposal(right).astype(np.int32))

    def _proposal(self, right: np.ndarray) -> np.ndarray:
        rng, n = self._rng, len(right)
        if self.mode == "right":
            return right
        if self.mode == "wrong":
            return (right + 1) % VOCAB
        if self.mode == "random":
            return rng.integers(0, VOCAB, n)
        if self.mode == "outside":
            return rng.choice([VOCAB, VOCAB + 1, INT32.max, INT32.min, -1, -7], n)
        if self.mode == "none":
            return np.full(n, -1)
        junk = rng.choice([VOCAB, INT32.max, INT32.min, -1, 0, VOCAB - 1], n)
        return np.where(rng.random(n) < 0.7, right, junk)


class CountingDrafter(ScriptedDrafter):
    """The same, and each result waits for the number of its drafts."""

    needs = SpeculatorNeeds(draft_counts=True)
