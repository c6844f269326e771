from __future__ import annotations

from pelton.batch.participant import StepParticipant, overridden
from pelton.core.plan import SlotRef

HOOKS = [name for name in vars(StepParticipant) if not name.startswith("_")]


class Removes(StepParticipant):
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def remove_request(self, ref: SlotRef) -> None:
        self.log.append(f"{self.name} {ref.slot}")


class RemovesByInheritance(Removes):
    pass


class Idle(StepParticipant):
    """Adds a method of its own; overrides none."""

    def extra(self) -> None:
        raise AssertionError


def test_only_overridden_hooks_are_bound_and_in_order():
    log: list[str] = []
    participants = [Removes(log, "b"), Idle(), RemovesByInheritance(log, "a"), Removes(log, "c")]
    for hook in overridden(participants, "remove_request"):
        hook(SlotRef(3, 1))
    assert log == ["b 3", "a 3", "c 3"]
    for name in HOOKS:
        if name != "remove_request":
            assert overridden(participants, name) == (), name


def test_every_hook_does_nothing_by_default():
    assert HOOKS == [
        "begin_step",
        "add_request",
        "append_blocks",
        "remove_request",
        "apply_writes",
        "before_forward",
        "after_forward",
        "close",
    ]
    participant = StepParticipant()
    for name in HOOKS:
        takes = getattr(StepParticipant, name).__code__.co_argcount - 1
        assert getattr(participant, name)(*[None] * takes) is None
