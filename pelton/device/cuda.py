"""An NVIDIA GPU: one stream, pinned host memory, CUDA events."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from pelton.device.late_copies import LateCopies
from pelton.device.made import Made, host_made
from pelton.device.memory import cpu_facts
from pelton.device.staging import HostMemory, UsesHostMemory
from pelton.errors import ConfigError

# With as many cores a thread that waits for the device looks at it all the time: woken by the
# system it would go on 0.3 ms later, which is a third of a small model's step.
_SPINNING_CORES = 4
# Of the GPU's memory, the share that a seldom read table must have before it is worth the way over
# the bus, which penalties and n-gram drafts take in each step: a hundredth more KV is not seen.
_COLD_SHARE = 100


class CUDAEvent:
    """spins: whether `wait` keeps its core busy. late_copies: those so far are behind it."""

    def __init__(self, stream: torch.cuda.Stream, spins: bool, late_copies: LateCopies) -> None:
        self._late_copies = late_copies
        self._num_late = late_copies.num_added
        self._event = torch.cuda.Event(blocking=not spins)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()
        self._late_copies.land(self._num_late)


class _SameAddress:
    """Pinned memory for torch to see as device memory: with 64-bit addresses both are one. Keeps
    it, as the tensor made of this does this.

    Source: CUDA programming guide, unified virtual addressing; the CUDA array interface, version 3.
    """

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": host.numpy().dtype.str,
            "data": (host.data_ptr(), False),
            "version": 3,
        }


class CUDARecording:
    """A CUDA graph, launched by one call."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class _Compilers(ThreadPoolExecutor):
    """Threads in which kernels are compiled and loaded: on disk and in the GPU's memory, with the
    C function that launches them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def loaded() -> Any:
            kernel = compiled(*args, **options)
            _ = kernel.run  # looked up, it is loaded
            return kernel

        return super().submit(loaded)


@functools.cache
def import_triton() -> threading.Thread:
    """Imports Triton, if it is there, and has it hash itself: what it keeps on disk it names so,
    and it is 400 MB. Half a second, beside what else a start does."""

    def work() -> None:
        if importlib.util.find_spec("triton") is not None:
            importlib.import_module("triton.runtime.cache").triton_key()

    thread = threading.Thread(target=work, name="triton", daemon=True)
    thread.start()
    return thread


class CUDADevice(UsesHostMemory):
    runs_inline = False
    poisons = False
    records_when_asked = False

    def __init__(self, index: int = 0, staging_mode: str = "auto") -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "device='cuda' needs an NVIDIA GPU and a CUDA build of torch; this machine offers "
                "neither or only one. Use device='cpu'."
            )
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device='cuda:{index}' does not exist: {torch.cuda.device_count()} GPU(s) found."
            )
        self.name = f"cuda:{index}"
        self._is_compiling = False
        self._spins = cpu_facts().num_cores >= _SPINNING_CORES
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        # A graph cannot be captured on the default stream, and what is warm on another (cuBLAS's
        # workspaces) would be made anew in the capture.
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.attach()
        self._side = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.late_copies = LateCopies(self)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        self.made_in_recordings = Made()
        self.host_memory = HostMemory(
            self, staging_mode, cold_bytes=self.memory()[1] // _COLD_SHARE
        )

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        host = torch.zeros(shape, dtype=dtype, pin_memory=True)
        if host.numel() and not host.is_pinned():
            # Confidential computing: torch gives plain memory to who asks for pinned memory.
            raise RuntimeError("pinned memory was asked for, and plain memory given")
        return host

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        if host.numel() == 0:
            return self.empty(tuple(host.shape), host.dtype)
        return torch.as_tensor(_SameAddress(host), device=self.torch_device)

    def attach(self) -> None:
        torch.cuda.set_stream(self._stream)

    def launch(self, kernel: Callable[..., object], *args: Any) -> None:
        kernel(*args)

    def record(self, run: Callable[[], object]) -> CUDARecording:
        """Whatever `run` launches must be warm: no kernel may compile or be loaded in a capture."""
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it empties the allocator's cache and waits, before each one.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        before = self._made()
        try:
            run()
            self.made_in_recordings += self._made() - before
        finally:
            graph.capture_end()
        # The pool lives as long as one of its graphs, and this device's recordings may all be made
        # anew.
        self._first = self._first or graph
        return CUDARecording(graph)

    def _made(self) -> Made:
        stats = torch.cuda.memory_stats(self.torch_device)
        return host_made() + Made(
            allocations=stats["allocation.all.allocated"],
            segments=stats["segment.all.allocated"],
        )

    def memory(self) -> tuple[int, int]:
        """(bytes in use by anybody, bytes there are)."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free, total

    def release_cached(self) -> None:
        """Give back what was freed and kept for the next request."""
        torch.cuda.empty_cache()

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See LateCopies."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._side)
        done.synchronize()

    def record_event(self) -> CUDAEvent:
        return CUDAEvent(self._stream, self._spins, self.late_copies)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        if importlib.util.find_spec("triton") is None:
            yield
            return
        if self._is_compiling:
            yield
            return
        triton = importlib.import_module("triton")
        import_triton().join()
        self._is_compiling = True
        try:
            with _Compilers(self.torch_device) as pool, triton.AsyncCompileMode(pool):
                yield
        finally:
            self._is_compiling = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """torch's own kernels run, on whatever lies in the step's buffers."""
        if importlib.util.find_spec("triton") is None:
            yield
            return
        kernels = importlib.import_module("triton.runtime.jit").JITFunction
        run = kernels.run

        def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *args, warmup=True, **options)

        with self.compiling():
            kernels.run = compile_only
            try:
                yield
            finally:
                kernels.run = run

    def synchronize(self) -> None:
        self._stream.synchronize()
        self.late_copies.land(self.late_copies.num_added)
