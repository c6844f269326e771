from __future__ import annotations

from pathlib import Path

import pytest

from pelton.cli import serve
from pelton.cli.config_file import read_config
from pelton.cli.main import main
from pelton.config.engine import EngineArgs
from pelton.config.server import ServerArgs
from pelton.errors import ConfigError

KNOWN = ["model", "max_model_len", "port", "api_key"]


def test_names_with_dashes_or_underscores(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 128\nport: 9\napi_key: [a, b]\n")
    assert read_config(str(file), KNOWN) == {"max_model_len": 128, "port": 9, "api_key": ["a", "b"]}
    file.write_text("")
    assert read_config(str(file), KNOWN) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length: 1", "did you mean max-model-len?"),
        ("zzz: 1", "unknown flag 'zzz'"),
        ("- a", "flag: value"),
        ("a: [", "while parsing"),
        ("port: 1\nport: 2\nmax-model-len: 1\nmax_model_len: 2", "twice"),
        ("!!python/object/apply:os.system ['true']", "constructor"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(str(file), KNOWN)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(str(tmp_path / "absent.yaml"), KNOWN)


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[EngineArgs, ServerArgs]] = []

    def fake_serve(engine: EngineArgs, server: ServerArgs) -> int:
        seen.append((engine, server))
        return 0

    monkeypatch.setattr("pelton.server.serve.serve", fake_serve)
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from-file\nport: 9\nserved-model-name: x\nmax-model-len: 77\n"
        "enable-prefix-caching: no\n"
    )
    options = serve.parse(
        ["--config", str(file), "--port", "10", "--api-key", "a", "--api-key", "b"]
    )
    assert serve.run(options) == 0
    options = serve.parse(["given", "--config", str(file), "--enable-prefix-caching"])
    assert serve.run(options) == 0
    (engine, server), (other, _) = seen
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == (
        "from-file",
        77,
        False,
    )
    assert (server.port, server.served_model_name, server.api_key) == (10, ["x"], ["a", "b"])
    assert (other.model, other.enable_prefix_caching) == ("given", True)


def test_a_key_that_yaml_takes_for_a_number(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    for text in ("api-key: 12345", "api-key: [abc, 12345]", "api-key: 1.5", "api-key: 2026-01-01"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"api_key must be .*; put it in quotes") as wrong:
            serve.run(serve.parse(["--config", str(file)]))
        assert "12345" not in str(wrong.value)


@pytest.mark.parametrize("text", ["api_key:", 'api_key: ""', "api-key: []", "api_key: ['']"])
def test_an_empty_key_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match="api_key is empty"):
        serve.run(serve.parse(["--config", str(file)]))


@pytest.mark.parametrize(
    ("words", "variables", "sentence"),
    [
        (["--api-key", ""], {}, "api_key is empty"),
        ([], {"PELTON_API_KEY": ""}, "PELTON_API_KEY is set and holds no key"),
        (["--api-key-file", ""], {}, "api_key_file='' cannot be read"),
    ],
)
def test_an_unset_shell_variable_does_not_open_the_server(
    words: list[str],
    variables: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "nowhere", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_wrong_flag_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in [
        (["--prot", "1"], "--port"),
        (["--max-model-length", "1"], "--max-model-len"),
    ]:
        with pytest.raises(SystemExit) as stop:
            serve.parse(words)
        assert stop.value.code == 2
        assert f"did you mean {hint}" in capsys.readouterr().err
