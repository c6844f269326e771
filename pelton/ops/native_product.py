"""The product ops by kernels of our own on CPU: what linear, linear_add and norm_linear share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pelton.device.native.calls import call
from pelton.device.native.library import BlockArgs, LinearArgs, library, loaded
from pelton.device.native.memory import weight_memory
from pelton.ops.block_weight import BlockWeight
from pelton.ops.product import NO_BLOCKS, ProductSignature

DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_ACTIVATIONS = {None: 0, "silu_mul": 1, "gelu_tanh_mul": 2, "gelu_mul": 3, "gelu": 4}
_LANES = 16
K_UNIT = 32
STORE, ADD = 0, 1

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""product(x, out): x [T, K] and out [T, N], or [T, N / 2] where an activation halves; rows may be
strided, their elements not."""


def takes_native(signature: ProductSignature) -> str | None:
    return NO_BLOCKS if signature.in_blocks else _takes(signature)


def takes_blocks(signature: ProductSignature) -> str | None:
    return _takes(signature) if signature.in_blocks else "only for a weight in quantised blocks"


def _takes(signature: ProductSignature) -> str | None:
    if signature.device_type != "cpu":
        return "for the CPU"
    if signature.dtype not in DTYPES:
        return f"not in {signature.dtype}"
    if signature.is_halved and signature.out_features % (2 * _LANES):
        return f"gate and up are not multiples of {_LANES} wide"
    return None if library() is not None else "no library of CPU kernels"


_PACKED = WeakIdKeyDictionary()


def packed(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] as linear.c wants it: flat, N up to a multiple of 16, K up to one of 32. Ops
    that are bound to one tensor share one copy; a weight that is packed must not change."""
    if weight not in _PACKED:
        _PACKED[weight] = _pack(weight)
    return _PACKED[weight]  # type: ignore[no-any-return]


def _pack(weight: torch.Tensor) -> torch.Tensor:
    found = loaded()
    num_features, num_columns = weight.shape
    size = -(-num_features // _LANES) * _LANES * -(-num_columns // K_UNIT) * K_UNIT
    target = weight_memory(size * weight.element_size()).view(weight.dtype)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    pack = found.functions.pelton_pack_bf16
    if weight.dtype == torch.float32:
        pack = found.functions.pelton_pack_f32
    pack(weight.data_ptr(), weight.stride(0), num_features, num_columns, target.data_ptr())
    return target


def bind_native(
    signature: ProductSignature,
    weight: torch.Tensor,
    *,
    mode: int,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Product:
    """Works on a copy of `weight` that is packed for linear.c."""
    own = packed(weight)
    args = LinearArgs(weight=own.data_ptr())
    kept = [own, _fill(args, signature, mode, norm_weight, bias)]
    return _kernel(loaded().functions.pelton_linear, args, args, kept)


def bind_blocks(
    signature: ProductSignature,
    weight: BlockWeight,
    *,
    mode: int,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Product:
    """Reads the codes of `weight` in place.

    x is quantised too: each 32 columns of a row (normed, if it is to be) become integers of -32512
    to 32512 and a scale, so that a sum is off by no more than max|x| / 21674 times the sum of
    |weight|, added up over such blocks, and float32's rounding. With AMX, unless
    batch_invariant, 9 rows and more are multiplied in bfloat16, x as it is.
    """
    args = weight.arguments()
    kept = [weight, _fill(args.linear, signature, mode, norm_weight, bias)]
    return _kernel(loaded().functions.pelton_blocks, args, args.linear, kept)


def _fill(
    args: LinearArgs,
    signature: ProductSignature,
    mode: int,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Everything but weight, x and out. Returns what the arguments point to."""
    args.norm_weight = None if norm_weight is None else norm_weight.data_ptr()
    args.norm_eps = signature.norm_eps or 0.0
    args.dtype, args.mode = DTYPES[signature.dtype], mode
    args.activation = _ACTIVATIONS[signature.activation]
    # A row by itself takes the same way as a row among many.
    args.use_amx = loaded().has_amx and not signature.batch_invariant
    args.num_columns, args.num_features = signature.in_features, signature.out_features
    if bias is None:
        return [norm_weight]
    wide = torch.zeros(-(-signature.out_features // _LANES) * _LANES)
    wide[: signature.out_features] = bias
    args.bias = wide.data_ptr()
    return [norm_weight, wide]


def _kernel(
    run: Callable[..., int], args: LinearArgs | BlockArgs, linear: LinearArgs, kept: object
) -> Product:
    """linear: args, or the part of them that says what x and out are."""

    def kernel(x: torch.Tensor, out: torch.Tensor, _kept: object = kept) -> None:
        linear.x, linear.out = x.data_ptr(), out.data_ptr()
        linear.num_rows, linear.x_stride = x.shape[0], x.stride(0)
        linear.out_stride = out.stride(0)
        if linear.num_rows:
            call(run, args)

    return kernel
