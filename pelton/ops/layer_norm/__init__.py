"""layer_norm(x, weight, bias, eps, out): out = (x - mean) / sqrt(variance + eps) * weight + bias.

Row by row; the variance is the mean of the squared distances. x, out: [T, H], out may be x; weight:
[H]; bias: [H] or None; of one type. Computed in float32 at least. arXiv 1607.06450.
"""

from pelton.ops.layer_norm.reference import layer_norm

__all__ = ["KERNELS", "layer_norm"]

KERNELS = {
    "cpu": "pelton.ops.layer_norm.cpu:layer_norm",
    "cuda": "pelton.ops.layer_norm.triton:layer_norm",
}
