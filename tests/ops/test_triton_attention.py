"""qkv_attention by Triton against the reference in float64, with poison in whatever must not be
read: on a GPU the sweep, elsewhere a few cases in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.codes import CODES

from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature, reference
from pelton.ops.qkv_attention import compose
from pelton.ops.qkv_attention.reference import store_qkv
from pelton.ops.quantise_kv import quantise_kv

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
Lens = list[tuple[int, int]]  # (query length, sequence length) of each row


@dataclass(kw_only=True)
class Case:
    lens: Lens
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    rotary_dim: int = 16
    dtype: torch.dtype = torch.float32
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_norm: bool = True
    pad_rows: int = 0
    pad_tokens: int = 0
    device: str = "cpu"
    is_head_major: bool = False
    kv_codes: torch.dtype | None = None
    seed: int = 0
    meta: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        heads, kv_heads = self.heads
        num_tokens = sum(q for q, _ in self.lens)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, dtype=torch.float32)
            return values.to(self.device, self.dtype)

        self.signature = AttentionSignature(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            dtype=self.dtype,
            device_type=self.device,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
            qk_norm_eps=1e-5 if self.has_norm else None,
            kv_codes=self.kv_codes,
        )
        self.norms = {
            name: draw(self.head_dim) * 0.2 + 1 for name in ("q_norm", "k_norm") if self.has_norm
        }
        self.sinks = {"sinks": draw(heads)} if self.has_sinks else {}
        total = num_tokens + self.pad_tokens
        self.qkv = draw(total, (heads + 2 * kv_heads) * self.head_dim)
        self.qkv[num_tokens:] = math.nan
        angle = torch.rand(total, 1, self.rotary_dim // 2, generator=generator) * 6
        self.cos = angle.cos().repeat(1, 1, 2).to(self.device, self.dtype)
        self.sin = angle.sin().to(self.device, self.dtype)
        # The pool: NaN wherever no sequence has an earlier token.
        size = self.block_size
        num_blocks = [-(-n // size) for _, n in self.lens]
        free = np.random.default_rng(self.seed).permutation(sum(num_blocks) + 3) + 1
        table = np.zeros((len(self.lens) + self.pad_rows, max(num_blocks, default=0) + 1), np.int32)
        shape = (len(free) + 1, size, 2, kv_heads, self.head_dim)
        if self.is_head_major:
            kv = torch.empty(shape[0], kv_heads, 2, size, self.head_dim).permute(0, 3, 2, 1, 4)
        else:
            kv = torch.empty(shape)
        if self.kv_codes is not None:
            slot_size = 2 * kv_heads * (self.head_dim + 2)
            self.kv = torch.full((*shape[:2], slot_size), 255, dtype=torch.uint8).to(self.device)
        else:
            self.kv = kv.fill_(math.nan).to(self.device, self.dtype)
        slots: list[int] = []
        for i, (query_len, seq_len) in enumerate(self.lens):
            table[i, : num_blocks[i]], free = free[: num_blocks[i]], free[num_blocks[i] :]
            at = np.arange(seq_len)
            place = torch.from_numpy(table[i, at // size].astype(np.int64)), at % size
            earlier = seq_len - query_len
            stored = draw(earlier, 2, kv_heads, self.head_dim)
            if self.kv_codes is not None:
                stored = quantise_kv(stored.flatten(1), kv_heads, self.kv_codes)
            self.kv[place[0][:earlier], place[1][:earlier]] = stored
            slots += (table[i, at // size] * size + at % size)[earlier:].tolist()
        query_lens = np.array([q for q, _ in self.lens], np.int32)
        start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)

        def on_device(values: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values)).to(self.device, dtype)

        self.meta = AttentionMetadata(
            query_start_loc=on_device([*start, *[start[-1]] * self.pad_rows], torch.int32),
            seq_lens=on_device([n for _, n in self.lens] + [0] * self.pad_rows, torch.int32),
            block_table=on_device(table, torch.int32),
            kv_slots=on_device(slots + [-1] * self.pad_tokens, torch.int64),
            num_rows=len(self.lens),
            query_lens=query_lens,
            seq_len_bounds=np.array([n for _, n in self.lens], np.int32),
            bounds_are_exact=True,
            num_decode_rows=0,
        )

    def run(self, *, is_fixed: bool = False, times: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, pool) of the Triton kernels; more than once: counters are as they were."""
        from pelton.ops.paged_attention.triton import Workspace
        from pelton.ops.qkv_attention.triton import qkv_attention

        kernel = qkv_attention(
            self.signature, Workspace(self.device), **self.norms, **self.sinks, is_fixed=is_fixed
        )
        kv = torch.empty_strided(
            self.kv.shape, self.kv.stride(), dtype=self.kv.dtype, device=self.device
        ).copy_(self.kv)
        out = torch.full(
            (len(self.qkv), self.heads[0] * self.head_dim), math.nan, device=self.device
        ).to(self.dtype)
        for _ in range(times):
            kernel(self.qkv.clone(), self.cos, self.sin, kv, self.meta, out)
        return out, kv

    def exact(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, pool) of the reference in float64. Of codes it reads those that are stored: a
        key's last bits decide between two neighbours."""
        signature = replace(self.signature, dtype=torch.float64)
        sinks = {name: sink.double() for name, sink in self.sinks.items()}
        norms = {name: norm.double() for name, norm in self.norms.items()}
        store = store_qkv(signature, **norms)
        attend = reference.paged_attention(signature, **sinks)
        kv = self.kv.double().contiguous() if self.kv_codes is None else self.kv.clone()

        def attend_stored(query, kv, meta, out):  # type: ignore[no-untyped-def]
            attend(query, kv if self.kv_codes is None else stored, meta, out)

        kernel = compose(signature, attend_stored, store)
        out = torch.full(
            (len(self.qkv), self.heads[0] * self.head_dim), math.nan, device=self.device
        ).double()
        meta = replace(self.meta, kv_slots=self.meta.kv_slots.clamp(min=0))
        kernel(self.qkv.double(), self.cos.double(), self.sin.double(), kv, meta, out)
        return out, kv

    def check(self, *, is_fixed: bool = False, times: int = 2) -> None:
        out, kv = self.run(is_fixed=is_fixed, times=times)
        expected, expected_kv = self.exact(kv)
        error = (out.double() - expected).abs().max().item() if len(out) else 0.0
        assert error <= TOLERANCE[self.dtype], f"{self}: {error}"
        num_tokens = len(out) - self.pad_tokens
        assert (out[num_tokens:] == 0).all(), "padding tokens get 0"
        slots = self.meta.kv_slots[:num_tokens]
        stored = torch.zeros(kv.shape[:2], dtype=torch.bool, device=kv.device)
        stored.view(-1)[slots] = True
        if self.kv_codes is None:
            torch.testing.assert_close(
                kv[stored].double(), expected_kv[stored], rtol=TOLERANCE[self.dtype], atol=1e-2
            )
        torch.testing.assert_close(kv[~stored], self.kv[~stored], rtol=0, atol=0, equal_nan=True)


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return pytest.mark.gpu(skip(test))


def _gpu(**changes: object) -> Case:
    return Case(device="cuda", **changes)  # type: ignore[arg-type]


LENGTHS = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4097]
HEADS = [(8, 8), (8, 4), (16, 4), (14, 2), (6, 1), (16, 1)]


@needs_gpu
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((8, 2), torch.float32), ((8, 2), torch.float16), *[(h, torch.bfloat16) for h in HEADS]],
    ids=str,
)
@pytest.mark.parametrize("phase", ["decode", "verify", "mixed"])
def test_lengths_and_heads(phase, heads, dtype, is_fixed):
    lens = {
        "decode": [(1, n) for n in LENGTHS],
        "verify": [(4, n + 3) for n in LENGTHS],
        "mixed": [(1, 1), (1, 300), (2, 40), (3, 3), *[(n, n) for n in LENGTHS[1:]],
                  (65, 700), (129, 129 + 64), (16, 2000)],
    }[phase]  # fmt: skip
    pads = {"decode": (3, 3), "verify": (2, 8), "mixed": (5, 11)}[phase]
    _gpu(
        lens=lens, heads=heads, head_dim=64, rotary_dim=64, dtype=dtype, block_size=16,
        pad_rows=pads[0], pad_tokens=pads[1],
    ).check(is_fixed=is_fixed)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(80, torch.float32), (256, torch.float32), (128, torch.float16)]
    + [(d, torch.bfloat16) for d in (64, 80, 96, 128, 256)],
    ids=str,
)
def test_head_dims(head_dim, dtype, is_fixed):
    variants = [{}, {"rotary_dim": head_dim // 2}, {"has_norm": False}]
    # Few tokens in all, many of a step's own, and many with a long prefix have tiles of their own.
    chunks = [[(1, 9), (1500, 1500), (700, 900)], [(1, 40), (2100, 6000)]]
    lens_of = [[(1, 700), (1, 3)], [(1, 9), (70, 70), (200, 500)], [(2, 50), (2, 900)]]
    for lens in lens_of + chunks * (dtype == torch.bfloat16):
        for options in variants if head_dim == 80 else variants[:1]:
            _gpu(
                **{"lens": lens, "heads": (8, 2), "head_dim": head_dim, "rotary_dim": head_dim,
                   "dtype": dtype, "block_size": 16, **options}
            ).check(is_fixed=is_fixed)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, True), (20.0, False), (5.0, True)])
def test_window_softcap_and_sinks(softcap, has_sinks, window, is_fixed):
    for dtype in (torch.float32, torch.bfloat16) if window else (torch.float32,):
        for lens in ([(1, 700), (1, 3), (1, 1)], [(1, 9), (70, 70), (200, 1500)], [(2, 900)]):
            _gpu(
                lens=lens, heads=(8, 2), head_dim=64, rotary_dim=64, dtype=dtype, block_size=16,
                window=window, softcap=softcap, has_sinks=has_sinks, pad_tokens=2,
            ).check(is_fixed=is_fixed)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", CODES)
def test_quantised_keys_and_values(code, dtype, is_fixed):
    """Of a step's own tokens what was stored is read, too."""
    for lens in ([(1, 700), (1, 3), (1, 1)], [(1, 9), (70, 70), (200, 500)], [(2, 50), (2, 900)]):
        _gpu(
            lens=lens, heads=(8, 2), head_dim=64, rotary_dim=64, dtype=dtype, block_size=16,
            kv_codes=CODES[code], pad_tokens=2,
        ).check(is_fixed=is_fixed)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("code", CODES)
def test_codes_and_scales_are_those_of_the_reference(code):
    """Bit for bit, of the same rotated keys; a head with a NaN or an infinity is NaN."""
    case = _gpu(
        lens=[(40, 40)], heads=(8, 2), head_dim=64, rotary_dim=64, dtype=torch.bfloat16,
        block_size=16, kv_codes=CODES[code], has_norm=False,
    )  # fmt: skip
    case.cos.fill_(1)
    case.sin.fill_(0)
    case.qkv[1, 8 * 64 + 3] = math.nan
    case.qkv[2, 9 * 64 + 5] = math.inf
    case.qkv[3, 10 * 64 :].zero_()
    _, kv = case.run()
    found = kv.flatten(0, 1)[case.meta.kv_slots]
    expected = quantise_kv(case.qkv[:, 8 * 64 :], 2, CODES[code])
    bad = torch.zeros_like(found, dtype=torch.bool)
    bad[1, :64], bad[2, 64:128] = True, True  # codes behind a scale of NaN
    bad[1, 256:258], bad[2, 258:260] = True, True
    assert torch.equal(found[~bad], expected[~bad])
    assert found[:, 256:].view(torch.bfloat16)[[1, 2], [0, 1]].isnan().all()


@needs_gpu
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 64, 128])
def test_block_sizes_and_layouts(block_size):
    for is_head_major in (False, True):
        for lens in ([(1, 700), (1, 3), (1, 1)], [(1, 9), (70, 70), (200, 500)]):
            _gpu(
                lens=lens, heads=(8, 2), head_dim=128, rotary_dim=128, dtype=torch.bfloat16,
                block_size=block_size, is_head_major=is_head_major,
            ).check()  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_fixed_splits_give_a_token_the_same_bits_everywhere(window, dtype):
    """As a decode row alone (splits by programs), among others (by one program), in a chunk."""
    whole = _gpu(
        lens=[(1500, 1500)], heads=(8, 2), head_dim=64, rotary_dim=64, dtype=dtype,
        block_size=16, window=window,
    )  # fmt: skip
    out, kv = whole.run(is_fixed=True)
    for first, end in ((1499, 1500), (1400, 1403), (1000, 1500), (513, 600), (0, 1), (511, 512)):
        for copies in (1, 70):
            part = _gpu(
                lens=[(end - first, end)] * copies, heads=(8, 2), head_dim=64, rotary_dim=64,
                dtype=dtype, block_size=16, window=window,
            )  # fmt: skip
            # All rows have the same tokens, each in blocks of its own.
            part.norms = whole.norms
            n = end - first
            for name in ("qkv", "cos", "sin"):
                values = getattr(whole, name)[first:end]
                setattr(part, name, values.repeat(copies, *[1] * (values.dim() - 1)))
            table, size = whole.meta.block_table[0].long(), 16
            for row in range(copies):
                blocks = part.meta.block_table[row].long()
                count = -(-end // size)
                part.kv[blocks[:count]] = kv[table[:count]]
            found, _ = part.run(is_fixed=True)
            for row in range(copies):
                assert torch.equal(found[row * n : row * n + n], out[first:end]), (first, copies)


@needs_gpu
def test_the_first_step_loads_what_chunks_will_need():
    """Kernels for chunks with long prefixes and for rows beside them: later steps compile none."""
    from pelton.ops.paged_attention.launch import Workspace
    from pelton.ops.paged_attention.triton_decode import decode
    from pelton.ops.paged_attention.triton_prefill import prefill
    from pelton.ops.qkv_attention.triton import qkv_attention

    def count() -> int:
        return sum(len(cache[0]) for k in (decode, prefill) for cache in k.device_caches.values())

    common = {"heads": (12, 4), "head_dim": 64, "rotary_dim": 64, "dtype": torch.bfloat16}
    counts = []
    for lens in ([(100, 100)], [(1, 40), (100, 900)], [(1, 30), (300, 300)], [(400, 7000)]):
        case = _gpu(lens=lens, block_size=16, **common)
        if not counts:
            counts.append(count())
            kernel = qkv_attention(case.signature, Workspace("cuda"), **case.norms)
        kernel(case.qkv, case.cos, case.sin, case.kv, case.meta, torch.empty_like(case.qkv))
        counts.append(count())
    assert counts[1] > counts[0]
    assert counts[2:] == [counts[1]] * 3


@needs_gpu
@pytest.mark.parametrize("heads", [(8, 2), (8, 4)])
@pytest.mark.parametrize(
    "lens", [[(1, 40), (300, 310), (1700, 1700), (77, 77)], [(1, 9), (33, 40), (3100, 3110)]]
)
def test_keys_of_the_step_itself_in_tiles_of_all_sizes(lens, heads):
    """Of steps with short rows, and with a long one, by the copy engine."""
    from pelton.ops.paged_attention.launch import StepShape, Workspace
    from pelton.ops.paged_attention.triton import TritonAttention

    case = _gpu(
        lens=lens, heads=heads, head_dim=128, rotary_dim=128, dtype=torch.bfloat16, block_size=16
    )
    attention = TritonAttention(case.signature, Workspace("cuda"))
    assert attention.fresh(StepShape.of(case.meta, len(case.qkv)), case.qkv) is not None
    case.check()


@needs_gpu
@pytest.mark.parametrize("num_singles", [1, 63, 64, 150])
def test_many_rows_of_one_token_before_chunks(num_singles):
    """Of these one kernel takes the first, and another one finds where the first chunk begins."""
    lens = [(1, 1 + i % 40) for i in range(num_singles)] + [(70, 90), (300, 300)]
    _gpu(lens=lens, heads=(4, 2), head_dim=128, rotary_dim=128, dtype=torch.bfloat16).check()


def _in_interpreter() -> None:
    """What the interpreter runs: small, since it is slow. Its bfloat16 is cut off, not rounded, so
    quantised keys and values are for a GPU alone."""
    one = {"heads": (2, 1)}
    Case(lens=[(1, 1), (1, 70)], pad_rows=1, pad_tokens=1, **one).check()
    Case(lens=[(1, 140)], window=66, softcap=3.0, has_sinks=True, **one).check(times=1)
    Case(lens=[(3, 7), (3, 75)], heads=(3, 1), head_dim=24, rotary_dim=12).check(times=1)
    mixed = {"lens": [(1, 7), (3, 9), (70, 105)], "pad_rows": 2, "pad_tokens": 3, **one}
    Case(**mixed, has_norm=False).check(times=1)
    Case(**mixed, window=6, has_sinks=True, is_head_major=True).check(times=1)
    Case(lens=[(1, 7), (40, 75)], heads=(4, 2), dtype=torch.float16, softcap=3.0).check(times=1)
    # By splits of many programs, and by one program.
    Case(lens=[(1, 530), (1, 3)], **one).check(is_fixed=True)
    Case(**mixed, window=40).check(is_fixed=True, times=1)


def test_a_few_cases_in_the_interpreter():
    pytest.importorskip("triton")
    code = "import support.interpreter, test_triton_attention as t; t._in_interpreter()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
