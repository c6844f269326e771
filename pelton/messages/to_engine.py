"""What the API process tells the engine process."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.plan import Int32Array
from pelton.core.prompt_embeds import STORED_AS, PromptEmbeds


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: what to load.

    version: of this room; the other side refuses another one.
    checked: a pickled CheckedArgs. Both processes are one installation, and the socket lies in a
        folder of this user's alone.
    tables: module -> name -> "module:object", of literal tables that the program has added to.
    log_level: of the logger "pelton", as Python's logging counts.
    replica: which one of data_parallel_size equal engines this is.
    """

    version: int
    checked: bytes
    log_level: int
    tables: dict[str, dict[str, str]]
    replica: int = 0


class PackedEmbeds(msgspec.Struct, array_like=True, frozen=True):
    """Embeddings of a prompt: [n, width] elements of `dtype`, little-endian, row by row. Large, so
    that neither side copies them beside the message: `rows` is a view."""

    dtype: str
    width: int
    rows: memoryview


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A request with params.n answers.

    handle: of answer 0; answer i has handle + i. Never used twice.
    request_id: for logs and error texts.
    token_ids: the prompt, little-endian int32; placeholders where embeddings stand.
    params: see `pack_params`.
    pooling: of a request that is pooled, see `pack_pooling`; its params are empty.
    second_segment: where the second text of a pair begins, or None.
    """

    handle: int
    request_id: str
    token_ids: bytes
    params: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    embeds: PackedEmbeds | None = None
    pooling: dict[str, Any] | None = None
    second_segment: int | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End the answers with handles first : first + count. Nothing comes back of them; those that
    have ended, or were never there, are passed over."""

    first: int
    count: int


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Forget all cached prefixes; answered by `CacheReset`."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Stop at once, let go of the device, and exit with code 0."""


ToEngine = Start | AddRequest | Abort | ResetPrefixCache | Shutdown

_DEFAULTS = {
    field.name: field.default if field.default is not dataclasses.MISSING else None
    for field in dataclasses.fields(SamplingParams)
}


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults: few. `SamplingParams(**packed)` checks them once
    more on the other side."""
    packed = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default and value != ():
            packed[name] = value
    return packed


def pack_pooling(params: PoolingParams) -> dict[str, Any]:
    """The fields that ask for something; `PoolingParams(**packed)` checks them once more."""
    names = (field.name for field in dataclasses.fields(PoolingParams))
    return {name: value for name in names if (value := getattr(params, name)) is not None}


def pack_token_ids(ids: Int32Array) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def pack_embeds(embeds: PromptEmbeds) -> PackedEmbeds:
    return PackedEmbeds(embeds.dtype, embeds.width, embeds.rows.data.cast("B"))


def unpack_embeds(packed: PackedEmbeds) -> PromptEmbeds:
    """A read-only view, too."""
    rows = np.frombuffer(packed.rows, STORED_AS[packed.dtype])
    return PromptEmbeds(rows.reshape(-1, packed.width), packed.dtype)


def unpack_token_ids(packed: bytes) -> Int32Array:
    """A read-only view."""
    return np.frombuffer(packed, "<i4")
