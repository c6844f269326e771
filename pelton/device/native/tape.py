"""What launches do, written down as calls of C kernels wherever they are nothing else.

A launch is traced once: its Python runs, its kernels do not. If all it does is to call kernels of
our own, these calls stand for it, and neighbours are made by one call of `pelton_replay`. A launch
that computes anything by torch, reads a tensor, or cannot be traced stays a call of its Python, and
raises there what it would raise anyway.

That is right because of what every C kernel promises (calls.py): whatever changes from step to step
it reads from memory. A launch's Python must not decide by what such memory held: to look at it is
work of torch's, so the trace sees it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pelton.device.native.ahead import tell_products
from pelton.device.native.calls import recording
from pelton.device.native.library import Library
from pelton.device.timeline import Timeline, current, name_of

Launch = tuple[Callable[..., object], tuple[Any, ...]]

_FACTORIES = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
)
_LOOKS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "__repr__"})


class _KernelCall(ctypes.Structure):
    """kernel_call of tape.h."""

    _fields_ = (("run", ctypes.c_void_p), ("args", ctypes.c_void_p))


class _TorchWork(Exception):
    """A launch asked torch for more than views and memory."""


class _NoTorchWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views and fresh memory pass. fresh: the tensors of such memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch wraps the method to keep its compiler away, and imports the compiler
        for that: two seconds at every start."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fresh: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias and not alias.is_write for alias in aliases)
        if not is_view and func._schema.name not in _FACTORIES:
            raise _TorchWork(func._schema.name)
        result = func(*args, **(kwargs or {}))
        if not is_view:
            self.fresh.append(result)
        return result


class _NoLook(TorchFunctionMode):
    """Against ways to a tensor's values that no operator stands in."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _LOOKS:
            raise _TorchWork(func.__name__)
        return func(*args, **(kwargs or {}))


class Segment:
    """Calls in order. Holds whatever memory was made for them."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay
        self._functions: list[Any] = []
        self._args: list[ctypes.Structure] = []
        self._kept: list[object] = []
        self._calls: Any = None

    def __len__(self) -> int:
        return len(self._args)

    def add_call(self, function: Any, args: ctypes.Structure, kept: object) -> None:
        self._functions.append(function)
        self._args.append(args)
        self._kept.append(kept)

    def extend(self, other: Segment) -> None:
        self._functions += other._functions
        self._args += other._args
        self._kept += other._kept

    def keep(self, memory: object) -> None:
        self._kept.append(memory)

    def close(self) -> None:
        """No more calls."""
        tell_products(self._args)
        self._calls = (_KernelCall * len(self))(
            *(
                _KernelCall(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(args))
                for function, args in zip(self._functions, self._args, strict=True)
            )
        )

    def hollow(self, nothing: Any) -> None:
        """Every call becomes one of `nothing`."""
        for call in self._calls:
            call.run = ctypes.cast(nothing, ctypes.c_void_p)

    def __call__(self) -> None:
        timeline = current()
        if timeline is None:
            failed = self._replay(self._calls, len(self))
        else:
            failed = self._replay_timed(timeline)
        if failed >= 0:
            name = self._functions[failed].__name__
            raise MemoryError(f"no memory for the work of {name}")

    def _replay_timed(self, timeline: Timeline) -> int:
        """As `pelton_replay`, from Python, so that each call's time is known."""
        size = ctypes.sizeof(_KernelCall)
        for index, function in enumerate(self._functions):
            call = ctypes.byref(self._calls, index * size)
            if timeline.run(function.__name__, self._replay, call, 1) >= 0:
                return index
        return -1


class NativeTape:
    """launches: what is recorded, in order. library: None keeps all of them calls of Python.
    is_hollow: a replay makes every call of a kernel and no kernel runs, nor what stays Python."""

    def __init__(
        self, launches: Sequence[Launch], library: Library | None, *, is_hollow: bool = False
    ) -> None:
        self._launches = tuple(launches)  # and all memory that they were given
        self._steps: list[Segment | Callable[[], object]] = []
        for kernel, args in self._launches:
            segment = None if library is None else _traced(kernel, args, library)
            last = self._steps[-1] if self._steps else None
            if segment is None:
                self._steps.append(functools.partial(kernel, *args))
            elif isinstance(last, Segment):
                last.extend(segment)
            else:
                self._steps.append(segment)
        for step in self._steps:
            if isinstance(step, Segment):
                step.close()
        if is_hollow and library is not None:
            for segment in (step for step in self._steps if isinstance(step, Segment)):
                segment.hollow(library.functions.pelton_no_kernel)
        self._skips_python = is_hollow

    def __len__(self) -> int:
        """Launches."""
        return len(self._launches)

    @property
    def num_python_calls(self) -> int:
        """Launches that stay Python."""
        return sum(not isinstance(step, Segment) for step in self._steps)

    def replay(self) -> None:
        timeline = current()
        for step in self._steps:
            if isinstance(step, Segment):
                step()
            elif self._skips_python:
                continue
            elif timeline is None:
                step()
            else:
                assert isinstance(step, functools.partial)
                timeline.run(name_of(step.func), step)


def _traced(
    kernel: Callable[..., object], args: tuple[Any, ...], library: Library
) -> Segment | None:
    """The calls that a launch is, or None if it is more than that."""
    segment, watch = Segment(library.functions.pelton_replay), _NoTorchWork()
    try:
        with torch.inference_mode(), recording(segment), watch, _NoLook():
            kernel(*args)
    except Exception:
        return None
    segment.keep(watch.fresh)
    return segment
