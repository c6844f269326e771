"""What a device's launches are written down as."""

from __future__ import annotations

import threading

import pytest
import torch

from pelton.device.cpu import CPUDevice
from pelton.device.timeline import Timeline, current, name_of, timing


def test_spans_are_of_the_innermost_calls():
    timeline = Timeline()

    def outer():
        timeline.run("inner", lambda: None)
        timeline.run("inner", lambda: None)

    timeline.run("outer", outer)
    assert timeline.run("alone", lambda x: x + 1, 2) == 3
    assert [span.name for span in timeline.spans] == ["inner", "inner", "alone"]
    begins = [span.begin for span in timeline.spans]
    assert begins == sorted(begins)
    assert all(span.seconds >= 0 for span in timeline.spans)


def test_a_cpu_writes_launches_down_while_it_is_asked_to():
    device = CPUDevice()
    x = torch.zeros(3)
    device.launch(x.add_, 1.0)
    with timing() as timeline:
        device.launch(_add_two, x)
        assert current() is timeline
    device.launch(x.add_, 1.0)
    assert current() is None
    assert x.tolist() == [4.0] * 3
    assert [span.name for span in timeline.spans] == [f"{__name__}._add_two"]


def _add_two(x):
    x.add_(2.0)


def test_other_threads_are_not_written_down():
    with timing():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_it_ends_with_an_exception():
    with pytest.raises(ValueError), timing():
        raise ValueError
    assert current() is None


def test_names():
    assert name_of(Timeline.run) == "device.timeline.Timeline.run"
    assert name_of(Timeline().run) == "device.timeline.Timeline.run"
