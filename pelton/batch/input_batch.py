"""One step's batch: host facts and device inputs. Made anew each step, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from pelton.core.descriptor import Descriptor
from pelton.core.plan import Int32Array, SlotRef
from pelton.ops.step_tensors import InputTensors, StepArrays


class RowKind(IntEnum):
    PREFILL = 0  # part of a prompt, or of what is fed again after preemption
    DECODE = 1  # the newest token
    VERIFY = 2  # the newest token and its drafts


@dataclass(frozen=True, slots=True)
class PartOf:
    """Layout tag of a derived batch: which piece of which number of pieces."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """Sizes: num_* are live; `descriptor` has the executed (padded) ones.

    refs: the live rows. slots_np, query_len_np, num_logits_np, row_kind_np: [B live].
    computed_bound_np, seq_len_bound_np: [B live] host bounds before and after the step; equal to
        the device's values if `bounds_are_exact`, never below them.
    num_decode_rows: rows with one query token; they come first.
    step, inputs: device arrays of executed length.
    is_blank: stands for every step of its shape: all counts are the executed ones, host arrays are
        bounds of the shape, and slots and refs are nobody's. Only the device knows a step's own.
    """

    step_id: int
    descriptor: Descriptor
    num_rows: int
    num_tokens: int
    num_logits: int
    refs: tuple[SlotRef, ...]
    slots_np: Int32Array
    query_len_np: Int32Array
    num_logits_np: Int32Array
    row_kind_np: npt.NDArray[np.uint8]
    computed_bound_np: Int32Array
    seq_len_bound_np: Int32Array
    bounds_are_exact: bool
    num_decode_rows: int
    step: StepArrays
    inputs: InputTensors
    layout: Literal["global"] | PartOf = "global"
    parent: InputBatch | None = None
    is_blank: bool = False

    def read_lengths(self) -> tuple[Int32Array, Int32Array]:
        """(query_lens, seq_lens) of the live rows, from the device: for kernels on a CPU, never for
        the host."""
        num_rows = int(self.step.live[0])
        query_lens = self.step.query_start_loc.diff()[:num_rows]
        return query_lens.numpy(), self.inputs.seq_lens[:num_rows].numpy()
