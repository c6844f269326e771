"""Each method by itself: streams over chunks, and what it declares to need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.config.pooling import PoolingParams
from pelton.device.cpu import CPUDevice
from pelton.pooling.methods import Chunk, load_methods, method_facts
from pelton.pooling.table import METHODS, register

HIDDEN, NUM_ROWS = 6, 4
IDS = np.array([7, 5, 7, 7, 5, 9, 5, 7, 5, 5, 1], np.int32)
STATES = torch.randn(len(IDS), HIDDEN, generator=torch.Generator().manual_seed(0))


class Touched(AssertionError):
    pass


class Absent:
    """In the place of what a method has not declared: whatever is done with it raises."""

    def __getattribute__(self, name):
        raise Touched(name)

    def __getitem__(self, key):
        raise Touched(key)

    def __len__(self):
        raise Touched("len")

    def __iter__(self):
        raise Touched("iter")

    def __bool__(self):
        raise Touched("bool")

    def __eq__(self, other):
        raise Touched("==")


WANTED = {
    "last": STATES[-1:],
    "cls": STATES[:1],
    "mean": STATES.mean(dim=0, keepdim=True),
    "all": STATES,
    "step": STATES[torch.from_numpy(IDS == 5)],
}


def stream(
    name: str, lengths: list[int], token_ids: object, *, is_invariant: bool = False
) -> torch.Tensor:
    """What the method makes of IDS in chunks of these lengths."""
    method = load_methods(CPUDevice(1), NUM_ROWS, HIDDEN, batch_invariant=is_invariant)[name]
    found = []
    position = 0
    for length in lengths:
        # Some other row's tokens stand before it in the step.
        first = 3
        chunk = Chunk(
            row=1,
            slot=2,
            first=first,
            last=first + length,
            position=position,
            prompt_len=len(IDS),
            params=PoolingParams(step_tag_id=5),
            token_ids=token_ids,
        )
        step = torch.cat([torch.full((first, HIDDEN), torch.nan), STATES[position:][:length]])
        hidden = torch.cat([step[:0], *(step[a:b] for a, b in method.wanted(chunk))])
        count = method.num_features(chunk)
        features = method.features(hidden, [chunk])
        assert len(features) == count
        found.append(features.clone())
        position += length
    return torch.cat(found)


@pytest.mark.parametrize("lengths", [[11], [1] * 11, [3, 3, 3, 2], [10, 1], [1, 10]])
@pytest.mark.parametrize("name", METHODS)
def test_streams(name, lengths):
    torch.testing.assert_close(stream(name, lengths, IDS), WANTED[name])
    exact = stream(name, lengths, IDS, is_invariant=True)
    assert torch.equal(exact, stream(name, [len(IDS)], IDS, is_invariant=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_touches_nothing_that_it_has_not_declared(name):
    needs = {facts.name: facts.needs for facts in method_facts()}[name]
    if "token_ids" in needs:
        with pytest.raises(Touched):
            stream(name, [4, 7], Absent())
    else:
        torch.testing.assert_close(stream(name, [4, 7], Absent()), WANTED[name])


def test_every_method_is_tested_here():
    assert set(WANTED) == set(METHODS)


class Second:
    """A method from outside the tree."""

    is_per_token = False
    needs = ("token_ids",)

    def __init__(self, device, num_rows, hidden_size, *, batch_invariant):
        pass


def test_a_method_from_outside():
    register("second", f"{__name__}:Second")
    try:
        assert ("second", False, ("token_ids",)) in method_facts()
    finally:
        del METHODS["second"]
