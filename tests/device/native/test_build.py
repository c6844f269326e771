"""Compiled once, tried apart, never from where others may write."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture
def one_small_source(tmp_path, monkeypatch):
    """Real sources take the compiler a quarter of a minute, and do nothing else here."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "trial.c").write_text("int pelton_try(void) { return 0; }\n")
    monkeypatch.setattr(build_module, "_SOURCES", tmp_path / "sources")


@pytest.fixture(scope="module")
def kept() -> Path:
    """The last level's library as every other test has it: from the user's own cache."""
    return build(usable_levels()[-1])


def test_levels_are_distinct_and_need_no_more_than_this_cpu_has():
    assert len({level.name for level in LEVELS}) == len(LEVELS)
    for level in usable_levels():
        assert cpu_flags().issuperset(level.needs)


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_a_second_start_compiles_nothing(own_cache, monkeypatch):
    level = usable_levels()[-1]
    path = build(level)
    assert path.parent == own_cache
    monkeypatch.setattr(build_module, "_compile", None)
    assert build(level) == path
    assert not list(own_cache.glob("*.part"))


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
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
@pytest.mark.usefixtures("one_small_source")
def test_a_folder_that_others_may_write_in_is_passed_over(own_cache, tmp_path, monkeypatch):
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    monkeypatch.setattr(build_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build_module.tempfile, "tempdir", str(tmp_path))
    path = build(usable_levels()[-1])
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o077 == 0


@needs_compiler
def test_without_a_compiler_what_came_with_the_package_is_tried_and_serves(
    kept, own_cache, tmp_path, monkeypatch, caplog
):
    level = usable_levels()[-1]
    monkeypatch.setattr(
        build_module, "_compile", lambda _, level, library: shutil.copyfile(kept, library)
    )
    prebuilt = build_module.prebuild(level, tmp_path / "prebuilt")
    monkeypatch.setattr(build_module, "_PREBUILT", prebuilt.parent)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    found = library_module.library()
    assert found is not None
    assert found.level == level.name, "a level that did not come is passed over"
    assert found.functions.pelton_try() == 0
    assert not caplog.records
    (installed,) = own_cache.iterdir()
    assert installed.read_bytes() == prebuilt.read_bytes()
    # Of other sources it is none of ours.
    prebuilt.rename(prebuilt.with_name(f"{level.name}-0123456789abcdef.so"))
    library_module.library.cache_clear()
    assert library_module.library() is None
    (record,) = caplog.records
    assert "install gcc or clang" in record.message


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_what_came_with_the_package_spares_compiling(tmp_path, monkeypatch):
    level = usable_levels()[-1]
    monkeypatch.setattr(
        build_module, "_PREBUILT", build_module.prebuild(level, tmp_path / "prebuilt").parent
    )
    monkeypatch.setattr(build_module, "_compile", None)
    assert build(level).name.startswith("prebuilt-")


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_what_came_and_does_not_run_here_is_compiled_anew(own_cache, tmp_path, monkeypatch):
    level = usable_levels()[-1]
    prebuilt = build_module.prebuild(level, tmp_path / "prebuilt")
    prebuilt.write_bytes(b"of another C library")
    monkeypatch.setattr(build_module, "_PREBUILT", prebuilt.parent)
    path = build(level)
    assert list(own_cache.iterdir()) == [path]
    assert path.name.startswith(f"{level.name}-")
    path.unlink()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="do not run here"):
        build(level)


def test_a_wheel_without_a_compiler_has_no_kernels_and_says_so(tmp_path):
    root = Path(build_module.__file__).parents[3]
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(
        command, cwd=root, env={"PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lib" / "pelton" / "device" / "native" / "linear.c").exists()
    assert not list(tmp_path.rglob("*.so"))
    for level in LEVELS:
        if level.machine == platform.machine():
            assert f"No kernels of level {level.name} in the wheel: no C compiler" in done.stderr


@needs_compiler
def test_a_compilation_is_told_before_it_begins(one_small_source, own_cache, monkeypatch, caplog):
    told_before: list[str] = []
    compile_all = build_module._compile

    def compile_told(*arguments):
        told_before.append(caplog.text)
        compile_all(*arguments)

    monkeypatch.setattr(build_module, "_compile", compile_told)
    with caplog.at_level(logging.WARNING, "pelton"):
        path = build(usable_levels()[-1])
        build(usable_levels()[-1])
    assert len(told_before) == 1
    assert "Compiling the CPU kernels for this machine, once" in told_before[0]
    assert str(path) in told_before[0]
    assert caplog.text == told_before[0]
