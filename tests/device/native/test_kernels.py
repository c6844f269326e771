"""The C sources: under the sanitizers, and at every level that this CPU has."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.codes import CODES

import pelton.device.native.library as library_module
from pelton.device.native import build as build_module
from pelton.device.native import cache
from pelton.device.native.build import build
from pelton.device.native.levels import Level, usable_levels
from pelton.ops.linear.cpu import packed
from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature, cpu, reference
from pelton.ops.product import ProductSignature
from pelton.ops.qkv_attention import cpu as qkv_cpu
from pelton.ops.quantise_kv import quantise_kv

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCES = Path(build_module.__file__).parent
pytestmark = pytest.mark.skipif(
    COMPILER is None or not usable_levels(), reason="no C compiler, or no level for this CPU"
)


HERE = Path(__file__).parent
# What each program is of.
PROGRAMS = {
    "check": {path.stem for path in SOURCES.glob("*.c")} - {"blocks", "trial"},
    "check_blocks": {"blocks", "linear", "pool"},
}


def sanitized(level: Level, names: Sequence[str]) -> Path:
    """A folder with the programs, compiled once for all runs: they are kept beside the kernels.

    Only the last level is optimised, for the warnings that need it: without, compiling takes half
    as long, and the sanitizers see every access.
    """
    assert COMPILER is not None
    options = ["-O1" if level == usable_levels()[-1] else "-O0", *level.options]
    options += ["-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    options += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{SOURCES}"]
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr([options, names]).encode() + version)
    for path in sorted([*SOURCES.glob("*.[ch]"), *HERE.glob("*.[ch]")]):
        digest.update(path.read_bytes())
    kept = cache._folders()[0]
    kept.mkdir(parents=True, exist_ok=True)
    folder = kept / f"sanitized-{level.name}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=kept) as name:
        place = Path(name)
        units = sorted(set().union(*(PROGRAMS[name] for name in names)))
        paths = [SOURCES / f"{unit}.c" for unit in units] + [HERE / f"{name}.c" for name in names]
        compiler = [COMPILER, *options]
        build_module._run_all(
            [[*compiler, "-c", str(path), "-o", str(place / f"{path.stem}.o")] for path in paths],
            level,
            place,
            time.monotonic() + 600,
        )
        made = place / "made"
        made.mkdir()
        for name in names:
            objects = [str(place / f"{unit}.o") for unit in sorted({name, *PROGRAMS[name]})]
            link = [*compiler, *objects, "-o", str(made / name), "-lm"]
            build_module._run_all([link], level, place, time.monotonic() + 600)
        for older in kept.glob(f"sanitized-{level.name}-*"):
            shutil.rmtree(older, ignore_errors=True)
        made.rename(folder)
    return folder


@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_no_byte_beyond_what_is_given(level):
    """Blocks by AMX and AVX2: what lies between differs from them in no address."""
    names = tuple(PROGRAMS) if level in usable_levels()[::3] else ("check",)
    folder = sanitized(level, names)
    # Threads of the pool are never joined, and what they hold is no leak. The stack that finds uses
    # after a return is not aligned for vectors of 64 bytes.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    for name in names:
        done = subprocess.run(
            [str(folder / name)], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, name + done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_every_level_multiplies(level, dtype, monkeypatch):
    loaded = library_module._load(str(build(level)), level.name)
    monkeypatch.setattr("pelton.ops.native_product.loaded", lambda: loaded)
    for num_threads in (1, 2):
        loaded.set_num_threads(num_threads)
        for k, n in ((5, 3), (70, 33), (576, 960)):
            weight = torch.randn(n, k).to(dtype)
            signature = ProductSignature(
                in_features=k, out_features=n, dtype=dtype, device_type="cpu"
            )
            kernel = packed(signature, weight)
            for num_rows in (1, 2, 8, 9, 33):
                x = torch.randn(num_rows, k).to(dtype)
                out = torch.full((num_rows, n), torch.nan, dtype=dtype)
                kernel(x, out)
                right = x.double() @ weight.double().T
                error = (out.double() - right).abs().amax() / right.abs().amax()
                assert error <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_every_level_attends(level, dtype, monkeypatch):
    """What the values are is tests/ops/test_paged_attention.py's; here, that levels agree."""
    generator = torch.Generator().manual_seed(0)
    loaded = library_module._load(str(build(level)), level.name)
    monkeypatch.setattr("pelton.ops.paged_attention.cpu.loaded", lambda: loaded)
    lens = [(1, 1), (1, 700), (7, 90), (60, 60)]
    for heads, head_dim, window in (((9, 3), 64, None), ((2, 1), 24, 30), ((8, 1), 136, None)):
        query = torch.randn(69, heads[0], head_dim, generator=generator).to(dtype)
        kv = torch.randn(120, 8, 2, heads[1], head_dim, generator=generator).to(dtype)
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1, 2, 9, 69], dtype=torch.int32),
            seq_lens=torch.tensor([n for _, n in lens], dtype=torch.int32),
            block_table=torch.randperm(120, generator=generator)[:100].expand(4, 100).int(),
            kv_slots=torch.empty(0),
            num_rows=4,
            query_lens=np.array([q for q, _ in lens], np.int32),
            seq_len_bounds=np.array([n for _, n in lens], np.int32),
            bounds_are_exact=True,
            num_decode_rows=2,
        )
        signature = AttentionSignature(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dtype=dtype,
            device_type="cpu",
            window=window,
        )
        pools = {None: kv}
        for codes in CODES.values():
            stored = quantise_kv(kv.flatten(2).flatten(0, 1), heads[1], codes)
            pools[codes] = stored.view(*kv.shape[:2], -1)
        for codes, pool in pools.items():
            signature = replace(signature, kv_codes=codes)
            right = torch.empty(query.shape, dtype=torch.float64)
            wide = replace(signature, dtype=torch.float64)
            exact = pool.double() if codes is None else pool
            reference.paged_attention(wide)(query.double(), exact, meta, right)
            for num_threads in (1, 2, 3):
                loaded.set_num_threads(num_threads)
                out = torch.full(query.shape, torch.nan, dtype=dtype)
                cpu.paged_attention(signature)(query, pool, meta, out)
                error = (out.double() - right).abs().max()
                assert error <= {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(dtype, 2e-3)


@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_every_level_quantises(level, monkeypatch):
    """The reference's bytes: numbers of all sizes, from a code's halves to those that are its
    zero; of a fault the scale is NaN."""
    generator = torch.Generator().manual_seed(0)
    loaded = library_module._load(str(build(level)), level.name)
    monkeypatch.setattr("pelton.ops.qkv_attention.cpu.loaded", lambda: loaded)
    heads, head_dim, num_tokens = 2, 72, 60
    width = (1 + 2 * heads) * head_dim
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        qkv = torch.randn(num_tokens, width, generator=generator)
        qkv *= torch.exp2(-torch.randint(0, 24, qkv.shape, generator=generator).float())
        qkv[0] = 0
        qkv[1, ::3] = torch.randint(-254, 255, qkv[1, ::3].shape, generator=generator) / 2.0
        # Denormal scales; bfloat16's own denormal numbers are 0 (vec.h).
        qkv[2] *= {torch.float32: 1e-36, torch.bfloat16: 1e-29, torch.float16: 1e-4}[dtype]
        qkv = qkv.to(dtype) + 0  # by no angle -0 turns into 0
        cos, sin = torch.ones(num_tokens, 1, head_dim), torch.zeros(num_tokens, 1, head_dim // 2)
        for name, codes in CODES.items():
            signature = AttentionSignature(
                num_heads=1,
                num_kv_heads=heads,
                head_dim=head_dim,
                scale=1.0,
                dtype=dtype,
                device_type="cpu",
                kv_codes=codes,
            )
            kv = torch.full((8, 8, 2 * heads * (head_dim + 2)), 0xA5, dtype=torch.uint8)
            slots = torch.randperm(64, generator=generator)[:num_tokens]
            slots[5] = -1
            store = qkv_cpu.store_qkv(signature)
            store(qkv.clone(), cos.to(dtype), sin.to(dtype), kv, slots)
            right = torch.full_like(kv, 0xA5).flatten(0, 1)
            tokens = quantise_kv(qkv[:, head_dim:].contiguous(), heads, codes)
            right[slots[slots >= 0]] = tokens[slots >= 0]
            assert torch.equal(kv.flatten(0, 1), right), (name, dtype)
            faulty = qkv[:1].clone()
            faulty[0, head_dim + 7], faulty[0, 2 * head_dim + 70] = math.nan, -math.inf
            faulty[0, 3 * head_dim] = 1
            store(faulty, cos[:1].to(dtype), sin[:1].to(dtype), kv, slots[:1])
            scales = kv.flatten(0, 1)[slots[0], -8:].view(torch.bfloat16)
            assert scales.isnan().tolist() == [True, True, False, False]


def test_callers_in_several_threads_do_not_mix_their_rows():
    """Two engines in one process share the pool and its memory."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 70, generator=generator)
    signature = ProductSignature(
        in_features=70, out_features=64, dtype=torch.float32, device_type="cpu"
    )
    inputs = [torch.randn(5 + i, 70, generator=generator) for i in range(3)]
    wrong: list[int] = []

    def work(number: int) -> None:
        kernel, x = packed(signature, weight), inputs[number]
        right = x @ weight.T
        for _ in range(300):
            out = torch.empty(len(x), 64)
            kernel(x, out)
            if not torch.allclose(out, right, rtol=1e-4, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_forked_child_works_alone():
    """It has none of the pool's threads, and must not wait for them."""
    found = library_module.library()
    assert found is not None
    found.set_num_threads(2)
    weight, x = torch.ones(64, 64), torch.ones(40, 64)
    signature = ProductSignature(
        in_features=64, out_features=64, dtype=torch.float32, device_type="cpu"
    )
    kernel, out = packed(signature, weight), torch.empty(40, 64)
    kernel(x, out)
    child = os.fork()
    if child == 0:
        other = torch.zeros(40, 64)
        kernel(x, other)
        os._exit(0 if (other == 64).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
