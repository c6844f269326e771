"""Each product of a tape is told what the next one reads, so that memory has no pause between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise

from pelton.device.native.library import (
    BlockArgs,
    BlockDrawArgs,
    BlockRun,
    DrawArgs,
    LinearArgs,
    loaded,
)

_LANES, _K_UNIT = 16, 32
_ELEMENT_BYTES = (2, 4)  # by LinearArgs.dtype


def tell_products(calls: Iterable[ctypes.Structure]) -> None:
    """calls: arguments in the order of their calls; what is no product is passed over."""
    products = [found for found in map(_product, calls) if found is not None]
    for (args, _, _), (following, address, num_bytes) in pairwise(products):
        # Gate and up are read side by side, from the begin and from the middle.
        args.ahead = address
        args.ahead_bytes = num_bytes // 2 if following.activation else num_bytes


def _product(args: ctypes.Structure) -> tuple[LinearArgs, int, int] | None:
    """A product, the address of its weight and the bytes of that."""
    if isinstance(args, BlockArgs):
        return args.linear, *_blocks(args.linear, args.runs[: args.num_runs])
    if isinstance(args, BlockDrawArgs):
        return args.draw.head, *_blocks(args.draw.head, args.runs[: args.num_runs])
    if isinstance(args, DrawArgs):
        args = args.head
    if not isinstance(args, LinearArgs):
        return None
    features, columns = -(-args.num_features // _LANES), -(-args.num_columns // _K_UNIT)
    size = features * _LANES * columns * _K_UNIT * _ELEMENT_BYTES[args.dtype]
    return args, args.weight, size


def _blocks(linear: LinearArgs, runs: list[BlockRun]) -> tuple[int, int]:
    """Runs lie one behind the other."""
    panel_bytes = loaded().functions.pelton_panel_bytes
    sizes = [run.num_panels * panel_bytes(run.form, linear.num_columns) for run in runs]
    return runs[0].panels, sum(sizes)
