"""rms_norm(x, weight, eps, out): out = x / sqrt(mean(x ** 2) + eps) * weight, row by row.

x, out: [T, H]; weight: [H]; of one type. Computed in float32 at least. arXiv 1910.07467.
"""

from pelton.ops.rms_norm.reference import rms_norm

__all__ = ["KERNELS", "rms_norm"]

KERNELS = {"cuda": "pelton.ops.rms_norm.triton:rms_norm"}
