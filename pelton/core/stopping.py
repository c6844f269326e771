"""When a request has had enough. Stop strings are not here: they need text."""

from __future__ import annotations

from typing import NamedTuple

from pelton.core.request import FinishReason, Request


class Stop(NamedTuple):
    """reason: why; token: the stop token id that did it, None for an end-of-sequence token."""

    reason: FinishReason
    token: int | None


_EOS = Stop("stop", None)
_LENGTH = Stop("length", None)


def check_stop(request: Request, token: int) -> Stop | None:
    """Whether a request ends with `token`, which was just appended.

    In this order: end of sequence (unless ignored), stop token, length; the first two not before
    min_tokens (the sampler masks them until then: this is the guard behind it).
    """
    if token in request.end_token_ids and request.num_output_tokens >= request.params.min_tokens:
        if token in request.eos_token_ids and not request.params.ignore_eos:
            return _EOS
        return Stop("stop", token)
    if request.num_tokens >= request.max_total_len:
        return _LENGTH
    return None
