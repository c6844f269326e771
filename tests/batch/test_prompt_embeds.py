"""What a step lays over its token embeddings, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.batch import BatchRig, new_row, plan_of, read

from pelton.batch.prompt_embeds import PromptEmbedRows, nothing_over
from pelton.core.plan import NewRow, SlotRef, StepPlan
from pelton.core.prompt_embeds import STORED_AS, PromptEmbeds, placeholders
from pelton.device.fake import FakeDevice
from pelton.errors import RequestError

WIDTH = 8
BASE = -1.0


def numbered(first: int, count: int, dtype: str = "float32") -> PromptEmbeds:
    """Row i is full of first + i: small integers, the same in every dtype."""
    values = torch.arange(first, first + count).repeat_interleave(WIDTH).view(count, WIDTH)
    bits = values.to(getattr(torch, dtype)).view(
        {2: torch.int16, 4: torch.int32}[2 if "16" in dtype else 4]
    )
    return PromptEmbeds(bits.numpy().view(STORED_AS[dtype]), dtype)


class Rig:
    """A fake device, of which only the embeddings' part runs."""

    def __init__(self, dtype: str = "float32", *, is_enabled: bool = True) -> None:
        self.device = FakeDevice()
        self.dtype = dtype
        self.rig = BatchRig(self.device)
        self.embeds = PromptEmbedRows(
            self.device,
            is_enabled=is_enabled,
            max_tokens=64,
            hidden_size=WIDTH,
            dtype=getattr(torch, dtype),
        )

    def row(self, slot: int, ids: Sequence[int], embeds: PromptEmbeds | None = None) -> NewRow:
        row = new_row(slot, ids, [[1 + slot]])
        row.prompt_embeds = embeds
        self.embeds.add_request(row)
        return row

    def step(self, *rows: tuple[int, int, int]) -> list[float]:
        """rows: (slot, query length, computed). Per token of the step what stands there."""
        plan = plan_of([(slot, q, 0, True, computed) for slot, q, computed in rows])
        plan.has_embeds = True
        return self.run(plan)

    def run(self, plan: StepPlan) -> list[float]:
        staged = self.rig.staging.begin()
        batch = self.rig.builder.describe(plan, staged, lambda live: live)
        staged.release()
        self.embeds.before_forward(batch)
        hidden = self.device.zeros((batch.num_tokens + 3, WIDTH), getattr(torch, self.dtype))
        self.device.launch(torch.Tensor.fill_, hidden, BASE)
        # As it will be called: later, when the host has gone on to the next step.
        self.device.launch(self.embeds.lay_over(batch), hidden)
        wide = self.device.zeros(tuple(hidden.shape), torch.float32)
        self.device.launch(torch.Tensor.copy_, wide, hidden)
        found = read(self.device, wide)
        assert (found == found[:, :1]).all(), "whole rows"
        assert (found[batch.num_tokens :] == BASE).all(), "padding"
        return found[: batch.num_tokens, 0].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_chunk_behind_its_beginning_beside_others(dtype):
    """6 embeddings of which 2 are computed, 4 tokens of the row; a decode and a text beside it."""
    rig = Rig(dtype)
    rig.row(0, [5, 6, 7])
    rig.row(1, placeholders(np.ones(6, np.bool_)), numbered(10, 6, dtype))
    rig.row(2, [3, 4])
    assert rig.step((0, 1, 3), (2, 2, 0), (1, 4, 2)) == [BASE] * 3 + [12, 13, 14, 15]


def test_the_end_of_the_embeddings():
    """4 embeddings and a token id: the third token of the chunk keeps its own."""
    rig = Rig()
    rig.row(3, [-1, -2, -3, -4, 9], numbered(20, 4))
    assert rig.step((3, 3, 2)) == [22, 23, BASE]
    assert rig.step((3, 1, 5)) == [BASE]


def test_a_mix():
    rig = Rig()
    is_row = np.array([True, False, False, True, False])
    rig.row(3, np.where(is_row, placeholders(is_row), 9), numbered(20, 2))
    assert rig.step((3, 5, 0)) == [20, BASE, BASE, 21, BASE]


def test_token_by_token_and_the_host_lets_go_after_the_last():
    rig = Rig()
    rig.row(3, [-1, 8, -2, 9], numbered(20, 2))
    assert [rig.step((3, 1, at)) for at in range(3)] == [[20], [BASE], [21]]
    assert rig.embeds._to_come == {}


def test_a_slot_changes_hands():
    """To a text, while other embeddings are computed; and to embeddings after a text."""
    rig = Rig()
    rig.row(0, [-1, -2, -3, -4], numbered(30, 4))
    rig.row(1, [-1, -2, -3, -4, -5, -6], numbered(40, 6))
    assert rig.step((0, 2, 0), (1, 2, 0)) == [30, 31, 40, 41]
    rig.embeds.remove_request(SlotRef(0, 1))
    assert list(rig.embeds._to_come) == [1]
    rig.row(0, [7, 7, 7, 7])
    assert rig.step((0, 2, 0), (1, 2, 2)) == [BASE, BASE, 42, 43]
    rig.embeds.remove_request(SlotRef(0, 1))
    rig.row(0, [-1, 7, -2, 7], numbered(50, 2))
    assert rig.step((1, 2, 4), (0, 3, 0)) == [44, 45, 50, BASE, 51]


def test_host_memory_is_the_steps_own():
    """The next step is packed while the device has not read this one's."""
    rig = Rig()
    rig.row(0, [-1, -2, -3, -4], numbered(30, 4))
    late: list[Any] = []
    for at in (0, 2):
        plan = plan_of([(0, 2, 0, True, at)])
        plan.has_embeds = True
        staged = rig.rig.staging.begin()
        batch = rig.rig.builder.describe(plan, staged, lambda live: live)
        rig.embeds.before_forward(batch)
        hidden = rig.device.zeros((2, WIDTH), torch.float32)
        rig.device.launch(rig.embeds.lay_over(batch), hidden)
        staged.release()
        late.append(hidden)
    assert rig.device.num_done < 2
    assert [read(rig.device, hidden)[:, 0].tolist() for hidden in late] == [[30, 31], [32, 33]]


def test_a_step_without_embeddings_does_nothing():
    rig = Rig()
    rig.row(0, [-1, -2], numbered(30, 2))
    rig.row(1, [5, 5])
    assert rig.step((0, 2, 0)) == [30, 31]
    plan = plan_of([(1, 2, 0, True, 0)])
    staged = rig.rig.staging.begin()
    batch = rig.rig.builder.describe(plan, staged, lambda live: live)
    launches = rig.device.num_launches
    rig.embeds.before_forward(batch)
    assert rig.embeds.lay_over(batch) is nothing_over
    assert rig.device.num_launches == launches
    staged.release()


def test_what_does_not_fit_the_engine_is_refused():
    rig = Rig()
    with pytest.raises(RequestError, match="8 columns of float32, got 8 of bfloat16"):
        rig.row(0, [-1], numbered(1, 1, "bfloat16"))
    with pytest.raises(RequestError, match="8 columns of float32, got 3 of float32"):
        rig.row(0, [-1], PromptEmbeds(np.zeros((1, 3), np.float32), "float32"))
    off = Rig(is_enabled=False)
    with pytest.raises(RequestError, match="enable_prompt_embeds=True"):
        off.row(0, [-1], numbered(1, 1))
    assert off.embeds._rows.numel() == 0
