"""What ranks say to each other: all of it goes through here.

Every rank of a group makes the same calls in the same order. A call is announced before it is made
(`Announce`), so that whoever watches can say where a rank stands that does not move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

Announce = Callable[[str], object]


def _told(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class Group:
    """Ranks of torch.distributed that share layers (layers/context.Communicator).

    Args:
        ranks: of the group, in the order of their places in it. Every process makes every group, in
            the same order, its own or not.
        announce: told of each call before it is made.
        in_order: sums are formed in the order of the ranks, so that their bits do not depend on how
            the library cuts a tensor: always so where it is gloo's.
    """

    def __init__(
        self, ranks: list[int], announce: Announce, *, device_type: str, in_order: bool
    ) -> None:
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
        self._group = dist.new_group(ranks)
        self._announce = announce
        self._in_order = in_order or device_type == "cpu"

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place; every rank gets the same bits."""
        self._announce(_told("all_reduce", tensor))
        if not self._in_order:
            dist.all_reduce(tensor, group=self._group)
            return
        parts = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather_into_tensor(parts.view(-1), tensor.reshape(-1), group=self._group)
        torch.sum(parts, 0, out=tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """tensor: [...] of this rank -> out: [size, ...], in the order of the ranks."""
        self._announce(_told("all_gather", tensor))
        dist.all_gather_into_tensor(out.view(-1), tensor.reshape(-1), group=self._group)


def odd_one_out(number: int) -> int | None:
    """Ask all ranks for a number: the rank whose number is another than that of most, or None where
    all have one. `number` is below 2**63."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(numbers, torch.tensor([number], device=device))
    found = numbers.tolist()
    usual = max(found, key=found.count)
    return next((rank for rank, one in enumerate(found) if one != usual), None)


@dataclass(slots=True)
class Neighbours:
    """The stages before and behind this one (forward/stages.Link), by rank of torch.distributed.

    A send is queued and waited for when the next one comes: until then its tensor stays as it is.
    """

    announce: Announce
    previous: int | None = None
    following: int | None = None
    _sending: list[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=list)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """hidden: [T, H]; copied, for the next step writes to it."""
        self.announce(_told(f"send to rank {self.following}", hidden))
        for work, _ in self._sending:
            assert work is not None, "this rank takes part"
            work.wait()
        kept = hidden.clone()
        self._sending = [(dist.isend(kept, self.following), kept)]

    def receive_hidden(self, hidden: torch.Tensor) -> None:
        """Fill [T, H]."""
        self.announce(_told(f"receive from rank {self.previous}", hidden))
        dist.recv(hidden, self.previous)
