"""By the product's own kernel: a row's sums are compared as they come, and no logit is stored."""

from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import DrawArgs, LinearArgs, loaded
from pelton.ops.lm_head_sample import DrawRows, HeadSignature
from pelton.ops.native_product import DTYPES, packed
from pelton.ops.registry import Kernel


def drawn(
    signature: HeadSignature, head: object, weight: torch.Tensor, norm_weight: torch.Tensor
) -> Kernel:
    found = loaded()
    own = packed(weight)
    args = DrawArgs(
        head=LinearArgs(
            weight=own.data_ptr(),
            norm_weight=norm_weight.data_ptr(),
            norm_eps=signature.norm_eps,
            dtype=DTYPES[signature.dtype],
            # A row by itself takes the same way as a row among many.
            use_amx=found.has_amx and not signature.batch_invariant,
            num_columns=signature.hidden_size,
            num_features=signature.vocab_size,
        )
    )

    def kernel(
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
        _kept: object = (own, norm_weight),
    ) -> None:
        args.head.x, args.head.x_stride = hidden.data_ptr(), hidden.stride(0)
        args.head.num_rows = len(indices)
        args.indices, args.slots = indices.data_ptr(), rows.slots.data_ptr()
        args.positions = rows.positions.data_ptr()
        args.temperature, args.seeds = rows.temperature.data_ptr(), rows.seeds.data_ptr()
        args.out_ids, args.out_status = out_ids.data_ptr(), out_status.data_ptr()
        if args.head.num_rows:
            call(found.functions.pelton_draw, args)

    return kernel
