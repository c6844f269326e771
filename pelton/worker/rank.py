"""A worker that is one of several: it meets the others, and has their collectives."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from pelton.checkpoint.source import Checkpoint
from pelton.config.engine import EngineConfig
from pelton.errors import IntegrityError
from pelton.parallel.collectives import Group, Neighbours, odd_one_out
from pelton.parallel.mesh import Place, places
from pelton.runner.assemble import PipelinePlace
from pelton.worker.worker import Worker, make_device


@dataclass(frozen=True, slots=True)
class Rank:
    place: Place
    worker: Worker

    def compare(self, order: bytes) -> None:
        """Raises IntegrityError, on all ranks, where one was told something else."""
        rank = odd_one_out(zlib.crc32(order))
        if rank is not None:
            raise IntegrityError(f"rank {rank} was told another step than the others")

    def leave(self) -> None:
        """Say goodbye to the others, all at once."""
        dist.destroy_process_group()


def make_rank(
    config: EngineConfig,
    checkpoint: Checkpoint,
    rank: int,
    meeting: str,
    announce: Callable[[str], object],
) -> Rank:
    """Meet the other ranks at the file `meeting`, and load this one's share."""
    everyone = places(config.parallel)
    place = everyone[rank]
    kind = config.device.partition(":")[0]
    if kind == "cuda":
        first = int(config.device.partition(":")[2] or 0)
        config = replace(config, device=f"cuda:{first + rank}")
    device = make_device(config)  # chooses the GPU, before NCCL does
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this host
    announce("meeting the other ranks")
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=FileStore(meeting, len(everyone)),
        rank=rank,
        world_size=len(everyone),
        timeout=timedelta(seconds=config.parallel.step_timeout),
        device_id=device.torch_device if kind == "cuda" else None,
    )
    groups = [
        Group(
            [other.rank for other in everyone if other.stage == stage],
            announce,
            device_type=device.torch_device.type,
            in_order=config.batch_invariant,
        )
        for stage in range(place.num_stages)
    ]
    layers = place.layers(config.model.num_layers)
    links = Neighbours(
        announce,
        None if place.is_first_stage else rank - place.tensor_size,
        None if place.is_last_stage else rank + place.tensor_size,
    )
    announce("loading")
    worker = Worker(
        config,
        checkpoint,
        device=device,
        communicator=groups[place.stage],
        place=None
        if place.num_stages == 1
        else PipelinePlace(
            lo=layers.start,
            hi=layers.stop,
            previous=None if place.is_first_stage else links,
            following=None if place.is_last_stage else links,
        ),
        agree_on_blocks=_smallest,
    )
    return Rank(place, worker)


def _smallest(number: int) -> int:
    """Over all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value.item())
