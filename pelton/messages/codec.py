"""Messages as bytes (MessagePack), typed on both ends."""

from __future__ import annotations

import msgspec

from pelton.messages.from_engine import FromEngine
from pelton.messages.to_engine import ToEngine

VERSION = 4
"""Raised with every change of a message."""

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Raises TypeError for a value that MessagePack cannot carry, OverflowError for an integer
    beyond 64 bits."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises msgspec.DecodeError."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Raises msgspec.DecodeError."""
    return _from_engine.decode(frame)
