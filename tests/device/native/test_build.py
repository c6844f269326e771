"""Compiled once, tried apart, never from where others may write."""

from __future__ import annotations

import logging
import shutil

import pytest

import pelton.device.native.build as build_module
import pelton.device.native.library as library_module
from pelton.device.native.build import BuildError, build
from pelton.device.native.levels import LEVELS, Level, cpu_flags, usable_levels

needs_compiler = pytest.mark.skipif(
    not shutil.which("cc") or not usable_levels(), reason="no C compiler, or no level for this CPU"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PELTON_CPU_KERNELS", raising=False)
    library_module.library.cache_clear()
    yield tmp_path / "cache" / "pelton"
    library_module.library.cache_clear()


def test_levels_are_distinct_and_need_no_more_than_this_cpu_has():
    assert len({level.name for level in LEVELS}) == len(LEVELS)
    for level in usable_levels():
        assert cpu_flags().issuperset(level.needs)


@needs_compiler
def test_a_second_start_compiles_nothing(own_cache, monkeypatch):
    level = usable_levels()[-1]
    path = build(level)
    assert path.parent == own_cache
    monkeypatch.setattr(build_module, "_compile", None)
    assert build(level) == path
    assert not list(own_cache.glob("*.part"))


@needs_compiler
def test_what_does_not_run_here_is_never_loaded(own_cache, monkeypatch):
    monkeypatch.setattr(build_module, "_TRIAL", "import os; os.abort()")
    with pytest.raises(BuildError, match="do not run here"):
        build(usable_levels()[-1])
    assert not list(own_cache.iterdir())


@needs_compiler
def test_a_compiler_error_is_told():
    with pytest.raises(BuildError, match=r"failed for level bad: .*-mno-such-thing"):
        build(Level("bad", "", (), ("-mno-such-thing",)))


def test_without_a_compiler_the_log_says_once_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert library_module.library() is None
        assert library_module.library() is None
    assert len(caplog.records) == 1
    if usable_levels():
        assert "install gcc or clang" in caplog.text


def test_kernels_can_be_turned_off_and_a_level_that_is_not_there_is_named(monkeypatch, caplog):
    monkeypatch.setenv("PELTON_CPU_KERNELS", "off")
    assert library_module.library() is None
    assert not caplog.records
    library_module.library.cache_clear()
    monkeypatch.setenv("PELTON_CPU_KERNELS", "sse9")
    assert library_module.library() is None
    assert "'sse9'" in caplog.text


@needs_compiler
def test_a_folder_that_others_may_write_in_is_passed_over(own_cache, tmp_path, monkeypatch):
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    monkeypatch.setattr(build_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build_module.tempfile, "tempdir", str(tmp_path))
    path = build(usable_levels()[-1])
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o077 == 0
