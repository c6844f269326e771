"""Launching Triton kernels, and compiling them when layers are bound."""

from __future__ import annotations

from typing import Any, Protocol


class Launch(Protocol):
    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None: ...


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """What a launch with these arguments needs; in Device.compiling side by side with others."""
    kernel.warmup(*args, grid=grid, **options)


def load(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """The same, and it is in the GPU's memory, unless it is still being compiled."""
    compiled = kernel.warmup(*args, grid=grid, **options)
    getattr(compiled, "run", None)  # looked up, it is loaded
