"""KV pools and per-step metadata of the paged backends."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batch import BatchRig, new_row, padded, plan_of

from pelton.attention.backend import AttentionBackend
from pelton.attention.table import BACKENDS
from pelton.core.kv.spec import KVGroup, LayerKV, page_bytes_of, scale_dtype_of
from pelton.device.fake import FakeDevice
from pelton.device.native.library import library
from pelton.errors import UnsupportedError
from pelton.ops.paged_attention import AttentionSignature
from pelton.ops.qkv_attention import TRITON

SIGNATURE = AttentionSignature(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    scale=0.5,
    dtype=torch.float32,
    device_type="cpu",
)


def backend_of(name: str) -> AttentionBackend:
    module, cls = BACKENDS[name].split(":")
    return getattr(importlib.import_module(module), cls)()


@pytest.fixture(params=[name for name in BACKENDS if not name.startswith("triton")])
def backend(request) -> AttentionBackend:
    if request.param == "native" and library() is None:
        pytest.skip("no library of CPU kernels")
    return backend_of(request.param)


@pytest.mark.parametrize(
    ("dtype", "page_bytes"), [("float32", 2 * 4 * 2 * 8 * 4), ("int8", 2 * 4 * 2 * (8 + 2))]
)
def test_a_pool_is_as_large_as_its_pages_say_and_its_null_block_is_zero(backend, dtype, page_bytes):
    device = FakeDevice()
    spec = LayerKV(
        index=0,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        page_bytes=page_bytes_of(dtype, block_size=4, num_kv_heads=2, head_dim=8),
        dtype=dtype,
        scale_dtype=scale_dtype_of(dtype),
    )
    assert spec.page_bytes == page_bytes
    pools = [backend.allocate(device, spec, n) for n in (3, 7)]
    assert [pool.numel() * pool.element_size() for pool in pools] == [
        3 * spec.page_bytes,
        7 * spec.page_bytes,
    ]
    assert pools[0].stride() == pools[1].stride(), "no stride depends on the number of blocks"
    host = device.host_buffer(tuple(pools[0].shape), pools[0].dtype)
    device.copy_to_host(host, pools[0])
    device.synchronize()
    assert (host[0] == 0).all()


def test_metadata_is_the_groups_view_of_the_batch(backend):
    rig = BatchRig(FakeDevice(), block_sizes=(4, 8))
    rows = [
        new_row(2, range(5), [[3, 4], [9]], num_computed=4),
        new_row(0, range(6), [[5, 6], [8]]),
    ]
    plan = plan_of([(2, 1, 0, True, 4), (0, 6, 0, True, 0)], new_rows=rows)
    batch, _ = rig.start(plan, padded(4, 10))
    for group, (slots, table) in enumerate(
        [
            ([16, 20, 21, 22, 23, 24, 25], [[3, 4], [5, 6], [0, 0], [0, 0]]),
            ([76, 64, 65, 66, 67, 68, 69], [[9], [8], [0], [0]]),
        ]
    ):
        kv_group = KVGroup(index=group, layers=(0,), block_size=(4, 8)[group])
        meta = backend.metadata(rig.device, batch, kv_group, torch.float32)
        rig.device.synchronize()
        # Padding goes to the null block, or is left out by a kernel that can.
        padding = [-1 if backend.name == "native" else 0] * 3
        assert rig.read(meta.kv_slots).tolist() == slots + padding
        assert rig.read(batch.inputs.slot_mappings[group]).tolist() == slots + [-1] * 3
        assert rig.read(meta.block_table).tolist() == table
        assert rig.read(meta.seq_lens).tolist() == [5, 6, 0, 0]
        assert rig.read(meta.query_start_loc).tolist() == [0, 1, 7, 7, 7]
        assert (meta.num_rows, meta.num_decode_rows, meta.bounds_are_exact) == (2, 1, True)
        assert meta.query_lens.tolist() == [1, 6]
        assert meta.seq_len_bounds.tolist() == [5, 6]


def test_metadata_of_a_step_survives_the_next_steps(backend):
    """Case 1: a launched step's metadata may not be that of the next one."""
    rig = BatchRig(FakeDevice())
    group = KVGroup(index=0, layers=(0,), block_size=4)
    outs = []
    for ahead in (False, True):
        device = rig.device
        pool = device.zeros((9, 4, 2, 2, 8), torch.float32)
        device.launch(
            torch.Tensor.copy_,
            pool,
            torch.randn(pool.shape, generator=torch.Generator().manual_seed(3)),
        )
        results = []
        for i, length in enumerate((5, 9, 2)):
            new = new_row(0, range(length), [[i + 1, i + 2, i + 3]], num_computed=length - 1)
            plan = plan_of([(0, 1, 0, True, length - 1)], new_rows=[new])
            batch, staged = rig.start(plan)
            meta = backend.metadata(device, batch, group, torch.float32)
            query = device.zeros((1, 8 * 8), torch.float32)
            device.launch(torch.Tensor.fill_, query, 0.1 * (i + 1))
            cos, sin = (
                device.zeros((1, 1, 8), torch.float32),
                device.zeros((1, 1, 4), torch.float32),
            )
            device.launch(torch.Tensor.fill_, cos, 1.0)
            out = device.empty((1, 4 * 8), torch.float32)
            device.launch(backend.bind(SIGNATURE), 1, query, cos, sin, pool, meta, out)
            staged.release()
            results.append(out)
            if not ahead:
                device.synchronize()
        outs.append([rig.read(out).copy() for out in results])
    assert all(np.isfinite(out).all() for out in outs[0])
    assert all((a == b).all() for a, b in zip(*outs))
    assert not (outs[0][0] == outs[0][1]).all()


def test_what_a_backend_says_of_itself_is_true(backend):
    """returns_lse: the kernel's own word; reads_past_end is proven in test_zeroing and in
    tests/ops/test_paged_attention.py."""
    assert backend.name in BACKENDS
    assert type(backend_of(backend.name)) is type(backend)
    assert backend.reads_past_end == (backend.name == "torch")
    assert backend.returns_lse == (backend.name in ("reference", "invariant"))
    window = replace(SIGNATURE, window=3)
    assert callable(backend.bind(window))


@pytest.mark.parametrize("name", ["triton", "triton_invariant"])
@pytest.mark.parametrize(
    ("lens", "sizes", "expected"),
    [
        # rows, tokens, uniform, shortest, longest
        ([1, 1], None, (2, 2, 1, 1, 1)),
        ([1, 1], (4, 4), (4, 4, 1, 1, 1)),
        ([1, 1], (4, 6), (4, 6, 0, 1, 1)),
        ([3, 6], (4, 10), (4, 10, 0, 3, 6)),
    ],
)
def test_triton_reads_the_batchs_own_tensors(name, lens, sizes, expected):
    backend, rig = backend_of(name), BatchRig(FakeDevice())
    rows = [new_row(i, range(n), [[2 * i + 3, 2 * i + 4]]) for i, n in enumerate(lens)]
    plan = plan_of([(i, n, 0, True, 0) for i, n in enumerate(lens)], new_rows=rows)
    batch, _ = rig.start(plan, *([] if sizes is None else [padded(*sizes)]))
    group = KVGroup(index=0, layers=(0,), block_size=4)
    meta = backend.metadata(rig.device, batch, group, torch.float32)
    assert meta.kv_slots is batch.inputs.slot_mappings[0]
    assert meta.block_table is batch.inputs.block_tables[0]
    shape = meta.prepared["shape"]
    assert backend.refreshes_in_place
    assert not backend.reads_past_end
    assert expected == (
        shape.num_rows,
        shape.num_tokens,
        shape.uniform_query_len,
        shape.min_query_len,
        shape.max_query_len,
    )


def test_triton_refuses_with_every_reason():
    with pytest.raises(UnsupportedError, match="triton: for NVIDIA GPUs"):
        backend_of("triton").bind(SIGNATURE)
    for changes, reason in (
        ({"dtype": torch.float64}, "not in torch.float64"),
        ({"head_dim": 320}, "head_dim is above 256"),
        ({"num_heads": 130, "num_kv_heads": 2}, "more than 64 query heads"),
    ):
        signature = replace(SIGNATURE, device_type="cuda", **changes)
        assert reason in str(TRITON[0].refuses(signature))
