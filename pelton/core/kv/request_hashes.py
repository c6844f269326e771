"""A request's full blocks as hashes, per KV group: what its prefix is called in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.core.kv.prefix_cache import ROOT_HASH, extra_key, hash_block
from pelton.core.request import Request


def extend_hashes(request: Request, block_sizes: Sequence[int], num_tokens: int) -> None:
    """Hash the full blocks among the first `num_tokens` (known) tokens, for each block size."""
    if not request.block_hashes:
        request.block_hashes = [[] for _ in block_sizes]
    for hashes, size in zip(request.block_hashes, block_sizes, strict=True):
        for i in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_of(request, parent, i * size, (i + 1) * size))


def hash_of(request: Request, parent: bytes, start: int, end: int) -> bytes:
    """Of the block of tokens start..end, half-open."""
    tokens = request.token_ids[start:end].tobytes()
    return hash_block(parent, tokens, _extra_keys(request, start, end))


def _extra_keys(request: Request, start: int, end: int) -> list[bytes]:
    """What besides tokens decides the content of the block of tokens start..end.

    Of embeddings what the rows hold; where they stand, the placeholders among the tokens say.
    """
    extras = []
    if start == 0 and request.cache_salt is not None:
        extras.append(extra_key("salt", request.cache_salt.encode()))
    if request.adapter is not None:
        extras.append(extra_key("adapter", request.adapter.encode()))
    if request.prompt_embeds is not None and start < request.embeds_end:
        digest = request.prompt_embeds.digest(request.token_ids[start:end])
        extras.append(extra_key("embeds", digest))
    return extras
