from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pelton.ops.linear import reference as linear
from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel

Product = Callable[[ProductSignature, torch.Tensor, torch.Tensor | None], Kernel]


def _after_norm(make_product: Product) -> Callable[..., Kernel]:
    def factory(
        signature: ProductSignature,
        weight: torch.Tensor,
        norm_weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> Kernel:
        assert (norm_weight is None) == (signature.norm_eps is None)
        product = make_product(signature, weight, bias)
        shape = (signature.in_features,)
        eps = signature.norm_eps
        half = signature.out_features // 2

        def normed(x: torch.Tensor) -> torch.Tensor:
            return x if norm_weight is None else F.rms_norm(x, shape, norm_weight, eps)

        def kernel(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
            product(normed(x), scratch)

        def kernel_silu_mul(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
            product(normed(x), scratch)
            torch.mul(F.silu(scratch[:, :half]), scratch[:, half:], out=out)

        def kernel_gelu_tanh_mul(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
            product(normed(x), scratch)
            torch.mul(F.gelu(scratch[:, :half], approximate="tanh"), scratch[:, half:], out=out)

        def kernel_gelu_mul(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
            product(normed(x), scratch)
            torch.mul(F.gelu(scratch[:, :half]), scratch[:, half:], out=out)

        def kernel_gelu(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
            product(normed(x), out)
            out.copy_(F.gelu(out))

        return {
            None: kernel,
            "silu_mul": kernel_silu_mul,
            "gelu_tanh_mul": kernel_gelu_tanh_mul,
            "gelu_mul": kernel_gelu_mul,
            "gelu": kernel_gelu,
        }[signature.activation]

    return factory


matmul = _after_norm(linear.matmul)
matvec = _after_norm(linear.matvec)
tiled = _after_norm(linear.tiled)
