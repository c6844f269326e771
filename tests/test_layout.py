"""The house rules that import-linter cannot express."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pelton"

# ARCHITECTURE section 2. The contract in pyproject.toml can only name what exists already.
TORCH_FREE = [
    "errors",
    "config",
    "metrics",
    "core",
    "checkpoint",
    "tokens",
    "messages",
    "engine.client",
    "engine.async_llm",
    "engine.coordinator",
    "engine.replicas",
    "setup.check",
    "setup.refusals",
    "server",
    "cli",
]
# Folders of tests that belong to no single room.
BESIDE_ROOMS = {"compose", "replay", "e2e", "support"}


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


def _contract(name: str) -> dict[str, list[str]]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    return next(contract for contract in contracts if contract["id"] == name)


def test_existing_torch_free_modules_stand_in_the_contract() -> None:
    listed = _contract("torch-free")["source_modules"]
    for name in TORCH_FREE:
        path = PACKAGE.joinpath(*name.split("."))
        if path.with_suffix(".py").exists() or _sources(path):
            assert f"pelton.{name}" in listed


def test_every_folder_with_code_is_a_package() -> None:
    for path in _sources(PACKAGE):
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_no_file_is_called_utils() -> None:
    for path in _sources(PACKAGE) + _sources(ROOT / "tests"):
        assert path.stem not in ("utils", "util", "helpers", "common", "misc"), path


def test_test_folders_mirror_rooms() -> None:
    for path in _sources(ROOT / "tests"):
        folder = path.parent.relative_to(ROOT / "tests")
        if folder.parts and folder.parts[0] not in BESIDE_ROOMS:
            assert (PACKAGE / folder).is_dir(), f"{path} mirrors no folder of pelton/"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["serve", "--help"],
        ["bench", "latency", "--help"],
    ],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    """torch costs seconds and numpy 0.2 s; `pelton --help` must answer in 0.3 s."""
    code = (
        "import sys\n"
        "from pelton.cli.main import main\n"
        "try:\n"
        f"    code = main({words!r})\n"
        "except SystemExit as stop:\n"
        "    code = stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'tokenizers', 'jinja2'}\n"
        "print('loaded:', sorted(heavy & sys.modules.keys()))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_scripts_are_executable() -> None:
    for name in ("scripts/demo", "scripts/check", "scripts/test", "scripts/lint", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_a_wheel_holds_every_file() -> None:
    """Sources of kernels and the page's files, too: setuptools takes Python's alone by itself."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    known = subprocess.run(
        ["git", "ls-files", "pelton"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    others = [Path(name) for name in known if not name.endswith(".py")]
    assert len(others) > 10
    for path in others:
        patterns = data.get(".".join(path.parent.parts), [])
        assert any(path.match(pattern) for pattern in patterns), f"{path} is in no wheel"


def test_folders_of_tests_are_gone_when_they_end() -> None:
    code = (
        "import os\n"
        "from support.folders import new_folder\n"
        "path = new_folder('x')\n"
        "if os.fork() == 0:\n"
        "    new_folder('y')\n"
        "    raise SystemExit\n"
        "os.wait()\n"
        "assert path.is_dir()\n"
        "print(path.parent)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests", timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()
