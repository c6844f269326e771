"""From the shape that a step has to the shape that it runs as."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from pelton.config.graphs import GraphsConfig
from pelton.core.descriptor import Descriptor

# Rows of steps with chunks of prompts: few prompts should not pay for the head of many rows.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The shapes that are recorded, one ladder of sizes for each class of steps, so that no class
    hides another's.

    Two classes: "uniform", all rows of one query length up to 1 + K; "mixed", everything else.
    Bounds that a kernel's launch depends on are the class's own, never a step's: max_seq_len.

    query_lens: the uniform query lengths that are recorded. max_tokens: of a step.
    """

    graphs: GraphsConfig
    query_lens: tuple[int, ...]
    max_rows: int
    max_tokens: int
    max_seq_len: int

    def choose(self, live: Descriptor) -> Descriptor | None:
        """The smallest recorded shape that holds a live one, or None."""
        query_len = live.uniform_query_len
        if query_len in self.query_lens:
            rows = self._rows(live.num_rows)
            if rows is not None and rows * query_len <= self.max_tokens:
                return self._uniform(rows, query_len)
        tokens = _next(self.graphs.token_sizes, live.num_tokens)
        if tokens is None or tokens > self.max_tokens:
            return None
        rows = next(rows for rows in self._mixed_rows(tokens) if rows >= live.num_rows)
        return self._mixed(tokens, rows)

    def shapes(self) -> Iterator[Descriptor]:
        """All of them, small ones first; without those that are recorded when they occur."""
        for rows in self.graphs.decode_sizes:
            for query_len in self.query_lens:
                if rows <= self.max_rows and rows * query_len <= self.max_tokens:
                    yield self._uniform(rows, query_len)
        for tokens in self.graphs.token_sizes:
            if tokens <= self.max_tokens:
                yield from (self._mixed(tokens, rows) for rows in self._mixed_rows(tokens))

    def _rows(self, num_rows: int) -> int | None:
        if self.graphs.every_decode_size:
            return num_rows
        rows = _next(self.graphs.decode_sizes, num_rows)
        return None if rows is None or rows > self.max_rows else rows

    def _mixed_rows(self, tokens: int) -> tuple[int, ...]:
        most = min(self.max_rows, tokens)  # every row has a token
        return (FEW_ROWS, most) if most > FEW_ROWS else (most,)

    def _uniform(self, rows: int, query_len: int) -> Descriptor:
        return Descriptor(
            mode="full",
            num_tokens=rows * query_len,
            num_rows=rows,
            uniform_query_len=query_len,
            max_query_len=query_len,
            max_seq_len=self.max_seq_len,
        )

    def _mixed(self, tokens: int, rows: int) -> Descriptor:
        return Descriptor(
            mode="full",
            num_tokens=tokens,
            num_rows=rows,
            uniform_query_len=0,
            max_query_len=tokens,
            max_seq_len=self.max_seq_len,
        )


def _next(sizes: tuple[int, ...], size: int) -> int | None:
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None
