"""A peer that can run in this process, in turns with the engine: transformers, eager.

It is no dependency; where it is not installed, nothing alternates.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch

from pelton.bench.measure import Side
from pelton.checkpoint.embedded import embedded_model
from pelton.core.plan import Int32Array

NAME = "transformers"


class TransformersSide:
    """`model`: a causal language model of transformers, on the CPU."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def generate(self, prompts: Int32Array, output_len: int) -> Int32Array:
        ids = torch.from_numpy(prompts.astype(np.int64))
        made = self._model.generate(
            ids,
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            pad_token_id=0,
            attention_mask=torch.ones_like(ids),
        )
        result: Int32Array = made[:, ids.shape[1] :].int().numpy()
        return result


def open_live() -> dict[str, Side]:
    """The embedded model's shape with random bfloat16 weights, or nothing without transformers.

    Not its weights: transformers would keep GGUF's blocks packed, which is another comparison.
    """
    if importlib.util.find_spec(NAME) is None:
        return {}
    path = embedded_model()
    library = importlib.import_module(NAME)
    config = library.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return {NAME: TransformersSide(model.eval())}
