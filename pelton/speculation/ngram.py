"""Drafts from the request's own text: what followed when its last tokens stood there before."""

from __future__ import annotations

import torch

from pelton.config.engine import EngineConfig
from pelton.device.protocol import Device
from pelton.ops.step_kernels import step_kernel
from pelton.speculation.protocol import SampledStep, SpeculatorNeeds


class NgramSpeculator:
    """Prompt lookup: no weights, no KV; a text without repetition costs no verification."""

    needs = SpeculatorNeeds(draft_counts=True)

    def __init__(self, device: Device, config: EngineConfig) -> None:
        self._device = device
        self._ngram_propose = step_kernel("ngram_propose", device.torch_device.type)
        self._min = config.speculation.prompt_lookup_min
        self._max = config.speculation.prompt_lookup_max

    def propose(self, step: SampledStep, drafts: torch.Tensor) -> None:
        # A row knows at most one token more than have keys and values.
        longest = int(step.batch.seq_len_bound_np.max(initial=0))
        width = min(longest + 1, step.rows.tokens.shape[1])
        self._device.launch(
            self._ngram_propose, step.rows, step.batch.step, drafts, self._min, self._max, width
        )
