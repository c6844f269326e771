"""Ways to launch a kernel, with a script in its place."""

from __future__ import annotations

from pelton.ops.triton_launch import load


def test_kernels_that_are_still_being_compiled_are_not_loaded():
    """Within Device.compiling `warmup` gives a promise of a kernel, which has nothing to load."""
    loaded = []

    class Compiled:
        @property
        def run(self) -> None:
            loaded.append(self)

    class Kernel:
        def __init__(self, compiled: object) -> None:
            self.warmup = lambda *args, **options: compiled

    load(Kernel(object()), (1, 1))
    assert not loaded
    load(Kernel(Compiled()), (1, 1))
    assert len(loaded) == 1
