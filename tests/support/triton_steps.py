"""The kernels around a model's layers in Triton's interpreter; as a program, in a process of its
own."""

from __future__ import annotations

if __name__ == "__main__":
    import support.interpreter  # noqa: F401

import importlib
from dataclasses import replace
from typing import Any

import torch
from support.heads import check_candidates, check_draw, check_fused, check_gumbel_argmax
from support.logit_stages import (
    check_argmax,
    check_judge,
    check_logprobs,
    check_min_p,
    check_penalties,
    check_row_tokens,
)
from support.moe import CASES, PLAIN, check_triton
from support.steps import check_drafts, check_no_verification_rows, check_staged_write, check_step
from support.sums import check_add_rows
from support.top import check_keep_top, check_top_k_top_p


def kernel_of(op: str) -> Any:
    return getattr(importlib.import_module(f"pelton.ops.{op}.triton"), op)


def check_in_interpreter() -> None:
    """Small sizes; the interpreter has no dots in bfloat16."""
    for seed in range(4):
        check_step(kernel_of, seed)
        check_drafts(kernel_of, seed)
    check_no_verification_rows(kernel_of("verify"))
    check_staged_write(kernel_of("staged_write"))
    keep_top = importlib.import_module("pelton.ops.keep_top.triton")
    # Sorting is slow there.
    keep_top._BLOCK = keep_top._PART = 64
    keep_top._FEW, keep_top._ROOM = 32, 4
    check_keep_top(keep_top.keep_top, vocab=70, kinds=("random", "ties"))
    importlib.import_module("pelton.ops.top_k_top_p.triton")._ROOMS = (16,)
    check_top_k_top_p(kernel_of("top_k_top_p"), vocab=300, width=5, kinds=("ties",))
    check_penalties(kernel_of("penalties"), vocab=50, width=600)
    check_row_tokens(kernel_of("row_tokens"), num_drafts=3)
    check_min_p(kernel_of("min_p"), vocab=70)
    check_argmax(kernel_of("argmax"), vocab=70, dtype=torch.float32)
    importlib.import_module("pelton.ops.logprobs.triton")._BLOCK = 64
    check_logprobs(kernel_of("logprobs"), vocab=300, width=5, dtype=torch.float16)
    check_judge(kernel_of("judge"))
    check_add_rows(kernel_of("add_rows"))
    head = importlib.import_module("pelton.ops.lm_head_sample.triton")
    for vocab in (1, 8200):
        check_draw(head.drawer, vocab=vocab, dtype=torch.float32, max_rows=5)
    noisy = importlib.import_module("pelton.ops.gumbel_argmax.triton")
    check_gumbel_argmax(noisy.gumbel_argmax, vocab=300)
    check_candidates(noisy.gumbel_argmax, num_candidates=5)
    check_fused(head.fused, sizes=(130, 72), num_rows=3, dtype=torch.float16)
    check_fused(head.fused, sizes=(64, 128), num_rows=16, dtype=torch.float32)
    moe = importlib.import_module("pelton.ops.moe.triton")
    for case, num_rows in zip(CASES.values(), (1, 5, 16, 3, 4, 7, 2)):
        signature = replace(PLAIN, **case, intermediate_size=33)
        check_triton(moe.few, signature, num_rows, 1e-5)
        check_triton(moe.many, signature, num_rows + 2, 1e-5)


if __name__ == "__main__":
    check_in_interpreter()
