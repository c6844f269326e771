"""The product ops by kernels of our own on CPU: what linear, linear_add and norm_linear share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pelton.device.native.calls import call
from pelton.device.native.library import LinearArgs, library
from pelton.ops.product import ProductSignature

DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_ACTIVATIONS = {None: 0, "silu_mul": 1, "gelu_tanh_mul": 2}
_LANES = 16
_K_UNIT = 32
STORE, ADD = 0, 1


def takes_native(signature: ProductSignature) -> str | None:
    if signature.device_type != "cpu":
        return "for the CPU"
    if signature.dtype not in DTYPES:
        return f"not in {signature.dtype}"
    if signature.activation is not None and signature.out_features % (2 * _LANES):
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
    found = library()
    assert found is not None
    num_features, num_columns = weight.shape
    size = -(-num_features // _LANES) * _LANES * -(-num_columns // _K_UNIT) * _K_UNIT
    # Where a line begins decides how many cache lines it touches.
    memory = torch.empty(size + 32, dtype=weight.dtype)
    shift = -memory.data_ptr() % 64 // weight.element_size()
    target = memory[shift : shift + size]
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
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """kernel(x, out): x [T, K] and out [T, N], or [T, N / 2] with an activation; rows may be
    strided, their elements not."""
    found = library()
    assert found is not None
    own = packed(weight)
    kept = [own, norm_weight]
    args = LinearArgs(
        weight=own.data_ptr(),
        norm_weight=None if norm_weight is None else norm_weight.data_ptr(),
        norm_eps=signature.norm_eps or 0.0,
        dtype=DTYPES[signature.dtype],
        mode=mode,
        activation=_ACTIVATIONS[signature.activation],
        # A row by itself takes the same way as a row among many.
        use_amx=found.has_amx and not signature.batch_invariant,
        num_columns=signature.in_features,
        num_features=signature.out_features,
    )
    if bias is not None:
        wide = torch.zeros(-(-signature.out_features // _LANES) * _LANES)
        wide[: signature.out_features] = bias
        args.bias = wide.data_ptr()
        kept.append(wide)
    run = found.functions.pelton_linear

    def kernel(x: torch.Tensor, out: torch.Tensor, _kept: object = kept) -> None:
        args.x, args.out = x.data_ptr(), out.data_ptr()
        args.num_rows, args.x_stride = x.shape[0], x.stride(0)
        args.out_stride = out.stride(0)
        if args.num_rows:
            call(run, args)

    return kernel
