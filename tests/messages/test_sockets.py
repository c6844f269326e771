"""Frames arrive whole and in order, whoever comes first."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from pelton.messages.sockets import Receiver, Sender


def test_a_sender_that_is_early(tmp_path):
    """What it sends waits for the other end; then the name is not needed any more."""
    path = str(tmp_path / "socket")
    sender = Sender(path)
    frames = [bytes([n % 256]) * n for n in range(300)]
    for frame in frames:
        sender.send(frame)
    receiver = Receiver(path)
    assert receiver.wait() == frames[0]
    Path(path).unlink()
    assert [receiver.wait() for _ in frames[1:]] == frames[1:]
    sender.send(b"late")
    assert receiver.wait() == b"late"
    sender.close(linger=0)
    receiver.close()


def test_taking_without_waiting(tmp_path):
    receiver = Receiver(str(tmp_path / "socket"))
    assert receiver.take() is None
    sender = Sender(str(tmp_path / "socket"))
    sender.send(b"a")
    sender.send(b"b")
    sender.close(linger=5)
    assert select.select([receiver.fileno], [], [], 5)[0]
    found = []
    while len(found) < 2:
        if (frame := receiver.take()) is not None:
            found.append(frame)
    assert found == [b"a", b"b"]
    sender.send(b"lost")
    receiver.close()
    assert receiver.take() is None


def test_a_large_frame(tmp_path):
    receiver = Receiver(str(tmp_path / "socket"))
    sender = Sender(str(tmp_path / "socket"))
    frame = bytes(range(256)) * 2**16
    sender.send(frame)
    assert receiver.wait() == frame
    sender.close(linger=0)
    receiver.close()


def test_closing_waits_for_nobody(tmp_path):
    sender = Sender(str(tmp_path / "nobody"))
    sender.send(b"x")
    sender.close(linger=0.05)
    with pytest.raises(Exception, match="No such file"):
        Receiver(str(tmp_path / "no" / "folder"))
