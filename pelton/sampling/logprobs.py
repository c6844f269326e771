"""A request's log-probabilities, as its user sees them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pelton.core.plan import LogprobRows


@dataclass(frozen=True, slots=True)
class Logprob:
    """rank: 1 + number of more likely tokens. decoded_token: None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One output token; `top` holds the n most likely tokens, all distinct, best first."""

    token_id: int
    logprob: Logprob
    top: tuple[tuple[int, Logprob], ...]

    def as_dict(self) -> dict[int, Logprob]:
        """The sampled token first, then the others of `top`: n or n + 1 entries."""
        return {self.token_id: self.logprob, **dict(self.top)}


def token_logprobs(
    rows: LogprobRows,
    first_row: int,
    token_ids: Sequence[int],
    num_logprobs: int,
    decode: Callable[[int], str | None],
) -> list[TokenLogprobs]:
    """What a request that asked for `num_logprobs` gets for the tokens it got in this step.

    token_ids: [n], the tokens of verification rows first_row : first_row + n.
    """
    assert num_logprobs <= rows.top_ids.shape[1], "more than the step computed"
    found = []
    for row, token_id in enumerate(token_ids, first_row):
        sampled = Logprob(float(rows.token_logprobs[row]), int(rows.ranks[row]), decode(token_id))
        top: list[tuple[int, Logprob]] = []
        values = rows.top_logprobs[row, :num_logprobs].tolist()
        for place, (top_id, value) in enumerate(zip(rows.top_ids[row].tolist(), values), 1):
            # Equals share a rank, as in the sampled token's count of larger logits.
            is_equal = bool(top) and top[-1][1].logprob == value
            rank = top[-1][1].rank if is_equal else place
            if top_id == token_id:
                top.append((top_id, sampled))
            else:
                top.append((top_id, Logprob(value, rank, decode(top_id))))
        found.append(TokenLogprobs(token_id, sampled, tuple(top)))
    return found
