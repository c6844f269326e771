"""What is kept is only loaded as it was tried, and is made by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

import pelton.device.native.cache as cache_module
from pelton.device.native.cache import BuildError, FolderError, keep, scratch

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
_NAME = "level-0.so"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    source = folder / "good.c"
    # Long enough that a cut does not only take away what nobody reads.
    source.write_text("char big[1 << 18] = {1};\nint pelton_try(void) { return big[9]; }\n")
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(folder / "good.so")]
    subprocess.run(command, check=True)
    return folder / "good.so"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The two that are asked for, best first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "cache" / "pelton", tmp_path / "tmp" / f"pelton-{os.getuid()}"


@pytest.fixture
def make(good):
    """Counts its calls."""

    def made(kept: Path) -> contextlib.nullcontext[Path]:
        made.calls += 1
        return contextlib.nullcontext(good)

    made.calls = 0
    return made


@pytest.mark.parametrize("has_proof", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 100, 100_000])
def test_a_file_that_was_cut_is_told_removed_and_made_anew(
    make, good, caplog, num_bytes, has_proof
):
    library = keep(_NAME, make)
    library.unlink()  # it may be mapped
    library.write_bytes(good.read_bytes()[:num_bytes])
    if not has_proof:
        library.with_suffix(".sha256").unlink()
    assert keep(_NAME, make) == library
    assert library.read_bytes() == good.read_bytes()
    assert make.calls == 2
    (record,) = caplog.records
    assert f"{library} is removed and made anew: " in record.message
    assert ("not those that were tried" in record.message) == has_proof
    keep(_NAME, make)
    assert make.calls == 2


def test_bytes_that_run_are_not_loaded_unless_they_were_tried(make, good):
    library = keep(_NAME, make)
    library.write_bytes(good.read_bytes() + b"more")
    keep(_NAME, make)
    assert make.calls == 2
    assert library.read_bytes() == good.read_bytes()


def test_a_library_without_a_proof_is_tried_once(make, monkeypatch):
    library = keep(_NAME, make)
    library.with_suffix(".sha256").unlink()
    tried = []
    try_it = cache_module._try
    monkeypatch.setattr(cache_module, "_try", lambda path: (tried.append(path), try_it(path)))
    for _ in range(2):
        assert keep(_NAME, make) == library
    assert tried == [library]
    assert make.calls == 1


def test_a_folder_that_is_full_is_named_and_the_next_one_serves(make, folders, monkeypatch, caplog):
    copy = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if target.parent == folders[0]:
            raise OSError(28, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    library = keep(_NAME, make)
    assert library.parent == folders[1]
    assert make.calls == 1
    (record,) = caplog.records
    assert f"not kept in {folders[0]}: {folders[0]}: No space left" in record.message
    keep(_NAME, make)
    assert make.calls == 1
    assert not list(folders[0].glob("*.part"))


def test_where_no_folder_takes_it_all_are_named(make, folders, tmp_path):
    (tmp_path / "cache").write_text("")
    folders[1].write_text("")
    with pytest.raises(FolderError) as raised:
        keep(_NAME, make)
    assert str(folders[0]) in str(raised.value)
    assert str(folders[1]) in str(raised.value)


def test_a_folder_whose_parent_all_may_write_in_is_not_read(make, folders, tmp_path, caplog):
    keep(_NAME, make)
    (tmp_path / "cache").chmod(0o777)
    assert keep(_NAME, make).parent == folders[1]
    assert f"others than its owner {cache_module._user_name(os.getuid())}" in caplog.text
    assert f"may write in {tmp_path / 'cache'}" in caplog.text
    (tmp_path / "cache").chmod(0o1777)
    assert keep(_NAME, make).parent == folders[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_not_read(make, folders, caplog):
    keep(_NAME, make)
    os.chown(folders[0], 12345, -1)
    assert keep(_NAME, make).parent == folders[1]
    assert f"{folders[0]} belongs to user 12345 and not to root" in caplog.text


def test_a_second_start_waits_for_the_first_and_makes_nothing(make, folders, caplog):
    folders[0].mkdir(parents=True)
    with (folders[0] / "lock").open("a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        found: list[Path] = []
        second = threading.Thread(target=lambda: found.append(keep(_NAME, make)))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert make.calls == 0
        cache_module._put(make(folders[0]).__enter__(), folders[0] / _NAME)
    second.join(30)
    assert found == [folders[0] / _NAME]
    assert make.calls == 1, "by the first"
    assert "Waiting for another process" in caplog.text


def test_what_killed_processes_left_is_removed(make, folders, tmp_path):
    folders[0].mkdir(parents=True)
    (folders[0] / "tmpx.part").write_text("half")
    old, young = (tmp_path / "tmp" / f"pelton-kernels-{age}" for age in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))
    with scratch() as folder:
        assert folder.exists()
    keep(_NAME, make)
    assert not list(folders[0].glob("*.part"))
    assert (old.exists(), young.exists(), folder.exists()) == (False, True, False)


def test_what_does_not_run_says_why_and_is_not_kept(folders, tmp_path):
    (tmp_path / "empty.so").write_bytes(b"")
    with pytest.raises(BuildError, match=r"do not run here: OSError: .*file too short"):
        keep(_NAME, lambda _: contextlib.nullcontext(tmp_path / "empty.so"))
    assert [path.name for path in folders[0].iterdir()] == ["lock"]
