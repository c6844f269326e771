"""The kernels around a model's layers in Triton: on a GPU, and a few sizes in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.heads import check_candidates, check_draw, check_fused, check_gumbel_argmax
from support.interpreted import needs_triton, run_interpreted
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

from pelton.ops.step_kernels import step_kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@needs_triton
def test_in_the_interpreter():
    run_interpreted("triton_steps")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_steps(seed):
    check_step(lambda op: step_kernel(op, "cuda"), seed, "cuda")
    check_drafts(lambda op: step_kernel(op, "cuda"), seed, "cuda")


@pytest.mark.gpu
def test_small_ops():
    check_no_verification_rows(step_kernel("verify", "cuda"), "cuda")
    check_staged_write(step_kernel("staged_write", "cuda"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 96, 2048, 4100])
def test_rms_norm(width, dtype):
    x, weight = torch.randn(5, width).to(dtype), torch.rand(width).to(dtype)
    out, expected = torch.full_like(x, torch.nan).cuda(), torch.empty_like(x, dtype=torch.float64)
    step_kernel("rms_norm", "cuda")(x.cuda(), weight.cuda(), 1e-6, out)
    step_kernel("rms_norm", "cpu")(x.double(), weight.double(), 1e-6, expected)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2, 1000, 4097, 151936])
def test_top_k_and_top_p(vocab):
    check_keep_top(step_kernel("keep_top", "cuda"), vocab=vocab, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2, 1000, 4097, 49153, 151936])
def test_few_candidates(vocab):
    for width in (1, 5, 64, 65, 256):
        check_top_k_top_p(
            step_kernel("top_k_top_p", "cuda"), vocab=vocab, width=width, device="cuda"
        )
        check_candidates(step_kernel("gumbel_argmax", "cuda"), num_candidates=width, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [3, 1000, 49153, 151936])
def test_stages_of_the_sampler(vocab):
    for width in (1, 40, 513, 3000):
        check_penalties(step_kernel("penalties", "cuda"), vocab=vocab, width=width, device="cuda")
    check_min_p(step_kernel("min_p", "cuda"), vocab=vocab, device="cuda")
    for dtype in DTYPES:
        check_argmax(step_kernel("argmax", "cuda"), vocab=vocab, dtype=dtype, device="cuda")
        for width in (0, 1, 20, 200):
            check_logprobs(
                step_kernel("logprobs", "cuda"), vocab=vocab, width=min(width, vocab), dtype=dtype,
                device="cuda",
            )  # fmt: skip


@pytest.mark.gpu
def test_tokens_and_status_of_rows():
    for num_drafts in (0, 3):
        check_row_tokens(step_kernel("row_tokens", "cuda"), num_drafts=num_drafts, device="cuda")
    check_judge(step_kernel("judge", "cuda"), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 2, 1023, 8193, 49152, 151936])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_of_logits(dtype, vocab):
    from pelton.ops.lm_head_sample.triton import drawer

    check_draw(drawer, vocab=vocab, dtype=dtype, device="cuda")
    check_gumbel_argmax(step_kernel("gumbel_argmax", "cuda"), vocab=vocab, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16])
@pytest.mark.parametrize("sizes", [(1, 16), (130, 72), (151936, 1024), (49153, 576)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_and_draw(dtype, sizes, num_rows):
    from pelton.ops.lm_head_sample.triton import fused

    check_fused(fused, sizes=sizes, num_rows=num_rows, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, "large"])
def test_few_tokens_through_experts(case, dtype, num_rows):
    from pelton.ops.moe.triton import few

    signature = replace(PLAIN, **CASES.get(case, {}), dtype=dtype, device_type="cuda")
    if case == "large":
        signature = replace(
            signature, hidden_size=256, intermediate_size=192, num_experts=128, top_k=8
        )
    check_triton(few, signature, num_rows, 1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 17, 100, 777, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["gpt-oss", "one of many", "large"])
def test_many_tokens_through_experts(case, dtype, num_rows):
    from pelton.ops.moe.triton import many

    signature = replace(PLAIN, **CASES.get(case, {}), dtype=dtype, device_type="cuda")
    if case == "large":
        num_rows = min(num_rows, 777)  # the oracle goes token by token
        signature = replace(
            signature, hidden_size=128, intermediate_size=96, num_experts=64, top_k=8
        )
    check_triton(many, signature, num_rows, 1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
def test_add_rows():
    check_add_rows(step_kernel("add_rows", "cuda"), "cuda")
