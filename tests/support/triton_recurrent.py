"""The recurrent ops' Triton kernels beside their references in float64. As a program: in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

if __name__ == "__main__":
    import support.interpreter  # noqa: F401

import torch
from support.recurrent import metadata

from pelton.ops.causal_conv import ConvSignature
from pelton.ops.causal_conv.reference import causal_conv as reference_conv
from pelton.ops.gated_norm import GatedNormSignature
from pelton.ops.gated_norm.reference import gated_norm as reference_norm
from pelton.ops.recurrent import RecurrentMetadata
from pelton.ops.selective_scan import ScanSignature
from pelton.ops.selective_scan.reference import selective_scan as reference_scan

SLOTS = 9
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
Rows = Sequence[tuple[int, int, int]]  # (slot, first position, query length)

SINGLE: Rows = [(3, 5, 1), (0, 0, 1), (7, 1, 1), (1, 2, 1), (5, 40, 1)]
FEW: Rows = [(3, 5, 1), (0, 0, 2), (7, 1, 4), (1, 0, 1), (5, 40, 3)]
MANY: Rows = [(3, 5, 1), (2, 9, 1), (0, 0, 70), (7, 3, 130), (1, 1, 9), (5, 0, 64)]


def on(device: str, meta: RecurrentMetadata) -> RecurrentMetadata:
    moved = {
        name: getattr(meta, name).to(device)
        for name in ("idx_mapping", "query_start_loc", "seq_lens")
    }
    # What kernels in Triton are not to look at.
    return replace(meta, **moved, groups=(), num_tokens=-1)


def draw(rows: Rows, width: int, dtype: torch.dtype, num_padding: int, seed: int) -> torch.Tensor:
    """[T, width], a part of a wider product, with NaN in padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(row[2] for row in rows)
    values = torch.randn(num_tokens + num_padding, width + 6, generator=generator).to(dtype)
    values[num_tokens:] = torch.nan
    return values[:, 3 : 3 + width]


def strided(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with gaps between rows."""
    wide = x.new_full((len(x), x.shape[1] + 6), torch.nan).to(device)
    wide[:, 3 : 3 + x.shape[1]] = x.to(device)
    return wide[:, 3 : 3 + x.shape[1]]


def apart(states: torch.Tensor, device: str) -> torch.Tensor:
    """[R, ring, *shape] -> a copy with something else behind each state, as beside a layer's other
    kind of state."""
    flat = states.flatten(2)
    wide = torch.full((*flat.shape[:2], flat.shape[2] + 8), torch.nan, dtype=states.dtype)
    wide = wide.to(device)
    wide[..., : flat.shape[2]] = flat.to(device)
    return wide[..., : flat.shape[2]].unflatten(2, states.shape[2:])


def check_conv(
    rows: Rows,
    *,
    channels: int = 37,
    width: int = 4,
    ring: int = 1,
    has_bias: bool = True,
    num_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    from pelton.ops.causal_conv.triton import causal_conv

    signature = ConvSignature(channels=channels, width=width, dtype=dtype, device_type="cuda")
    x = draw(rows, channels, dtype, num_padding, seed=1)
    weights = {"weight": torch.randn(channels, width).to(dtype)}
    if has_bias:
        weights["bias"] = torch.randn(channels).to(dtype)
    states = torch.randn(SLOTS, ring, width - 1, channels).to(dtype)
    for slot, first, _ in rows:
        if first == 0:
            states[slot] = torch.nan
    meta = metadata(rows, ring=ring, num_padding=num_padding, pad_slot=SLOTS - 1)
    expected, moved = torch.empty(x.shape, dtype=torch.float64), states.double()
    doubles = {name: weight.double() for name, weight in weights.items()}
    reference_conv(replace(signature, dtype=torch.float64), **doubles)(
        x.double(), moved, meta, expected
    )
    found, out = apart(states, device), torch.full_like(x, torch.nan)
    out = strided(out, device)
    kernel = causal_conv(signature, **{name: w.to(device) for name, w in weights.items()})
    kernel(strided(x, device), found, on(device, meta), out)
    error = (out.cpu().double() - expected).abs().max()
    assert error <= TOLERANCE[dtype] * expected.abs().max(), (rows, channels, dtype, error)
    torch.testing.assert_close(found.cpu(), moved.to(dtype), rtol=0, atol=0, equal_nan=True)


def scan_of(
    signature: ScanSignature, device: str, seed: int = 2
) -> tuple[dict[str, torch.Tensor], object]:
    from pelton.ops.selective_scan.triton import selective_scan

    generator = torch.Generator().manual_seed(seed)
    heads = signature.num_heads
    weights = {
        "a_log": torch.rand(heads, generator=generator) * 3,
        "d": torch.randn(heads, generator=generator),
        "dt_bias": torch.randn(heads, generator=generator) - 1,
    }
    return weights, selective_scan(signature, **{n: w.to(device) for n, w in weights.items()})


def scan_inputs(
    signature: ScanSignature, rows: Rows, num_padding: int = 0, seed: int = 0
) -> list[torch.Tensor]:
    """x, dt, b, c."""
    grouped = signature.num_groups * signature.state_size
    widths = (signature.num_heads * signature.head_dim, signature.num_heads, grouped, grouped)
    return [
        draw(rows, width, signature.dtype, num_padding, seed=seed + i)
        for i, width in enumerate(widths)
    ]


def signature_of(
    shape: tuple[int, int, int, int], dtype: torch.dtype, **changes: object
) -> ScanSignature:
    heads, head_dim, groups, size = shape
    return ScanSignature(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size,
        dtype=dtype,
        device_type="cuda",
        **{"dt_limits": (0.0, float("inf")), **changes},  # type: ignore[arg-type]
    )


def check_scan(
    rows: Rows,
    *,
    shape: tuple[int, int, int, int] = (4, 24, 2, 40),
    ring: int = 1,
    num_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    strong: bool = False,
    **changes: object,
) -> None:
    """shape: heads, their dim, groups, state size. strong: tokens that forget all before them,
    beside ones that forget nothing."""
    signature = signature_of(shape, dtype, **changes)
    weights, kernel = scan_of(signature, device)
    x, dt, b, c = scan_inputs(signature, rows, num_padding)
    if strong:
        num_tokens = sum(row[2] for row in rows)
        dt[:num_tokens] = -6.0
        dt[10:20] = 60.0
    states = torch.randn(SLOTS, ring, *shape[:2], shape[3])
    for slot, first, _ in rows:
        if first == 0:
            states[slot] = torch.nan
    meta = metadata(rows, ring=ring, num_padding=num_padding, pad_slot=SLOTS - 1)
    expected, moved = torch.empty(x.shape, dtype=torch.float64), states.double()
    doubles = {name: weight.double() for name, weight in weights.items()}
    reference_scan(replace(signature, dtype=torch.float64), **doubles)(
        *(t.double() for t in (x, dt, b, c)), moved, meta, expected
    )
    found = apart(states, device)
    out = strided(torch.full_like(x, torch.nan), device)
    kernel(*(strided(t, device) for t in (x, dt, b, c)), found, on(device, meta), out)
    error = (out.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], (rows, signature, error)
    found, size = found.cpu().double(), moved.nan_to_num().abs().max()
    assert torch.equal(found.isnan(), moved.isnan())
    error = (found - moved).nan_to_num().abs().max() / size
    assert error <= TOLERANCE[dtype], (rows, signature, error, "states")


def check_fixed_scan(*, length: int, ring: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """With batch_invariant: whole, in any chunks, beside others: the same bits."""
    signature = signature_of((3, 16, 1, 20), dtype, batch_invariant=True)
    _, kernel = scan_of(signature, device)
    inputs = scan_inputs(signature, [(2, 0, length)])
    other = scan_inputs(signature, [(0, 0, 3)], seed=7)
    shape = (SLOTS, ring, signature.num_heads, signature.head_dim, signature.state_size)

    def run(cuts: Sequence[int], with_other: bool) -> tuple[torch.Tensor, torch.Tensor]:
        states, outs = torch.full(shape, torch.nan).to(device), []
        for first, last in pairwise(cuts):
            rows, tokens = [(2, first, last - first)], [t[first:last] for t in inputs]
            if with_other:
                rows = [(1, 0, 3), *rows]
                tokens = [torch.cat([o, t]) for o, t in zip(other, tokens)]
            out = strided(torch.full_like(tokens[0], torch.nan), device)
            kernel(
                *(strided(t, device) for t in tokens),
                states,
                on(device, metadata(rows, ring=ring)),
                out,
            )
            outs.append(out[3:] if with_other else out)
        return torch.cat(outs), states[2]

    whole, states = run([0, length], False)
    for cuts in ([0, 1, 2, length], [0, 3, length // 2, length]):
        for with_other in (False, True):
            out, found = run(cuts, with_other)
            assert torch.equal(out, whole)
            assert torch.equal(found, states)


def check_gated_norm(
    num_rows: int, groups: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    from pelton.ops.gated_norm.triton import gated_norm

    signature = GatedNormSignature(
        num_groups=groups, group_size=size, eps=1e-5, dtype=dtype, device_type="cuda"
    )
    torch.manual_seed(size)
    x, gate = torch.randn(2, num_rows, groups * size).mul_(3).to(dtype)
    weight = torch.rand(groups * size).to(dtype)
    expected = x.double()
    reference_norm(replace(signature, dtype=torch.float64), weight.double())(
        expected, gate.double()
    )
    out = x.to(device, copy=True)
    gated_norm(signature, weight.to(device))(out, strided(gate, device))
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def check_in_interpreter() -> None:
    """Small; the interpreter has no dots in bfloat16."""
    check_conv(SINGLE, num_padding=2)
    check_conv(SINGLE, ring=3, width=2, has_bias=False)
    check_conv(FEW, ring=4, channels=130, num_padding=1)
    check_conv([(3, 2, 20), (0, 0, 1), (4, 0, 9)], ring=2, width=3)
    check_scan(SINGLE, num_padding=2, dtype=torch.float16)
    check_scan(FEW, ring=3, num_padding=1)
    check_scan([(3, 2, 70), (4, 0, 9), (5, 1, 1)], shape=(2, 3, 1, 5), ring=3, num_padding=3)
    check_scan([(3, 2, 70)], shape=(2, 16, 1, 16), dtype=torch.float16, dt_limits=(0.2, 0.9))
    check_scan([(3, 0, 33)], shape=(2, 16, 2, 16), strong=True)
    check_fixed_scan(length=21, ring=3, dtype=torch.float32)
    for num_rows, groups, size in ((0, 1, 4), (3, 1, 50), (2, 3, 17)):
        check_gated_norm(num_rows, groups, size, torch.float32)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_in_interpreter()
