"""Where each rank of an engine stands."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.config.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's coordinates. Ranks that share layers are neighbours, for they speak most.

    rank = stage * tensor_size + tensor_rank
    """

    rank: int
    tensor_rank: int
    tensor_size: int
    stage: int
    num_stages: int

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Whether this rank tells the engine what a step has yielded."""
        return self.is_last_stage and self.tensor_rank == 0

    def layers(self, num_layers: int) -> range:
        """Those of this stage: equal runs, the first stages one more where that does not divide."""
        few, more = divmod(num_layers, self.num_stages)
        first = self.stage * few + min(self.stage, more)
        return range(first, first + few + (self.stage < more))


def places(config: ParallelConfig) -> list[Place]:
    """Of all ranks, in their order."""
    return [
        Place(
            rank=rank,
            tensor_rank=rank % config.tensor,
            tensor_size=config.tensor,
            stage=rank // config.tensor,
            num_stages=config.pipeline,
        )
        for rank in range(config.num_ranks)
    ]
