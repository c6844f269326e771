"""Kernels that are compiled after the start are counted."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from pelton.device.late_compiles import LateCompiles


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_each_is_told(caplog):
    import triton.knobs

    late = LateCompiles()
    late.watch()
    try:
        hook = triton.knobs.runtime.jit_post_compile_hook
        assert hook is not None
        with caplog.at_level(logging.WARNING, "pelton"):
            hook(key="k", repr="r", fn=None, compile={}, is_manual_warmup=False)
    finally:
        late.stop()
    assert len(late.names) == 1
    assert "should have been warm" in caplog.text
    assert triton.knobs.runtime.jit_post_compile_hook is None
