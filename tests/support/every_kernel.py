"""Every Triton kernel once, at small odd sizes, each result checked: for compute-sanitizer, under
which a kernel takes a hundred times its time.

    compute-sanitizer --tool memcheck python -m support.every_kernel [GROUP ...]

with the repository and its tests/ in PYTHONPATH. Each tensor is then memory of its own
(PYTORCH_NO_CUDA_MEMORY_CACHING), so that what lies behind it is nobody's. memcheck finds reads and
writes out of bounds, racecheck races in shared memory. Run it without compute-sanitizer before:
kernels are compiled then.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    sys.path.append(str(Path(__file__).parents[1] / "ops"))

import torch
from support.codes import CODES
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
from support.products import ACTIVATIONS, ODD, OPS, TritonProduct
from support.steps import check_drafts, check_no_verification_rows, check_staged_write, check_step
from support.sums import check_add_rows
from support.top import check_keep_top, check_top_k_top_p
from support.triton_recurrent import (
    FEW,
    MANY,
    SINGLE,
    check_conv,
    check_gated_norm,
    check_scan,
)

from pelton.ops.registry import Kernel
from pelton.ops.step_kernels import step_kernel

BF16 = torch.bfloat16


def kernel_of(op: str) -> Kernel:
    return step_kernel(op, "cuda")


def steps() -> None:
    for seed in range(8):
        check_step(kernel_of, seed, "cuda")
        check_drafts(kernel_of, seed, "cuda")
    check_no_verification_rows(kernel_of("verify"), "cuda")
    check_staged_write(kernel_of("staged_write"), "cuda")
    for width in (1, 96, 2100):
        x, weight = torch.randn(5, width, device="cuda"), torch.rand(width, device="cuda")
        out = torch.full_like(x, torch.nan)
        kernel_of("rms_norm")(x, weight, 1e-6, out)
        expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-6)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def head() -> None:
    from pelton.ops.lm_head_sample.triton import drawer, fused

    check_keep_top(kernel_of("keep_top"), vocab=4097, device="cuda")
    for vocab in (1, 8195):
        check_draw(drawer, vocab=vocab, dtype=BF16, device="cuda")
        check_gumbel_argmax(kernel_of("gumbel_argmax"), vocab=vocab, device="cuda")
    for num_rows, sizes in ((1, (130, 72)), (3, (1001, 200)), (16, (300, 64))):
        check_fused(fused, sizes=sizes, num_rows=num_rows, dtype=BF16, device="cuda")
    check_fused(fused, sizes=(130, 72), num_rows=5, dtype=torch.float32, device="cuda")


def stages() -> None:
    check_top_k_top_p(kernel_of("top_k_top_p"), vocab=4097, width=20, device="cuda")
    check_top_k_top_p(kernel_of("top_k_top_p"), vocab=1001, width=70, device="cuda")
    check_candidates(kernel_of("gumbel_argmax"), num_candidates=70, device="cuda")
    check_penalties(kernel_of("penalties"), vocab=101, width=600, device="cuda")
    check_row_tokens(kernel_of("row_tokens"), num_drafts=3, device="cuda")
    check_min_p(kernel_of("min_p"), vocab=4097, device="cuda")
    check_argmax(kernel_of("argmax"), vocab=8195, dtype=BF16, device="cuda")
    check_logprobs(kernel_of("logprobs"), vocab=4097, width=20, dtype=BF16, device="cuda")
    check_judge(kernel_of("judge"), device="cuda")
    check_add_rows(kernel_of("add_rows"), device="cuda")


def recurrent() -> None:
    for rows in (SINGLE, FEW, MANY):
        for ring in (1, 3):
            check_conv(rows, ring=ring, channels=300, num_padding=3, dtype=BF16, device="cuda")
            check_scan(rows, ring=ring, num_padding=3, dtype=BF16, device="cuda")
    check_gated_norm(3, 2, 700, BF16, device="cuda")


def products() -> None:
    rows = {
        "one_row": (1,),
        "few_rows": (2, 3, 17, 40),
        "many_rows": (0, 65),
        "fixed": (1, 3, 70, 130),
    }
    for op, module in OPS.items():
        for name in (c.name for c in module.CANDIDATES if ".triton:" in c.target):
            for dtype, k, m in ((BF16, 1040, 132), (torch.float32, 48, 66)):
                for activation in ACTIVATIONS[op][: 2 if dtype == BF16 else 1]:
                    product = TritonProduct(
                        op, name, k, m, dtype=dtype, device="cuda",
                        activation=activation, has_bias=True,
                    )  # fmt: skip
                    for num_rows in rows[name]:
                        product.check(num_rows, margin=ODD if num_rows == 3 else 0)


def experts() -> None:
    from pelton.ops.moe.triton import few, many

    for case, num_rows in zip((*CASES, "large"), (1, 5, 16, 3, 4, 7, 2, 9)):
        signature = replace(PLAIN, **CASES.get(case, {}), dtype=BF16, device_type="cuda")
        if case == "large":
            signature = replace(
                signature, hidden_size=96, intermediate_size=80, num_experts=64, top_k=8
            )
        check_triton(few, signature, num_rows, 2e-2)
        check_triton(many, signature, 5 * num_rows + 2, 2e-2)


def attention(is_fixed: bool = False) -> None:
    from test_triton_attention import Case

    one = {"dtype": BF16, "device": "cuda", "head_dim": 64, "rotary_dim": 64, "block_size": 16}
    decode = [(1, 1), (1, 70), (1, 17)]
    mixed = [(1, 7), (3, 9), (70, 105)]
    Case(lens=decode, pad_rows=1, pad_tokens=1, **one).check(is_fixed=is_fixed)
    Case(lens=[(1, 1030), (1, 3)], heads=(6, 1), **one).check(is_fixed=is_fixed)
    Case(lens=[(3, 7), (3, 75), (3, 900)], **one).check(is_fixed=is_fixed)
    Case(lens=mixed, pad_rows=2, pad_tokens=3, **one).check(is_fixed=is_fixed)
    Case(
        lens=mixed, window=40, softcap=5.0, has_sinks=True, is_head_major=True, **one
    ).check(is_fixed=is_fixed, times=1)  # fmt: skip
    for code in CODES.values():
        for lens in (decode, mixed):
            Case(lens=lens, kv_codes=code, pad_tokens=2, **one).check(is_fixed=is_fixed)
    if is_fixed:
        return
    Case(lens=[(1, 9), (600, 1100)], heads=(8, 2), **one).check(times=1)
    Case(
        lens=mixed, dtype=torch.float32, device="cuda", head_dim=24, rotary_dim=12, has_norm=False
    ).check()


GROUPS: dict[str, Callable[[], None]] = {
    "steps": steps,
    "head": head,
    "stages": stages,
    "recurrent": recurrent,
    "products": products,
    "experts": experts,
    "attention": attention,
    "fixed_attention": lambda: attention(is_fixed=True),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for group in sys.argv[1:] or GROUPS:
        begin = time.monotonic()
        GROUPS[group]()
        torch.cuda.synchronize()
        print(f"{group}: as they should be, {time.monotonic() - begin:.0f} s", flush=True)
