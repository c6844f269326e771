"""The product ops by Triton kernels: what linear, linear_add and norm_linear share.

Kernels are chosen and compiled when a layer is bound, with tiles that were measured on an H200 (see
docs/performance.md); nothing is tuned or compiled when they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from pelton.ops.product import ProductSignature
from pelton.ops.triton_product_kernels import activate, few_rows, one_row, rms_norm

FEW = 64
"""Rows up to which weights stream through `few_rows`; above, cuBLAS is as fast."""

_ROWS_AT_ONCE = 1024

Product = Callable[[torch.Tensor, torch.Tensor], None]


class Workspace:
    """Memory that all kernels of a device share, since one follows the other. It grows when layers
    are bound and, for normed rows, when a step is larger than any before; what a recorded step
    knows stays where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgrown: list[torch.Tensor] = []
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self._normed = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, *, num_tiles: int, part_size: int) -> None:
        """Room for the parts, in all of part_size numbers, of num_tiles tiles."""
        if part_size > len(self.parts):
            self._outgrown.append(self.parts)
            self.parts = torch.empty(part_size, dtype=torch.float32, device=self._device)
        if num_tiles > len(self.arrived):
            self._outgrown.append(self.arrived)
            self.arrived = torch.zeros(num_tiles, dtype=torch.int32, device=self._device)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Memory like x, contiguous."""
        size = x.numel() * x.element_size()
        if size > len(self._normed):
            self._outgrown.append(self._normed)
            self._normed = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._normed[:size].view(x.dtype).view(x.shape)


@functools.cache
def workspace(device: torch.device) -> Workspace:
    return Workspace(device)


@dataclass(frozen=True, slots=True)
class RowTile:
    """Of `one_row`."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Of `few_rows`."""

    block_t: int
    block_n: int
    block_k: int
    splits: int
    num_stages: int
    num_warps: int = 4


def row_tile(signature: ProductSignature) -> RowTile:
    """Measured on an H200 at the shapes of Qwen3 0.6B and 8B."""
    columns, features = signature.in_features, signature.out_features
    is_wide = features >= 2**16
    if columns <= 1024:
        block_k = max(128, _power_above(columns))
        return RowTile(4, block_k, 4) if is_wide else RowTile(2, block_k, 2)
    if columns <= 2048:
        return RowTile(4, 2048, 4)
    if signature.activation is not None or is_wide:
        return RowTile(2, 4096, 4)
    if features <= 2048:
        return RowTile(4, 4096, 8)
    return RowTile(8, 1024, 4) if signature.norm_eps is None else RowTile(8, 2048, 8)


def tile_for(signature: ProductSignature, block_t: int) -> Tile:
    """Likewise. What sums are made of, the splits, is the same for any number of rows."""
    is_gated = signature.activation is not None
    num_tiles = -(-signature.out_features // 64)
    splits, columns = 1, signature.in_features
    while (num_tiles * splits < 64 and columns >= 1024) or (
        num_tiles * splits < 96 and columns >= 4096
    ):
        splits, columns = 2 * splits, columns // 2
    if signature.dtype == torch.float32:
        # Without the matrix units a tile is held in registers.
        return Tile(16, 64, 32, splits, 3)
    if block_t <= FEW:
        return Tile(block_t, 64, 128, splits, 4 if is_gated else 6)
    if is_gated:
        return Tile(block_t, 64, 128, splits, 3)
    return Tile(block_t, 128, 64, splits, 4, 8)


def _power_above(size: int) -> int:
    return 1 << (size - 1).bit_length()


_asked: set[tuple[object, ...]] = set()


def _compile(kernel: Any, *args: Any, **options: Any) -> None:
    """Compile what a launch with these arguments needs. A dtype stands for a tensor.

    Each only once: most layers of a model need what others have asked for, which may still be
    on its way (Device.compiling).
    """
    key = (kernel, *map(_kind, args), *sorted(options.items()))
    if key not in _asked:
        _asked.add(key)
        kernel.warmup(*args, grid=(1,), **options)


def _kind(argument: object) -> object:
    """All that compilation sees of an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    return type(argument) if isinstance(argument, float) else argument


def bind_one_row(
    signature: ProductSignature,
    weight: torch.Tensor,
    *,
    is_added: bool = False,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: RowTile | None = None,
) -> Product:
    """kernel(x, out): x [1, K], out [1, N] or [1, N / 2], its rows dense."""
    num_features, num_columns = weight.shape
    num_out = num_features // (1 if signature.activation is None else 2)
    tile = tile or row_tile(signature)
    grid = (-(-num_out // tile.block_n),)
    options: dict[str, Any] = {
        "IS_ADDED": is_added,
        "ACTIVATION": signature.activation or "",
        "HAS_NORM": norm_weight is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HAS_MORE": num_columns > tile.block_k,
        "IS_WHOLE": num_columns % tile.block_k == 0 and num_out % tile.block_n == 0,
        "DEPENDS": weight.is_cuda,
        "num_warps": tile.num_warps,
        **_dependent(weight),
    }
    fixed = (weight, norm_weight, bias)
    sizes = (num_features, num_columns, signature.norm_eps or 0.0)
    if weight.is_cuda:
        _compile(one_row, weight.dtype, *fixed, weight.dtype, *sizes, **options)

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        one_row[grid](x, *fixed, out, *sizes, **options)

    return kernel


class FewRows:
    """`few_rows` with one tile."""

    def __init__(
        self,
        signature: ProductSignature,
        weight: torch.Tensor,
        tile: Tile,
        *,
        is_added: bool,
        bias: torch.Tensor | None,
        most_rows: int,
    ) -> None:
        num_features, num_columns = weight.shape
        num_gates = 1 if signature.activation is None else 2
        self._num_tiles = -(-num_features // num_gates // tile.block_n)
        self._tile = tile
        self._workspace = workspace(weight.device)
        if tile.splits > 1:
            num_tiles = self._num_tiles * -(-most_rows // tile.block_t)
            part = num_gates * tile.block_n * tile.block_t
            self._workspace.reserve(num_tiles=num_tiles, part_size=num_tiles * tile.splits * part)
        descriptor = None
        if weight.is_cuda:
            descriptor = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
        self._is_on_gpu = weight.is_cuda
        self._weights = (weight, descriptor, bias)
        self._sizes = (num_features, num_columns)
        self._options: dict[str, Any] = {
            "IS_ADDED": is_added,
            "ACTIVATION": signature.activation or "",
            "HAS_BIAS": bias is not None,
            "BLOCK_T": tile.block_t,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "SPLITS": tile.splits,
            "STAGES": tile.num_stages,
            "IS_WHOLE": num_columns % tile.block_k == 0
            and num_features % (num_gates * tile.block_n) == 0,
            "HAS_DESCRIPTOR": weight.is_cuda,
            "DEPENDS": weight.is_cuda,
            "num_warps": tile.num_warps,
            **_dependent(weight),
        }
        if weight.is_cuda:
            strides = (num_columns, num_features // num_gates)
            memory = (self._workspace.parts, self._workspace.arrived)
            dtype = weight.dtype
            example = self._x_descriptor(weight[:1])
            _compile(
                few_rows, dtype, example, *self._weights, dtype, *memory, *self._sizes, 1,
                *strides, HAS_X_DESCRIPTOR=True, **self._options,
            )  # fmt: skip

    def _x_descriptor(self, x: torch.Tensor) -> TensorDescriptor | None:
        """For the copy engine, which takes rows that begin at multiples of 16 bytes."""
        if not self._is_on_gpu or (x.data_ptr() | x.stride(0) * x.element_size()) % 16:
            return None
        tile = self._tile
        num_rows = -(-x.shape[0] // tile.block_t) * tile.block_t
        end = x.storage_offset() + (num_rows - 1) * x.stride(0) + x.shape[1]
        if end * x.element_size() <= x.untyped_storage().nbytes():
            # It is slow to leave rows out. It may as well read what lies behind x: nobody looks at
            # the sums of those rows.
            x = x.as_strided((num_rows, x.shape[1]), x.stride())
        return TensorDescriptor.from_tensor(x, [tile.block_t, tile.block_k])

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = x.shape[0]
        grid = (-(-num_rows // self._tile.block_t), self._num_tiles, self._tile.splits)
        descriptor = self._x_descriptor(x)
        few_rows[grid](
            x, descriptor, *self._weights, out, self._workspace.parts, self._workspace.arrived,
            *self._sizes, num_rows, x.stride(0), out.stride(0),
            HAS_X_DESCRIPTOR=descriptor is not None, **self._options,
        )  # fmt: skip


def bind_few_rows(
    signature: ProductSignature,
    weight: torch.Tensor,
    *,
    is_added: bool = False,
    bias: torch.Tensor | None = None,
) -> Product:
    """kernel(x, out) for up to FEW rows; elements of a row dense."""
    ladder = [
        FewRows(
            signature, weight, tile_for(signature, block_t),
            is_added=is_added, bias=bias, most_rows=block_t,
        )
        for block_t in (16, 32, FEW)
    ]  # fmt: skip
    few, more, most = ladder

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = x.shape[0]
        (few if num_rows <= 16 else more if num_rows <= 32 else most)(x, out)

    return kernel


def bind_fixed(
    signature: ProductSignature,
    weight: torch.Tensor,
    *,
    is_added: bool = False,
    bias: torch.Tensor | None = None,
) -> Product:
    """kernel(x, out) for any number of rows: each has the sums that it has alone."""
    few, more, many = (
        FewRows(
            signature, weight, tile_for(signature, block_t),
            is_added=is_added, bias=bias, most_rows=most,
        )
        for block_t, most in ((16, 16), (FEW, FEW), (128, _ROWS_AT_ONCE))
    )  # fmt: skip

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = x.shape[0]
        if 0 < num_rows <= FEW:
            (few if num_rows <= 16 else more)(x, out)
            return
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            end = start + _ROWS_AT_ONCE
            many(x[start:end], out[start:end])

    return kernel


def bind_norm(
    signature: ProductSignature, norm_weight: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """normed(x [T, K]) -> [T, K] in the workspace, or x itself without a norm."""
    if norm_weight is None:
        return lambda x: x
    memory, num_columns = workspace(norm_weight.device), signature.in_features
    block = _power_above(num_columns)
    options: dict[str, Any] = {
        "BLOCK_K": block,
        "DEPENDS": norm_weight.is_cuda,
        "num_warps": min(16, max(1, block // 512)),
        **_dependent(norm_weight),
    }
    if norm_weight.is_cuda:
        dtype = norm_weight.dtype
        _compile(
            rms_norm, dtype, norm_weight, dtype, num_columns, num_columns, signature.norm_eps,
            **options,
        )  # fmt: skip

    def normed(x: torch.Tensor) -> torch.Tensor:
        out = memory.normed(x)
        if x.shape[0]:
            rms_norm[(x.shape[0],)](
                x, norm_weight, out, num_columns, x.stride(0), signature.norm_eps, **options
            )
        return out

    return normed


def bind_activate(signature: ProductSignature, weight: torch.Tensor) -> Product:
    """kernel(both, out): both [T, 2 N] -> out [T, N]."""
    num_out, block = signature.out_features // 2, 1024
    blocks = -(-num_out // block)
    options: dict[str, Any] = {
        "ACTIVATION": signature.activation,
        "BLOCK_N": block,
        "DEPENDS": weight.is_cuda,
        "num_warps": 4,
        **_dependent(weight),
    }
    if weight.is_cuda:
        sizes = (num_out, 2 * num_out, num_out)
        _compile(activate, weight.dtype, weight.dtype, *sizes, **options)

    def kernel(both: torch.Tensor, out: torch.Tensor) -> None:
        if both.shape[0]:
            activate[(both.shape[0], blocks)](
                both, out, num_out, both.stride(0), out.stride(0), **options
            )

    return kernel


def _dependent(tensor: torch.Tensor) -> dict[str, bool]:
    """The launch option, which Triton's interpreter does not know."""
    return {"launch_pdl": True} if tensor.is_cuda else {}
