"""Preempted requests' KV in host memory: who holds which page, and when that pays.

A host page holds what one block holds, over all layers. It is touched by nothing but copies in the
device's one queue, in the order in which plans ask for them. So a page may have a new owner as soon
as the old one lets go of it: the old one's copies come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pelton.core.plan import PageCopies
from pelton.errors import IntegrityError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What moving KV costs, and what computing it again costs, in seconds.

    per_token: to compute one token of a prompt. per_page: to copy a page out and in again.
    per_move: what every request's two copies cost beside that. The defaults say that copies are
    free, so that whatever fits is moved.
    """

    per_token: float = 1.0
    per_page: float = 0.0
    per_move: float = 0.0

    def pays(self, num_tokens: int, num_pages: int) -> bool:
        """Whether to move pages, and not to compute the tokens that they hold again."""
        return self.per_move + num_pages * self.per_page < num_tokens * self.per_token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedKV:
    """What host memory holds of a request.

    num_tokens: those whose KV it is, from the first that its next token sees.
    first: per KV group the index in the block table of the first page. pages: per group.
    """

    num_tokens: int
    first: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]


class HostPages:
    """A pool of host pages, and the copies to them that no plan has ordered yet.

    num_saved_tokens, num_restored_tokens: counts since the start; what the prefix cache still had
    when a request came back is not restored.
    """

    def __init__(self, num_pages: int, costs: MoveCosts) -> None:
        self.num_pages = num_pages
        self.num_saved_tokens = 0
        self.num_restored_tokens = 0
        self._costs = costs
        self._free = list(reversed(range(num_pages)))
        self._ordered: dict[SavedKV, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def save(
        self, num_tokens: int, first: Sequence[int], block_ids: Sequence[Sequence[int]]
    ) -> SavedKV | None:
        """Order copies of a request's blocks (per KV group, from table index `first` on). None if
        computing its tokens again is cheaper, or if not all of them have a page. (A window that
        ends where a block does needs none.)"""
        num_pages = sum(map(len, block_ids))
        if (
            not self.num_pages
            or num_pages > len(self._free)
            or not self._costs.pays(num_tokens, num_pages)
        ):
            return None
        saved = SavedKV(
            num_tokens=num_tokens,
            first=tuple(first),
            pages=tuple(tuple(self._free.pop() for _ in ids) for ids in block_ids),
        )
        self._ordered[saved] = [block for ids in block_ids for block in ids]
        self.num_saved_tokens += num_tokens
        return saved

    def take_orders(self) -> PageCopies:
        """The copies for the next plan: before anything writes to the blocks."""
        blocks = [block for ids in self._ordered.values() for block in ids]
        pages = [page for saved in self._ordered for ids in saved.pages for page in ids]
        self._ordered = {}
        return PageCopies.of(blocks, pages)

    def forget(self, saved: SavedKV) -> None:
        """Nobody asks for this any more. Its pages are free at once (see above)."""
        self._ordered.pop(saved, None)
        # Sorted, so that a request's pages lie side by side where they can: fewer, longer copies.
        self._free += [page for ids in saved.pages for page in ids]
        self._free.sort(reverse=True)

    def check(self, held: Iterable[SavedKV]) -> None:
        """Raise IntegrityError unless every page is free or held once, and orders have holders."""
        held = list(held)
        pages = [page for saved in held for ids in saved.pages for page in ids]
        if sorted(pages + self._free) != list(range(self.num_pages)):
            raise IntegrityError(
                f"Host pages: {len(pages)} held and {len(self._free)} free ones are not the "
                f"{self.num_pages} that exist."
            )
        if not self._ordered.keys() <= set(held):
            raise IntegrityError("Host pages: a copy is ordered for nobody.")
