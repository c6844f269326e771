"""Every candidate of paged_attention against float64, with what it must not read poisoned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from support.codes import CODES, decoded

from pelton.device.native.library import library
from pelton.ops.paged_attention import (
    AttentionMetadata,
    AttentionSignature,
    cpu,
    invariant,
    reference,
    sdpa,
)
from pelton.ops.quantise_kv import quantise_kv
from pelton.ops.registry import Kernel

CANDIDATES = {"reference": reference, "sdpa": sdpa, "invariant": invariant}
if library() is not None:
    CANDIDATES["native"] = cpu
READS_PAST_END = {"reference": False, "sdpa": True, "invariant": False, "native": False}
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
)
needs_library = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Row:
    """query: [q, Hq, D]; keys, values: [seq_len, Hk, D], the query tokens' own included."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def piece(self, first: int, end: int) -> Row:
        """Query tokens first:end as a row of their own, what comes later not yet there."""
        earlier = len(self.keys) - len(self.query)
        n = earlier + end
        return Row(self.query[first:end], self.keys[:n], self.values[:n])


def random_row(
    generator: torch.Generator,
    query_len: int,
    seq_len: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Row:
    def draw(n: int, num_heads: int) -> torch.Tensor:
        values = torch.randn(n, num_heads, head_dim, generator=generator, dtype=torch.float64)
        return values.to(dtype)

    return Row(draw(query_len, heads[0]), draw(seq_len, heads[1]), draw(seq_len, heads[1]))


@dataclass
class Batch:
    """Rows laid out in a paged pool; whatever belongs to no row is `garbage`.

    With kv_codes the pool holds codes, and the rows' keys and values become what those stand for.
    slack: how far each host bound lies above the device's length. num_padding: tokens at the end.
    """

    rows: Sequence[Row]
    signature: AttentionSignature
    garbage: float
    block_size: int = 4
    slack: Sequence[int] = ()
    num_padding: int = 0
    seed: int = 0
    sinks: torch.Tensor | None = None
    meta: AttentionMetadata = field(init=False)
    query: torch.Tensor = field(init=False)
    kv: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        signature, size = self.signature, self.block_size
        slack = list(self.slack) or [0] * len(self.rows)
        query_lens = [len(row.query) for row in self.rows]
        seq_lens = [len(row.keys) for row in self.rows]
        bounds = [n + extra for n, extra in zip(seq_lens, slack)]
        num_blocks = [-(-n // size) for n in bounds]
        free = np.random.default_rng(self.seed).permutation(sum(num_blocks) + 3) + 1
        width = max(num_blocks, default=1)
        table = np.zeros((len(self.rows) + 1, width), np.int32)
        shape = (len(free) + 1, size, 2, signature.num_kv_heads, signature.head_dim)
        codes = signature.kv_codes
        if codes is None:
            self.kv = torch.full(shape, self.garbage, dtype=signature.dtype)
        else:
            # As codes and as scales, these bytes are large numbers, or the scales are NaN.
            byte = 255 if math.isnan(self.garbage) else 0x44
            width = 2 * signature.num_kv_heads * (signature.head_dim + 2)
            self.kv = torch.full((*shape[:2], width), byte, dtype=torch.uint8)
        slots: list[int] = []
        stored: list[Row] = []
        for i, row in enumerate(self.rows):
            table[i, : num_blocks[i]], free = free[: num_blocks[i]], free[num_blocks[i] :]
            at = np.arange(seq_lens[i])
            row_slots = table[i, at // size] * size + at % size
            flat = self.kv.flatten(0, 1)
            if codes is None:
                flat[row_slots, 0] = row.keys
                flat[row_slots, 1] = row.values
            else:
                kv = torch.stack([row.keys, row.values], 1).flatten(1)
                flat[row_slots] = quantise_kv(kv, signature.num_kv_heads, codes)
                found, _ = decoded(flat[row_slots], shape[3], shape[4], codes)
                keys, values = torch.from_numpy(found).unbind(1)
                row = Row(row.query, keys, values)
            stored.append(row)
            slots += row_slots[seq_lens[i] - query_lens[i] :].tolist()
        self.rows = stored
        padding = torch.full((self.num_padding, *self.query_shape), torch.nan)
        self.query = torch.cat([*[row.query for row in self.rows], padding.to(signature.dtype)])
        start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        is_single = np.array(query_lens) == 1
        self.meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(np.append(start, start[-1])),
            seq_lens=torch.tensor([*seq_lens, 0], dtype=torch.int32),
            block_table=torch.from_numpy(table),
            kv_slots=torch.tensor(slots + [0] * self.num_padding, dtype=torch.int64),
            num_rows=len(self.rows),
            query_lens=np.array(query_lens, np.int32),
            seq_len_bounds=np.array(bounds, np.int32),
            bounds_are_exact=not any(slack),
            num_decode_rows=len(self.rows) if is_single.all() else int(np.argmin(is_single)),
        )

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.signature.num_heads, self.signature.head_dim

    def run(self, name: str, lse: torch.Tensor | None = None) -> torch.Tensor:
        if name in ("sdpa", "masked"):
            sdpa.prepare(
                self.meta,
                block_size=self.block_size,
                window=self.signature.window,
                dtype=self.signature.dtype,
            )
        # Queries are a view of a wider product, as in a layer.
        wide = torch.full((len(self.query), 99 + self.query[0:1].numel()), torch.nan).to(self.query)
        query = wide[:, 99:].view(self.query.shape)
        query.copy_(self.query)
        kv = self.kv.clone()
        out = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype)
        factory = sdpa.masked_attention if name == "masked" else CANDIDATES[name].paged_attention
        weights = {} if self.sinks is None else {"sinks": self.sinks}
        kernel: Kernel = factory(self.signature, **weights)
        if lse is None:
            kernel(query, kv, self.meta, out)
        else:
            kernel(query, kv, self.meta, out, lse)
        assert torch.equal(query.nan_to_num(), self.query.nan_to_num()), "queries are not changed"
        assert torch.equal(kv.nan_to_num(), self.kv.nan_to_num()), "the pool is not changed"
        return out

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """out [live tokens, Hq, D] and lse [live tokens, Hq] in float64, token by token."""
        signature = self.signature
        out, lse = [], []
        for row in self.rows:
            query, keys, values = (t.double().numpy() for t in (row.query, row.keys, row.values))
            for i, token in enumerate(query):
                end = len(keys) - len(query) + i + 1
                start = 0 if signature.window is None else max(end - signature.window, 0)
                for head in range(signature.num_heads):
                    shared = head * signature.num_kv_heads // signature.num_heads
                    scores = keys[start:end, shared] @ token[head] * signature.scale
                    if signature.softcap is not None:
                        scores = np.tanh(scores / signature.softcap) * signature.softcap
                    if self.sinks is not None:
                        scores = np.append(scores, float(self.sinks[head]))
                    top = scores.max()
                    weights = np.exp(scores - top)
                    weighted = weights[: end - start] @ values[start:end, shared]
                    out.append(weighted / weights.sum())
                    lse.append(top + np.log(weights.sum()))
        shape = (-1, signature.num_heads)
        return np.array(out).reshape(*shape, signature.head_dim), np.array(lse).reshape(shape)


def signature_of(
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> AttentionSignature:
    return AttentionSignature(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        device_type="cpu",
        window=window,
    )


def garbage_for(name: str) -> float:
    return 1e4 if READS_PAST_END[name] else math.nan


# (query length, sequence length): decode rows of one block, at its edges, and long ones that form
# buckets of their own; a fresh prompt; chunks with earlier tokens; a last chunk of a block's end.
MIXED = [(1, 1), (1, 600), (1, 4), (1, 5), (1, 270), (1, 63), (1, 65), (1, 8)]
MIXED += [(2, 2), (3, 9), (7, 7), (8, 12), (9, 73), (17, 17), (16, 130)]


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("window", [None, 1, 6, 70])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_against_float64(head_dim, heads, window, name):
    generator = torch.Generator().manual_seed(0)
    signature = signature_of(heads, head_dim, window=window)
    # All rows with one geometry, a third of them with the others: the float64 side is slow.
    lens = MIXED if (heads, head_dim) == ((4, 2), 16) else MIXED[::3]
    rows = [random_row(generator, q, n, heads, head_dim) for q, n in lens]
    batch = Batch(rows, signature, garbage_for(name), num_padding=3)
    lse = None if name == "sdpa" else torch.full((len(batch.query), heads[0]), torch.nan)
    out = batch.run(name, lse)
    expected, expected_lse = batch.exact()
    live = len(expected)
    np.testing.assert_allclose(out[:live].double().numpy(), expected, rtol=1e-5, atol=1e-5)
    assert (out[live:] == 0).all(), "padding tokens get 0"
    if lse is not None:
        np.testing.assert_allclose(lse[:live].double().numpy(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "masked", "invariant", NATIVE])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_softcap_and_sinks(softcap, has_sinks, window, name):
    generator = torch.Generator().manual_seed(7)
    signature = replace(
        signature_of((6, 2), 16, window=window), softcap=softcap, has_sinks=has_sinks
    )
    rows = [random_row(generator, q, s, (6, 2), 16) for q, s in MIXED]
    sinks = torch.randn(6, generator=generator) * 2 if has_sinks else None
    garbage = 1e4 if name == "masked" else math.nan
    batch = Batch(rows, signature, garbage, num_padding=3, sinks=sinks)
    lse = None if name == "masked" else torch.full((len(batch.query), 6), torch.nan)
    out, expected = batch.run(name, lse), batch.exact()
    n = len(expected[0])
    np.testing.assert_allclose(out[:n].numpy(), expected[0], rtol=1e-5, atol=1e-5)
    assert (out[n:] == 0).all()
    if lse is not None:
        np.testing.assert_allclose(lse[:n].numpy(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CANDIDATES)
def test_dtypes_are_within_the_contract(name, dtype):
    if name == "native" and dtype == torch.float64:
        pytest.skip("not in float64")
    generator = torch.Generator().manual_seed(1)
    rows = [random_row(generator, q, n, (6, 2), 24, dtype) for q, n in MIXED[::2]]
    batch = Batch(rows, signature_of((6, 2), 24, dtype), garbage_for(name), block_size=16)
    lse = None if name == "sdpa" else torch.full((len(batch.query), 6), torch.nan)
    out = batch.run(name, lse)
    expected, expected_lse = batch.exact()
    assert np.abs(out.double().numpy() - expected).max() <= TOLERANCE[dtype]
    if lse is not None:
        # float32 by contract, whatever the inputs.
        error = np.abs(lse.double().numpy() - expected_lse).max()
        assert error <= max(TOLERANCE[dtype], 1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32])
@pytest.mark.parametrize("name", CANDIDATES)
def test_block_sizes(name, block_size):
    generator = torch.Generator().manual_seed(2)
    lens = [(1, 2 * block_size - 1), (1, 2 * block_size), (1, 2 * block_size + 1)]
    lens += [(2, max(block_size, 2)), (5, 5 + block_size), (block_size + 2, block_size + 2)]
    rows = [random_row(generator, q, n, (4, 2), 16) for q, n in lens]
    batch = Batch(rows, signature_of((4, 2), 16), garbage_for(name), block_size=block_size)
    expected, _ = batch.exact()
    np.testing.assert_allclose(batch.run(name).double().numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", CANDIDATES)
def test_host_bounds_may_lie_above_the_lengths(name, window):
    """specs/core.md 1.6: after rejected drafts the host knows only a bound; results stay."""
    generator = torch.Generator().manual_seed(3)
    lens = [(1, 3), (1, 300), (1, 9), (4, 4), (4, 12), (2, 40)]
    rows = [random_row(generator, q, n, (4, 2), 16) for q, n in lens]
    signature = signature_of((4, 2), 16, window=window)
    batch = Batch(rows, signature, garbage_for(name), slack=[3, 40, 0, 2, 5, 70])
    expected, _ = batch.exact()
    np.testing.assert_allclose(batch.run(name).double().numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 5)],
        [(6, 6)],
        [(1, 1)],
        [(3, 9), (1, 7), (2, 2)],
        [(1, 7), (3, 3), (1, 12)],
        [(5, 5), (5, 5), (5, 9), (5, 5), (5, 5), (5, 5), (7, 7)],
        [],
    ],
    ids=str,
)
def test_small_and_unsorted_batches(name, lens):
    """One row, rows of one kind, single query tokens behind longer rows (cut rows), fresh rows of
    one length beside others, and none."""
    generator = torch.Generator().manual_seed(4)
    rows = [random_row(generator, q, n, (4, 2), 16) for q, n in lens]
    batch = Batch(rows, signature_of((4, 2), 16), garbage_for(name), num_padding=2)
    out = batch.run(name)
    if rows:
        np.testing.assert_allclose(
            out[: len(out) - 2].double().numpy(), batch.exact()[0], rtol=0, atol=1e-5
        )
    assert (out[len(out) - 2 :] == 0).all()


def test_large_scores_do_not_overflow():
    generator = torch.Generator().manual_seed(5)
    for name in CANDIDATES:
        rows = [random_row(generator, q, n, (2, 2), 16) for q, n in [(1, 200), (9, 90)]]
        for row in rows:
            row.query *= 300
        batch = Batch(rows, signature_of((2, 2), 16), garbage_for(name))
        out = batch.run(name).double().numpy()
        np.testing.assert_allclose(out, batch.exact()[0], rtol=0, atol=1e-3)


def test_decode_rows_of_very_different_lengths_form_buckets():
    """Otherwise one long row would make all rows gather its length of pages."""
    generator = torch.Generator().manual_seed(6)
    lens = [(1, 1000), (1, 5), (1, 270), (1, 530), (1, 250), (1, 900)]
    batch = Batch(
        [random_row(generator, q, n, (2, 1), 16) for q, n in lens], signature_of((2, 1), 16), 1e4
    )
    out = batch.run("sdpa")
    buckets = batch.meta.prepared["decode"]
    assert [sorted(bucket.rows.tolist()) for bucket in buckets] == [[1, 4], [2, 3], [0, 5]]
    np.testing.assert_allclose(out.double().numpy(), batch.exact()[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "masked"])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"window": 70}, {"kv_codes": torch.int8}])
def test_neighbours_of_one_query_length_are_attended_together(options, name):
    """As rows that verify drafts are: not across other lengths, a fresh row, or very different
    sequence lengths, and no long chunks."""
    generator = torch.Generator().manual_seed(13)
    lens = [(1, 9), (2, 30), (2, 31), (2, 130), (2, 700), (2, 900), (3, 40), (3, 3), (3, 50)]
    lens += [(3, 51), (17, 60), (17, 61)]
    rows = [random_row(generator, q, s, (6, 2), 16) for q, s in lens]
    batch = Batch(rows, replace(signature_of((6, 2), 16), **options), 1e4, num_padding=2)
    out, (expected, _) = batch.run(name), batch.exact()
    np.testing.assert_allclose(out[: len(expected)].numpy(), expected, rtol=1e-5, atol=1e-5)
    shared = [(g.length, g.count) for g in batch.meta.prepared["prefill"] if g.blocks is not None]
    fresh = [(3, 1), (3, 2)] if "window" not in options else [(3, 4)]
    assert shared == [(2, 3), (2, 2), *fresh, (17, 1), (17, 1)]


def test_without_finite_bytes_past_the_end_sdpa_fails():
    """Why attention/zeroing.py exists; were this to pass, zeroing could go."""
    generator = torch.Generator().manual_seed(7)
    rows = [random_row(generator, 1, 5, (2, 1), 16)]
    assert Batch(rows, signature_of((2, 1), 16), math.nan).run("sdpa").isnan().any()


@pytest.mark.parametrize("name", ["reference", "sdpa", "invariant", "masked", NATIVE])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 1.5, "has_sinks": True}])
def test_quantised_against_float64(options, code, dtype, name):
    """Of what is stored: what codes add is that bfloat16 rounds once more."""
    if name == "sdpa" and options.get("softcap"):
        pytest.skip("torch's fused attention has none")
    if name == "native" and dtype == torch.float64:
        pytest.skip("not in float64")
    generator = torch.Generator().manual_seed(10)
    signature = replace(signature_of((6, 2), 24, dtype), kv_codes=CODES[code], **options)
    rows = [random_row(generator, q, s, (6, 2), 24, dtype) for q, s in MIXED[::2]]
    sinks = torch.randn(6, generator=generator).to(dtype) if signature.has_sinks else None
    garbage = 1e4 if name in ("sdpa", "masked") else math.nan
    batch = Batch(rows, signature, garbage, block_size=5, num_padding=3, sinks=sinks)
    out, (expected, _) = batch.run(name), batch.exact()
    live = len(expected)
    tolerance = 3e-2 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    assert np.abs(out[:live].double().numpy() - expected).max() <= tolerance
    assert (out[live:] == 0).all()


# What a code is off by, at most, of a head's largest number: ops/quantise_kv.
CODE_BOUNDS = {"int8": 1 / 253, "float8_e4m3fn": 1 / 15.9, "float8_e5m2": 1 / 7.9}


@pytest.mark.parametrize("code", CODES)
def test_what_codes_cost(code):
    """A score is off by e = scale * |q|_1 * (a key's error) at most, so a weight by a factor of
    exp(2e), and the output by a value's error and (exp(2e) - 1) * the largest value."""
    generator = torch.Generator().manual_seed(11)
    signature = signature_of((4, 2), 16, torch.float64)
    rows = [random_row(generator, q, s, (4, 2), 16, torch.float64) for q, s in MIXED]
    expected, _ = Batch(rows, signature, math.nan).exact()
    out = Batch(rows, replace(signature, kv_codes=CODES[code]), math.nan).run("reference")
    error = np.abs(out.numpy() - expected).max(-1)
    found = []
    for row in rows:
        key, value = (float(t.abs().max()) for t in (row.keys, row.values))
        off = row.query.abs().sum(-1).numpy() * signature.scale * key * CODE_BOUNDS[code]
        found.append(value * CODE_BOUNDS[code] + np.expm1(2 * off) * value)
    assert (error <= np.concatenate(found)).all()
    assert error.max() > CODE_BOUNDS[code] / 20, "codes are read"


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 1), 136)])
def test_native_reads_codes_of_any_size(heads, head_dim, code, dtype):
    """Keys and values of very different sizes, each by its own scale: heads in registers, by way of
    memory, and by tile products. What nobody sees is NaN."""
    generator = torch.Generator().manual_seed(19)
    lens = [(1, 70), (3, 40), (40, 90)]
    rows = [random_row(generator, q, s, heads, head_dim, dtype) for q, s in lens]
    for row in rows:
        for numbers in (row.keys, row.values):
            sizes = torch.randint(-12, 5, (*numbers.shape[:2], 1), generator=generator)
            numbers *= torch.exp2(sizes.float()).to(dtype)
    signature = replace(signature_of(heads, head_dim, dtype), kv_codes=CODES[code])
    batch = Batch(rows, signature, math.nan, block_size=16, num_padding=1)
    lse = torch.full((len(batch.query), heads[0]), torch.nan)
    out, (expected, expected_lse) = batch.run("native", lse), batch.exact()
    size = np.abs(expected).max()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert np.abs(out[:-1].double().numpy() - expected).max() <= tolerance * size
    np.testing.assert_allclose(lse[:-1].numpy(), expected_lse, rtol=1e-5, atol=1e-4)


@needs_library
@pytest.mark.parametrize("query_len", [1, 9, 40])
@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("code", CODES)
def test_native_shows_a_fault_in_codes(code, fault, is_value, query_len):
    """Whoever sees a key or value that is none gets NaN; other heads and other rows do not."""
    generator = torch.Generator().manual_seed(20)
    dtype = torch.bfloat16
    row, other = (random_row(generator, query_len, 70, (6, 2), 64, dtype) for _ in range(2))
    (row.values if is_value else row.keys)[66, 1, 5] = fault
    signature = replace(signature_of((6, 2), 64, dtype), kv_codes=CODES[code])
    out = Batch([row, other], signature, math.nan).run("native")
    assert out[max(query_len - 4, 0) : query_len, 3:].isnan().all()
    assert not out[:, :3].isnan().any()
    assert not out[query_len:].isnan().any()


@needs_library
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "has_sinks": True}])
@pytest.mark.parametrize("window", [None, 1, 6, 70, 200])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 24), ((4, 4), 64), ((8, 1), 136)])
@pytest.mark.parametrize("code", [None, *CODES])
def test_long_rows_in_bfloat16(code, heads, head_dim, window, options):
    """By tile products: fresh and with earlier tokens, around the edges of a step of keys and of a
    block of queries, beside decode rows and short chunks. What nobody sees is NaN."""
    generator = torch.Generator().manual_seed(14)
    lens = [
        (1, 9),
        (1, 300),
        (3, 40),
        (40, 40),
        (32, 128),
        (33, 129),
        (1, 5),
        (50, 261),
        (127, 127),
    ]
    lens = lens if head_dim == 24 and code is None else lens[4:8]
    dtype = torch.bfloat16
    rows = [random_row(generator, q, s, heads, head_dim, dtype) for q, s in lens]
    codes = None if code is None else CODES[code]
    signature = replace(signature_of(heads, head_dim, dtype, window), kv_codes=codes, **options)
    sinks = torch.randn(heads[0], generator=generator) if signature.has_sinks else None
    batch = Batch(rows, signature, math.nan, block_size=5, num_padding=2, sinks=sinks)
    lse = torch.full((len(batch.query), heads[0]), torch.nan)
    out, (expected, expected_lse) = batch.run("native", lse), batch.exact()
    assert np.abs(out[:-2].double().numpy() - expected).max() <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse[:-2].numpy(), expected_lse, rtol=0, atol=1e-4)
    assert (out[-2:] == 0).all()


@needs_library
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 1.5, "has_sinks": True}])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 24), ((2, 2), 64)])
def test_float16(heads, head_dim, options):
    generator = torch.Generator().manual_seed(17)
    dtype = torch.float16
    rows = [random_row(generator, q, n, heads, head_dim, dtype) for q, n in MIXED[:4] + MIXED[-4:]]
    signature = replace(signature_of(heads, head_dim, dtype), **options)
    sinks = torch.randn(heads[0], generator=generator) if signature.has_sinks else None
    batch = Batch(rows, signature, math.nan, block_size=5, num_padding=2, sinks=sinks)
    out, (expected, _) = batch.run("native"), batch.exact()
    assert np.abs(out[:-2].double().numpy() - expected).max() <= 2e-3
    assert (out[-2:] == 0).all()


@needs_library
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("code", [None, *CODES])
def test_few_queries_have_the_bits_of_many(code, dtype, window):
    """The heads of one token stay in registers, those of seven go by way of memory."""
    generator = torch.Generator().manual_seed(18)
    codes = None if code is None else CODES[code]
    signature = replace(signature_of((6, 2), 64, dtype, window), kv_codes=codes)
    row = random_row(generator, 7, 700, (6, 2), 64, dtype)
    together = Batch([row], signature, math.nan).run("native")
    pieces = [Batch([row.piece(i, i + 1)], signature, math.nan).run("native") for i in range(7)]
    assert torch.equal(torch.cat(pieces), together)


@needs_library
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "has_sinks": True}])
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 16), ((6, 2), 96, 5), ((20, 1), 32, 32), ((24, 8), 128, 16)],
)
def test_short_rows_in_bfloat16(heads, head_dim, block_size, window, options):
    """Around the edges of tiles and chunks of keys, one token or a few. What nobody sees is NaN."""
    generator = torch.Generator().manual_seed(18)
    lens = [(1, 1), (1, 16), (1, 33), (3, 31), (1, 63), (1, 257), (7, 262), (2, 2), (1, 520)]
    dtype = torch.bfloat16
    rows = [random_row(generator, q, n, heads, head_dim, dtype) for q, n in lens]
    signature = replace(signature_of(heads, head_dim, dtype, window), **options)
    sinks = torch.randn(heads[0], generator=generator) if signature.has_sinks else None
    batch = Batch(rows, signature, math.nan, block_size=block_size, num_padding=2, sinks=sinks)
    lse = torch.full((len(batch.query), heads[0]), torch.nan)
    out, (expected, expected_lse) = batch.run("native", lse), batch.exact()
    assert np.abs(out[:-2].double().numpy() - expected).max() <= TOLERANCE[dtype] / 2
    np.testing.assert_allclose(lse[:-2].numpy(), expected_lse, rtol=0, atol=1e-4)
    assert (out[-2:] == 0).all()


@needs_library
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_short_rows_token_does_not_see_its_neighbours(dtype, window):
    """The same bits where a thread takes one head of a row and where it takes all, asking for the
    next row's keys meanwhile; rows of one chunk of keys and of two."""
    found, before = library(), torch.get_num_threads()
    assert found is not None
    generator = torch.Generator().manual_seed(22)
    signature = signature_of((9, 3), 64, dtype, window)
    lens = [1, 15, 16, 17, 700, 64, 65, 130, 513, *range(3, 90, 4), 40]
    rows = [random_row(generator, 1, n, (9, 3), 64, dtype) for n in lens]
    try:
        found.set_num_threads(1)
        alone = [Batch([row], signature, math.nan, block_size=16).run("native") for row in rows]
        for count in (1, 2, 3, 40):
            found.set_num_threads(count)
            together = Batch(rows, signature, math.nan, block_size=16, seed=3).run("native")
            assert torch.equal(together, torch.cat(alone))
    finally:
        found.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("codes", [None, torch.int8])
def test_a_long_rows_token_does_not_see_its_neighbours(codes, window):
    """The same bits with any number of threads, at other places of a piece, and among others."""
    found, before = library(), torch.get_num_threads()
    assert found is not None
    generator = torch.Generator().manual_seed(16)
    signature = replace(signature_of((3, 1), 40, torch.bfloat16, window), kv_codes=codes)
    row = random_row(generator, 300, 420, (3, 1), 40, torch.bfloat16)
    other = random_row(generator, 60, 60, (3, 1), 40, torch.bfloat16)
    try:
        found.set_num_threads(1)
        alone = Batch([row], signature, math.nan).run("native")
        for count in (2, 3, 40):
            found.set_num_threads(count)
            together = Batch([other, row], signature, math.nan, block_size=16, seed=3).run("native")
            assert torch.equal(together[60:], alone)
        pieces = [row.piece(first, min(first + 37, 300)) for first in range(0, 296, 37)]
        cut = torch.cat([Batch([piece], signature, math.nan).run("native") for piece in pieces])
        assert torch.equal(cut, alone[: len(cut)])
    finally:
        found.set_num_threads(before)


@pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
@pytest.mark.parametrize("window", [None, 600])
def test_threads_that_split_keys_change_no_bit(window):
    found, before = library(), torch.get_num_threads()
    assert found is not None
    generator = torch.Generator().manual_seed(15)
    row = random_row(generator, 3, 1700, (4, 2), 24)
    sinks = torch.randn(4, generator=generator)
    signature = replace(signature_of((4, 2), 24, window=window), has_sinks=True)
    batch = Batch([row], signature, math.nan, sinks=sinks)
    results = []
    try:
        for count in (1, 2, 3):
            found.set_num_threads(count)
            lse = torch.full((3, 4), torch.nan)
            results.append((batch.run("native", lse), lse))
    finally:
        found.set_num_threads(before)
    expected, expected_lse = batch.exact()
    for out, lse in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-5, atol=1e-5)


HEADS = [(2, 2), (6, 2), (9, 3), (8, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", ["invariant"])
def test_invariant_tokens_do_not_see_their_batch(name, heads, dtype):
    """Bit for bit: alone or among others, in chunks of 1, 3, 8, 16, at other places of a tile, with
    other blocks, other neighbours' bytes, looser bounds and another number of threads."""
    generator = torch.Generator().manual_seed(8)
    signature = signature_of(heads, 24, dtype)
    row = random_row(generator, 37, 150, heads, 24, dtype)
    others = [random_row(generator, q, n, heads, 24, dtype) for q, n in [(1, 9), (1, 200), (5, 70)]]
    alone = Batch([row], signature, math.nan).run(name)
    together = Batch([*others, row], signature, math.nan, block_size=16, seed=5, num_padding=2)
    start = sum(len(other.query) for other in others)
    assert torch.equal(together.run(name)[start : start + 37], alone)
    torch.set_num_threads(2)
    assert torch.equal(together.run(name)[start : start + 37], alone)
    torch.set_num_threads(1)
    loose = Batch([row], signature, math.nan, slack=[77], seed=2)
    assert torch.equal(loose.run(name), alone)
    for chunk in (1, 3, 8, 16, 36):
        pieces = []
        for first in range(0, 37, chunk):
            piece = row.piece(first, min(first + chunk, 37))
            batch = Batch([*others[:2], piece], signature, math.nan, seed=first)
            pieces.append(batch.run(name)[2:])
        assert torch.equal(torch.cat(pieces), alone), chunk


@pytest.mark.parametrize("code", CODES)
def test_invariant_tokens_of_codes_do_not_see_their_batch(code):
    generator = torch.Generator().manual_seed(12)
    signature = replace(signature_of((4, 2), 16), kv_codes=CODES[code])
    row = random_row(generator, 37, 150, (4, 2), 16)
    other = random_row(generator, 5, 70, (4, 2), 16)
    alone = Batch([row], signature, math.nan).run("invariant")
    for chunk in (1, 3, 16):
        pieces = []
        for first in range(0, 37, chunk):
            piece = row.piece(first, min(first + chunk, 37))
            batch = Batch([other, piece], signature, math.nan, block_size=16, seed=first)
            pieces.append(batch.run("invariant")[5:])
        assert torch.equal(torch.cat(pieces), alone), chunk


@pytest.mark.parametrize("name", ["invariant", NATIVE])
def test_invariant_window_tokens_do_not_see_their_batch(name):
    generator = torch.Generator().manual_seed(9)
    signature = signature_of((4, 2), 16, window=70)
    row = random_row(generator, 37, 150, (4, 2), 16)
    alone = Batch([row], signature, math.nan).run(name)
    for chunk in (1, 3, 16):
        pieces = [
            Batch([row.piece(i, min(i + chunk, 37))], signature, math.nan).run(name)
            for i in range(0, 37, chunk)
        ]
        assert torch.equal(torch.cat(pieces), alone), chunk


@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
def test_decode_gathers_the_blocks_of_its_window_only(window):
    """However long the rows are: at most those that `window` tokens in a row can lie in."""
    generator = torch.Generator().manual_seed(0)
    rows = [random_row(generator, 1, n, (4, 2), 16) for n in (70, 71, 72, 73)]
    batch = Batch(rows, signature_of((4, 2), 16, window=window), garbage=math.nan)
    sdpa.prepare(batch.meta, block_size=4, window=window, dtype=torch.float32)
    (bucket,) = batch.meta.prepared["decode"]
    assert len(bucket.blocks) == 4 * (-(-(window - 1) // 4) + 1)
