"""A sampler with rows of its own, fed with given logits."""

from __future__ import annotations

import numpy as np
import torch
from support.batch import BatchRig

from pelton.config.params import SamplingParams
from pelton.core.plan import NewRow, SlotRef
from pelton.device.cpu import CPUDevice
from pelton.ops.lm_head_sample import reference as lm_head_sample
from pelton.ops.step_tensors import NEXT_TOKENS
from pelton.sampling.rows import SamplingRows
from pelton.sampling.sampler import SampleOutput, Sampler

NUM_SLOTS = 100
VOCAB = 1031
MAX_LEN = 64
POISON = -7


class GivenLogits:
    """A LogitsSource without a head."""

    def __init__(self, logits):
        self._logits = logits

    def logits(self):
        return self._logits

    def draw(self, rows, out_ids, out_status):
        lm_head_sample.draw(self._logits, rows, out_ids, out_status)


class Bench:
    """Rows, a sampler and its output on one device."""

    def __init__(self, device=None, vocab=VOCAB, tile_elements=None, max_logprobs=20, num_drafts=0):
        self.device = CPUDevice() if device is None else device
        rig = BatchRig(
            self.device,
            max_num_seqs=NUM_SLOTS,
            max_model_len=MAX_LEN,
            num_drafts=num_drafts,
            declare=lambda rig: SamplingRows(
                rig.staging, num_rows=NUM_SLOTS, vocab_size=vocab, max_logprobs=max_logprobs
            ),
        )
        self.staging, self.rows, self.state_rows = rig.staging, rig.extra, rig.rows
        self.state = rig.row_tensors
        self.sampler = Sampler(self.rows, self.state, tile_elements=tile_elements)
        self.out = SampleOutput.allocate(self.device, NUM_SLOTS, max_logprobs)
        self.plan = None

    def add(self, slot, seed=0, prompt_len=4, eos=(2,), tokens=None, **params):
        """tokens: prompt and output; None: a prompt of some tokens."""
        row = NewRow(
            ref=SlotRef(slot, 0),
            request_id=str(slot),
            token_ids=np.array(range(prompt_len) if tokens is None else tokens, np.int32),
            prompt_len=prompt_len,
            num_computed_tokens=0,
            block_ids=(),
            params=SamplingParams(**{"max_tokens": 1000, **params}),
            seed=seed,
            eos_token_ids=eos,
        )
        self.state_rows.add(row)
        self.rows.add_request(row)

    def draft(self, slot, drafts):
        """Give a row its drafts, as a speculator does: on the device."""
        step = self.staging.begin()
        self.staging.flush(step)
        step.release()
        target = self.state.fields[slot, NEXT_TOKENS + 1 :][: len(drafts)]
        self.device.launch(torch.Tensor.copy_, target, torch.tensor(drafts, dtype=torch.int32))

    def run(self, logits, slots, positions):
        """-> token ids and status of the rows, as lists; checks that the others are untouched."""
        step = self.staging.begin()
        self.staging.flush(step)
        fields = [getattr(self.out, name) for name in SampleOutput.__slots__]
        for field in fields:
            self.device.launch(torch.Tensor.fill_, field, POISON)
        self.plan = self.sampler.plan(np.array(slots, np.int32), np.array(positions, np.int32))
        before = logits.clone()
        self.device.launch(
            self.sampler.run,
            self.plan,
            GivenLogits(logits),
            torch.tensor(slots),
            torch.tensor(positions, dtype=torch.int32),
            self.out,
        )
        host = [self.device.host_buffer(tuple(f.shape), f.dtype) for f in fields]
        for target, source in zip(host, fields):
            self.device.copy_to_host(target, source)
        step.release()
        self.device.synchronize()
        assert torch.equal(logits.nan_to_num(5e4), before.nan_to_num(5e4)), "logits were changed"
        self.host = SampleOutput(*host)
        assert all((field[len(slots) :] == POISON).all() for field in host)
        return (
            self.host.token_ids[: len(slots)].tolist(),
            self.host.status[: len(slots)].tolist(),
        )


def edited(logits, tokens, prompt_len, params, end_ids=(2,)):
    """One row's logits before the temperature, in float64 on NumPy. tokens: all before the draw."""
    x = logits.double().numpy().copy()
    outputs = tokens[prompt_len:]
    if params.allowed_token_ids is not None:
        kept = list(params.allowed_token_ids)
        mask = np.full(len(x), -np.inf)
        mask[kept] = 0
        x = x + mask
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(tokens) < prompt_len + params.min_tokens:
        x[list(end_ids)] = -np.inf
    for token in set(tokens):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(outputs):
        x[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    for word in params.bad_words_token_ids:
        before = list(word[:-1])
        if len(outputs) >= len(before) and outputs[len(outputs) - len(before) :] == before:
            x[word[-1]] = -np.inf
    for name, arguments in params.processors.items():
        if name == "halve_and_shift":
            x = x * 0.5 + arguments.get("shift", 0.0) * np.arange(len(x))
        elif name == "ban_best":
            x[np.argmax(x)] = -np.inf
        elif name == "ban_seen":
            x[outputs if arguments.get("outputs_only", True) else tokens] = -np.inf
    return x
