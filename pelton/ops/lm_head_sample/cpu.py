"""By the product's own kernel: a row's sums are compared as they come, and no logit is stored."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import BlockDrawArgs, DrawArgs, loaded
from pelton.ops.block_weight import BlockWeight
from pelton.ops.lm_head_sample import DrawRows, HeadSignature
from pelton.ops.native_product import DTYPES, packed
from pelton.ops.registry import Kernel


def drawn(
    signature: HeadSignature, head: object, weight: torch.Tensor, norm_weight: torch.Tensor
) -> Kernel:
    own = packed(weight)
    args = DrawArgs()
    args.head.weight = own.data_ptr()
    return _kernel(signature, loaded().functions.pelton_draw, args, args, norm_weight, own)


def drawn_blocks(
    signature: HeadSignature, head: object, weight: BlockWeight, norm_weight: torch.Tensor
) -> Kernel:
    """The hidden states are quantised, as in native_product.bind_blocks, however many rows."""
    args, of_weight = BlockDrawArgs(), weight.arguments()
    args.num_runs, args.runs = of_weight.num_runs, of_weight.runs
    run = loaded().functions.pelton_block_draw
    return _kernel(signature, run, args, args.draw, norm_weight, weight)


def _kernel(
    signature: HeadSignature,
    run: Callable[..., int],
    args: DrawArgs | BlockDrawArgs,
    draw: DrawArgs,
    norm_weight: torch.Tensor,
    weight: object,
) -> Kernel:
    """draw: args, or a part of them."""
    draw.head.norm_weight, draw.head.norm_eps = norm_weight.data_ptr(), signature.norm_eps
    draw.head.dtype = DTYPES[signature.dtype]
    # A row by itself takes the same way as a row among many.
    draw.head.use_amx = loaded().has_amx and not signature.batch_invariant
    draw.head.num_columns = signature.hidden_size
    draw.head.num_features = signature.vocab_size

    def kernel(
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
        _kept: object = (weight, norm_weight),
    ) -> None:
        draw.head.x, draw.head.x_stride = hidden.data_ptr(), hidden.stride(0)
        draw.head.num_rows = len(indices)
        draw.indices, draw.slots = indices.data_ptr(), rows.slots.data_ptr()
        draw.positions = rows.positions.data_ptr()
        draw.temperature, draw.seeds = rows.temperature.data_ptr(), rows.seeds.data_ptr()
        draw.out_ids, draw.out_status = out_ids.data_ptr(), out_status.data_ptr()
        if draw.head.num_rows:
            call(run, args)

    return kernel
