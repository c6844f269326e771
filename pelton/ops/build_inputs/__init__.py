"""build_inputs(rows, step, out): a step's inputs from row state, on the device.

Types and shapes: ops/step_tensors.py. Reads `rows` and `step`, writes every element of `out`.
Source of the method: the input kernels of vLLM's Model Runner V2; docs/step.md has an example.
"""

from pelton.ops.build_inputs.reference import build_inputs

__all__ = ["KERNELS", "build_inputs"]

KERNELS = {
    "cpu": "pelton.ops.build_inputs.cpu:build_inputs",
    "cuda": "pelton.ops.build_inputs.triton:build_inputs",
}
