"""Which blocks each row's KV lives in, one table per KV group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pelton.batch.row_state import RESERVED_ROWS
from pelton.batch.staged import Staging
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import BlockAppend, NewRow


class BlockTables:
    """[R, W] per group. Entries past a row's blocks may be a former owner's, and those left of a
    window may be somebody else's by now; build_inputs leaves both out. The reserved row's are the
    null block, 0.

    windows: per group the tokens that a token sees, or None for all.
    """

    def __init__(
        self, staging: Staging, groups: Sequence[KVGroup], *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.block_sizes = tuple(group.block_size for group in groups)
        self.windows = tuple(group.window for group in groups)
        self._tables = tuple(
            staging.tensor(
                f"block_table_{group.index}",
                max_num_seqs + RESERVED_ROWS,
                -(-max_model_len // group.block_size),
                torch.int32,
            )
            for group in groups
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(table.tensor for table in self._tables)

    def add(self, row: NewRow) -> None:
        for table, blocks in zip(self._tables, row.block_ids, strict=True):
            table.stage(row.ref.slot, 0, blocks)

    def append(self, append: BlockAppend) -> None:
        self._tables[append.group].stage(append.ref.slot, append.first, append.block_ids)
