"""What a way of making drafts is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pelton.batch.input_batch import InputBatch
from pelton.ops.step_tensors import RowTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorNeeds:
    """What a speculator asks of the engine, as data. The token table and the last layer's output
    are always there, since drafts are made where tokens are drawn.

    draft_counts: often proposes fewer than K drafts. Each step's result then waits for the
        proposals and tells the host how many there are, and the next step verifies no more.
        Without it the host counts on K drafts, and a result does not wait.
    """

    draft_counts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """A step whose tokens are drawn and whose rows have advanced, on the device.

    hidden: [T, H] as executed, before the final norm. num_sampled: [B] int32, tokens that each row
    kept; 0 in mid-prefill.
    """

    batch: InputBatch
    rows: RowTensors
    hidden: torch.Tensor
    num_sampled: torch.Tensor


class Speculator(Protocol):
    """One per engine, from table.py. Its proposals may be anything at all: what cannot be verified
    is dropped (ops/store_drafts), and what is wrong is rejected (ops/verify)."""

    needs: SpeculatorNeeds

    def propose(self, step: SampledStep, drafts: torch.Tensor) -> None:
        """Queue kernels that write `drafts` [B, K] int32: what may follow each batch row's last
        known token, first to last; -1 from where nothing is proposed."""
        ...
