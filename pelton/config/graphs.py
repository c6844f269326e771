"""Which shapes of steps are recorded once and replayed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphsConfig:
    """A step whose shape is recorded is one replay: a CUDA graph, or a list of calls on a CPU.

    decode_sizes: rows of steps in which all rows have equally many tokens, at most 1 + K (a decode,
        with or without drafts); a step is padded up to the next size. Ascending.
    token_sizes: tokens of all other steps, padded likewise.
    every_decode_size: every number of rows is a size, recorded when it first occurs; for devices on
        which recording costs nothing and padding does.
    """

    decode_sizes: tuple[int, ...] = ()
    token_sizes: tuple[int, ...] = ()
    every_decode_size: bool = False

    @property
    def is_eager(self) -> bool:
        """Nothing is recorded."""
        return not (self.decode_sizes or self.token_sizes or self.every_decode_size)
