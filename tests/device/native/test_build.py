"""Compiled once, tried apart, never from where others may write."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import pelton.device.native.build as build_module
import pelton.device.native.cache as cache_module
import pelton.device.native.library as library_module
from pelton.device.native.build import build
from pelton.device.native.cache import BuildError, MachineError
from pelton.device.native.levels import LEVELS, Level, cpu_flags, usable_levels
from pelton.errors import ConfigError

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


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Writes a script and makes it the compiler; it notes each call in a file, which is given."""

    def write(script: str) -> Path:
        path, calls = tmp_path / "cc", tmp_path / "calls"
        path.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return calls

    return write


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
    monkeypatch.setattr(cache_module, "_TRIAL", "import os; os.abort()")
    with pytest.raises(BuildError, match="do not run here: Aborted"):
        build(usable_levels()[-1])
    assert [path.name for path in own_cache.iterdir()] == ["lock"]


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


def test_kernels_can_be_turned_off_and_a_level_that_cannot_be_is_refused(monkeypatch, caplog):
    monkeypatch.setenv("PELTON_CPU_KERNELS", "off")
    assert library_module.library() is None
    assert not caplog.records
    library_module.library.cache_clear()
    absent = "neon" if platform.machine() == "x86_64" else "avx2"
    for name, reason in (
        ("foo", "is not known; use auto, off, or a level: amx, avx512_bf16, avx512, avx2, neon"),
        ("AVX2", "is not known"),
        (absent, "is a level that this CPU does not have; it has "),
    ):
        monkeypatch.setenv("PELTON_CPU_KERNELS", name)
        with pytest.raises(ConfigError, match=f"PELTON_CPU_KERNELS='{name}' {reason}"):
            library_module.library()


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_a_folder_that_others_may_write_in_is_passed_over(own_cache, tmp_path, monkeypatch):
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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
    others = [other.name for other in usable_levels()[:-1]]
    for record in caplog.records:
        assert "install gcc or clang" in record.message
    assert len(caplog.records) == bool(others)
    assert " and ".join(others) in caplog.text
    (installed,) = own_cache.glob("*.so")
    assert installed.read_bytes() == prebuilt.read_bytes()
    # Of other sources it is none of ours.
    prebuilt.rename(prebuilt.with_name(f"{level.name}-0123456789abcdef.so"))
    library_module.library.cache_clear()
    caplog.clear()
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
    assert list(own_cache.glob("*.so")) == [path]
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


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_a_compiler_that_hangs_is_stopped_and_no_other_level_is_tried(
    fake_compiler, tmp_path, monkeypatch, caplog
):
    calls = fake_compiler(f"sleep 60 & echo $! > {tmp_path}/started; wait")
    monkeypatch.setattr(build_module, "_COMPILE_SECONDS", 1.0)
    begin = time.monotonic()
    assert library_module.library() is None
    assert time.monotonic() - begin < 10
    assert len(calls.read_text().splitlines()) == 1
    assert "did not end within 1 seconds and was stopped. torch's serve instead" in caplog.text
    started = Path("/proc", (tmp_path / "started").read_text().strip(), "stat")
    while started.exists() and ") Z " not in started.read_text():
        assert time.monotonic() - begin < 10, "what the compiler started still runs"
        time.sleep(0.01)


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_a_full_temporary_folder_is_the_folders_fault_and_no_other_level_is_tried(
    fake_compiler, caplog
):
    calls = fake_compiler("echo 'error: x.s: No space left on device' >&2; exit 1")
    assert library_module.library() is None
    assert len(calls.read_text().splitlines()) == 1
    assert f"cannot write in {tempfile.gettempdir()}: " in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.skipif(len(usable_levels()) < 2, reason="one level")
def test_a_level_that_fails_is_told_with_its_reason_and_the_one_that_serves(monkeypatch, caplog):
    first, second, *_ = usable_levels()
    serves = library_module.Library(None, second.name, has_amx=False)

    def built(level: Level) -> Path:
        if level is first:
            raise BuildError("cc failed: no such option")
        return Path("second.so")

    monkeypatch.setattr(library_module, "build", built)
    monkeypatch.setattr(library_module, "_load", lambda path, level: serves)
    assert library_module.library() is serves
    (record,) = caplog.records
    assert record.message == (
        f"CPU kernels of level {first.name} are not used: cc failed: no such option. "
        f"Level {second.name} serves instead."
    )


def test_no_lower_level_is_tried_for_what_is_no_fault_of_the_level(monkeypatch, caplog):
    asked = []

    def built(level: Level) -> Path:
        asked.append(level)
        raise MachineError("the folder is full")

    monkeypatch.setattr(library_module, "build", built)
    assert library_module.library() is None
    assert asked == usable_levels()[:1]
    if asked:
        assert f"level {asked[0].name}: the folder is full. torch's serve" in caplog.text
