"""One-way sockets between two processes of one machine. Neither ever blocks its sender."""

from __future__ import annotations

import zmq

TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"
"""Names of the two sockets in a folder that both processes know."""
_RETRY_MILLISECONDS = 5
"""Between attempts to find the other end, which may be started later."""


class Receiver:
    """The end that frames come to. Used by one thread at a time.

    Args:
        path: of the socket that it makes. The name may be removed once the other end is connected.
    """

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{path}")

    @property
    def fileno(self) -> int:
        """Becomes readable when something has arrived, and tells of it only once: take all."""
        number: int = self._socket.FD
        return number

    def wait(self) -> bytes:
        """The next frame."""
        return self._socket.recv()

    def take(self) -> bytes | None:
        """The next frame if it has arrived and the socket is open."""
        if self._socket.closed:
            return None
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Sender:
    """The end that frames go from, in order. Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MILLISECONDS)
        self._socket.connect(f"ipc://{path}")

    def send(self, frame: bytes) -> None:
        """Queue a frame; on a closed socket it is lost."""
        if not self._socket.closed:
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self, *, linger: float) -> None:
        """Wait at most `linger` seconds for what is queued to leave."""
        self._socket.close(linger=int(1000 * linger))
        self._context.term()
