"""Fill parameters from a source, and prove that nothing is missing, left over or filled twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pelton.checkpoint.name_map import NameMap, NameRules, Rule
from pelton.device.upload import DirectUpload, Upload
from pelton.errors import CheckpointError
from pelton.layers.parameter import Parameter, PartName
from pelton.quant.scheme import Scheme, StoredRows
from pelton.weights.source import WeightSource

# Large tensors are converted in runs of rows of about this many elements, so that the float32
# values between file and parameter stay in the CPU's cache and need no memory of their own.
_CHUNK = 512 * 1024
# On a device where each call costs a launch.
_DEVICE_CHUNK = 64 * 1024 * 1024
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """num_tensors: read into parameters. num_bytes: of the parameters they filled, on this rank.
    dropped: tensors of the checkpoint that were left out on purpose."""

    num_tensors: int
    num_bytes: int
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """One tensor of the source, and a part that it fills. first: row where that part's begin; step:
    from one of its rows to the next. expert: index into a stack, whose rows these are."""

    source: str
    target: str
    part: PartName
    first: int
    step: int
    expert: int | None
    transform: str | None


class _Problems:
    """What is wrong, by kind, so that one error tells all."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, what: str) -> None:
        self._found.setdefault(kind, []).append(what)

    def raise_any(self) -> None:
        if not self._found:
            return
        lines = []
        for kind, items in self._found.items():
            more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
            lines.append(f"{len(items)} {kind}: {', '.join(items[:_SHOWN])}{more}")
        raise CheckpointError("The weights do not fit the model. " + "; ".join(lines) + ".")


def _part_name(target: str, part: PartName) -> str:
    return target if part is None else f"{target} ({part})"


def load_weights(
    parameters: Mapping[str, Parameter],
    source: WeightSource,
    rules: NameRules,
    *,
    head_dim: int,
    scheme: Scheme | None = None,
    upload: Upload | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> LoadReport:
    """Copy this rank's share of every tensor into its parameter, converting to its dtype.

    rules: how the source's names map to the keys of `parameters`. head_dim: rows of one head, for
    the "unpermute" transform. scheme: decides which weights stay in quantised blocks; without one,
    none. upload: how values get into the parameters; None: at once. progress:
    told of the bytes of each part that is read.

    Every part of every parameter must end as loaded, initialised or replaced (see
    Parameter.filled), and every tensor of the source must have been read or dropped on purpose;
    otherwise CheckpointError lists the missing, unexpected, mis-shaped and doubly loaded ones,
    before the first weight is read.
    """
    copies, dropped = _plan(parameters, source, rules)
    if scheme is not None:
        _keep_blocks(parameters, copies, source, scheme)
    upload = upload or DirectUpload()
    total = 0
    try:
        for copy in copies:
            parameter = parameters[copy.target]
            if parameter.tensor.is_meta:
                parameter.mark(copy.part, "elsewhere")
                continue
            if parameter.blocks is None:
                _fill(parameter, copy, source, head_dim, upload)
                num_bytes = parameter.part_tensor(copy.part).nbytes
            else:
                num_bytes = _fill_blocks(parameter, copy, source, head_dim)
            parameter.mark(copy.part, "loaded")
            progress(num_bytes)
            total += num_bytes
    finally:
        upload.finish()
    return LoadReport(num_tensors=len(copies), num_bytes=total, dropped=tuple(dropped))


def _plan(
    parameters: Mapping[str, Parameter], source: WeightSource, rules: NameRules
) -> tuple[list[_Copy], list[str]]:
    """What to copy and what to drop; from names and shapes alone."""
    name_map, problems = NameMap(rules), _Problems()
    names = source.names()
    copies: dict[tuple[str, PartName], _Copy] = {}
    dropped: list[str] = []
    for name in names:
        match = name_map.match(name)
        if match is None:
            problems.add("unexpected", name)
            continue
        rule, target, expert = match
        if rule is None or target is None:
            dropped.append(name)
        elif target not in parameters and rule.tied_to is not None:
            if not _same(source, name, rule.tied_to):
                problems.add("unlike the tensor it is tied to", f"{name} and {rule.tied_to}")
            dropped.append(name)
        elif rule.is_stacked:
            for expert in range(*(source.shape(name)[:1] or (0,))):
                _plan_one(parameters, source, name, rule, target, expert, copies, problems)
        else:
            _plan_one(parameters, source, name, rule, target, expert, copies, problems)
    for target, parameter in parameters.items():
        for part in parameter.parts:
            if part not in parameter.filled and (target, part) not in copies:
                problems.add("missing", _part_name(target, part))
    problems.raise_any()
    return list(copies.values()), dropped


def _plan_one(
    parameters: Mapping[str, Parameter],
    source: WeightSource,
    name: str,
    rule: Rule,
    target: str,
    expert: int | None,
    copies: dict[tuple[str, PartName], _Copy],
    problems: _Problems,
) -> None:
    """expert: whose tensor it is, or which one of a stack is meant."""
    parameter = parameters.get(target)
    parts = rule.parts(expert)
    shown = f"{name}[{expert}]" if rule.is_stacked else name
    if parameter is None or any(part not in parameter.parts for part in parts):
        problems.add("unexpected", shown)
        return
    first = 0
    shape: tuple[int, ...] = ()
    for index, part in enumerate(parts):
        key = target, part
        if key in copies:
            other = copies[key].source
            problems.add("loaded twice", f"{_part_name(*key)} from {other} and {shown}")
            return
        if part in parameter.filled:
            how = parameter.filled[part]
            problems.add(
                "loaded twice", f"{_part_name(*key)} from {shown}, but it is {how} already"
            )
            return
        shape = parameter.parts[part].source_shape
        copies[key] = _Copy(
            source=name,
            target=target,
            part=part,
            first=index if rule.interleaved else first,
            step=len(parts) if rule.interleaved else 1,
            expert=expert if rule.is_stacked else None,
            transform=rule.transform,
        )
        first += shape[0]
    wanted, given = (first, *shape[1:]), source.shape(name)[rule.is_stacked :]
    if rule.transform == "transpose":
        wanted = wanted[::-1]
    if given != wanted:
        problems.add("of the wrong shape", f"{shown} (file {given}, model {wanted})")


def _same(source: WeightSource, name: str, other: str) -> bool:
    if other not in source.names() or source.shape(name) != source.shape(other):
        return False
    rows = source.shape(name)[0]
    return torch.equal(source.read(name, 0, 0, rows), source.read(other, 0, 0, rows))


def _fill(
    parameter: Parameter, copy: _Copy, source: WeightSource, head_dim: int, upload: Upload
) -> None:
    part, out = parameter.parts[copy.part], parameter.part_tensor(copy.part)
    if part.size == 0:
        return
    if copy.expert is not None:
        values = source.read(copy.source, 0, copy.expert, 1)[0]
        values = values.t() if copy.transform == "transpose" else values
        end = copy.first + copy.step * part.source_shape[0]
        values = values[copy.first : end : copy.step].narrow(part.dim, part.start, part.size)
        upload.put(out, values)
        return
    if part.dim != 0:
        assert copy.first == 0, "a tensor of several parts is cut along its rows"
        upload.put(out, source.read(copy.source, part.dim, part.start, part.size))
        return
    unit = head_dim if copy.transform == "unpermute" else 1
    assert part.start % unit == 0, "a cut inside a head"
    assert part.size % unit == 0, "a cut inside a head"
    row = math.prod(part.source_shape[1:])
    chunk = _CHUNK if out.device.type == "cpu" else _DEVICE_CHUNK
    step = max(chunk // max(row * unit, 1), 1) * unit
    for first in range(0, part.size, step):
        rows = min(step, part.size - first)
        values = source.read(copy.source, 0, copy.first + part.start + first, rows)
        if copy.transform == "unpermute":
            values = _unpermute(values, head_dim)
        elif copy.transform == "add_one":
            values = values.float() + 1
        upload.put(out.narrow(0, first, rows), values)


def _keep_blocks(
    parameters: Mapping[str, Parameter],
    copies: Sequence[_Copy],
    source: WeightSource,
    scheme: Scheme,
) -> None:
    """Give the parameters that the scheme takes their memory."""
    by_target: dict[str, list[_Copy]] = {}
    for copy in copies:
        by_target.setdefault(copy.target, []).append(copy)
    for target, group in by_target.items():
        parameter = parameters[target]
        parts = [parameter.parts[copy.part] for copy in group]
        if not (
            parameter.takes_blocks
            and not parameter.tensor.is_meta
            and len(group) == len(parameter.parts)
            and all(copy.transform in (None, "unpermute") for copy in group)
            and all(part.size == part.source_shape[part.dim] for part in parts)
        ):
            continue
        stored = []
        for copy, part in zip(group, parts, strict=True):
            found = source.blocks(copy.source)
            form = None if found is None else found.form
            stored.append(StoredRows(part.dst_start, part.dst_size, form))
        stored.sort(key=lambda rows: rows.first_row)
        blocks = scheme.allocate(parts[0].source_shape[1], stored)
        if blocks is not None:
            parameter.keep_in_blocks(blocks)


def _fill_blocks(parameter: Parameter, copy: _Copy, source: WeightSource, head_dim: int) -> int:
    """Returns the bytes of the file's blocks."""
    part, found = parameter.parts[copy.part], source.blocks(copy.source)
    assert parameter.blocks is not None
    assert found is not None
    rows = found.rows[copy.first : copy.first + part.dst_size]
    if copy.transform == "unpermute":
        rows = _unpermute(rows, head_dim)
    parameter.blocks.pack(part.dst_start, rows)
    return rows.nbytes


def _unpermute(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * (head_dim / 2, 2), ...] -> [heads * (2, head_dim / 2), ...].

    Llama's GGUF files store each head's rows as pairs that rotate together (the interleaved RoPE of
    ggml's "norm" type); the model rotates row j with row j + head_dim / 2.
    """
    pairs = values.view(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
