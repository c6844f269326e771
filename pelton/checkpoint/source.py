"""Where a model comes from."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pelton.checkpoint.embedded import embedded_model
from pelton.checkpoint.gguf_files import choose_gguf, gguf_models
from pelton.checkpoint.gguf_header import PART_NAME, gguf_parts
from pelton.checkpoint.hub import download, download_files, list_files
from pelton.config.names import known_names
from pelton.errors import CheckpointError, ConfigError, UnsupportedError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[A-Za-z0-9][\w.-]*))?"
)
_PICKLES = ("*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's files, found and not yet read.

    name: as shown to users (folder name, file stem or hub id).
    format: where configuration and tokenizer come from: "safetensors" = config.json and the files
        beside it, "gguf" = the GGUF file's metadata.
    load_format: where weights come from, a name from weights/table.py; never "auto".
    folder: that holds the files. files: of weights, in reading order; empty for "dummy" without a
        GGUF file. config_path: config.json, None for a GGUF file.
    """

    name: str
    format: Literal["safetensors", "gguf"]
    load_format: Literal["safetensors", "gguf", "dummy"]
    folder: Path
    files: tuple[Path, ...]
    config_path: Path | None


def is_hub_id(model: str) -> bool:
    """Whether `model` is to be looked for on the hub: "org/name" or "org/name:QUANT", and not
    something local."""
    return (
        _HUB_ID.fullmatch(model) is not None
        and not model.endswith(".gguf")
        and not Path(model).exists()
    )


def resolve_checkpoint(
    model: str | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
) -> Checkpoint:
    """Find the files of `model`: None (the embedded model), a folder, a .gguf file (any part of a
    split one) or a hub id, "org/name", or "org/name:Q4_K_M" for the GGUF files of a quantisation.

    revision and token are for hub ids. Raises ConfigError when there is no such model,
    CheckpointError when files are missing from it, UnsupportedError for pickled weights.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format={load_format!r} is not known." + known_names(load_format, LOAD_FORMATS)
        )
    if model is not None and is_hub_id(model):
        return _from_hub(model, revision, token, load_format)
    if revision is not None:
        raise ConfigError(
            f"revision={revision!r} is for hub ids, but the model is "
            f"{'the embedded one' if model is None else repr(model)}; leave revision out."
        )
    if model is None:
        return _from_gguf(embedded_model(), load_format)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, path.resolve().name, load_format)
    if path.is_file():
        if path.suffix in (".bin", ".pt", ".pth"):
            raise _pickled(model)
        if path.suffix != ".gguf":
            raise ConfigError(
                f"Model {model!r} is a file that does not end in .gguf; give the folder that holds "
                "config.json and the .safetensors files, or a .gguf file."
            )
        return _from_gguf(path, load_format)
    raise ConfigError(
        f"Model {model!r} is neither a folder, nor a file, nor a hub id of the form 'org/name'."
    )


def _from_hub(model: str, revision: str | None, token: str | None, load_format: str) -> Checkpoint:
    match = _HUB_ID.fullmatch(model)
    assert match is not None
    repo, quant = match["repo"], match["quant"]
    if quant is not None and load_format == "safetensors":
        raise ConfigError(
            f"load_format='safetensors' but the model {model!r} names a GGUF quantisation; use "
            "'auto' or 'gguf'."
        )
    names: list[str] | None = None
    if quant is None and load_format != "gguf":
        folder = download(repo, revision=revision, token=token, weights=load_format != "dummy")
        if not _is_complete(folder, load_format):
            names = list_files(repo, revision=revision, token=token)
        if names is None or not gguf_models(names):
            return _from_folder(folder, repo, load_format)
    if names is None:
        names = list_files(repo, revision=revision, token=token)
    chosen = choose_gguf(repo, names, quant)
    folder = download_files(repo, chosen, revision=revision, token=token)
    return dataclasses.replace(_from_gguf(folder / chosen[0], load_format), name=model)


def _is_complete(folder: Path, load_format: str) -> bool:
    """Whether a download without GGUF files is all that there is to look for."""
    if load_format == "safetensors" or any(folder.glob("*.safetensors")):
        return True
    return load_format == "dummy" and (folder / "config.json").is_file()


def _pickled(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Model {what!r} has only pickled weights (.bin, .pt), which can run code when they are "
        "read and are not supported; convert them to .safetensors."
    )


def _from_gguf(path: Path, load_format: str) -> Checkpoint:
    if load_format == "safetensors":
        raise ConfigError(
            f"load_format='safetensors' but the model is the GGUF file {path}; use 'auto' or "
            "'gguf'."
        )
    part = PART_NAME.fullmatch(path.name)
    return Checkpoint(
        name=path.stem if part is None else part["stem"],
        format="gguf",
        load_format="dummy" if load_format == "dummy" else "gguf",
        folder=path.parent,
        files=gguf_parts(path),
        config_path=None,
    )


def _from_folder(folder: Path, name: str, load_format: str) -> Checkpoint:
    config = folder / "config.json"
    if load_format == "gguf" or (load_format != "safetensors" and not config.is_file()):
        return _from_gguf(_only_gguf(folder, name, load_format), load_format)
    if not config.is_file():
        raise CheckpointError(f"Model {name!r}: {folder} has no config.json.")
    files = () if load_format == "dummy" else _safetensors_files(folder, name)
    return Checkpoint(
        name=name,
        format="safetensors",
        load_format="dummy" if load_format == "dummy" else "safetensors",
        folder=folder,
        files=files,
        config_path=config,
    )


def _only_gguf(folder: Path, name: str, load_format: str) -> Path:
    models = gguf_models(path.name for path in folder.glob("*.gguf"))
    if len(models) == 1:
        return folder / next(iter(models.values()))[0]
    if models:
        raise ConfigError(
            f"Model {name!r}: {folder} has {len(models)} GGUF models; give the path of one: "
            f"{', '.join(files[0] for files in models.values())}."
        )
    if load_format != "gguf" and any(any(folder.glob(pattern)) for pattern in _PICKLES):
        raise _pickled(name)
    wanted = "no .gguf file" if load_format == "gguf" else "neither a config.json nor a .gguf file"
    raise CheckpointError(f"Model {name!r}: {folder} has {wanted}.")


def _safetensors_files(folder: Path, name: str) -> tuple[Path, ...]:
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(index)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    found = sorted(path for path in folder.glob("*.safetensors"))
    if found:
        return tuple(found)
    if any(any(folder.glob(pattern)) for pattern in _PICKLES):
        raise _pickled(name)
    raise CheckpointError(
        f"Model {name!r}: {folder} has no .safetensors files"
        + ("; give the path of its .gguf file." if any(folder.glob("*.gguf")) else ".")
    )


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{index}: is not a JSON object with a weight_map of names."
        ) from None
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise CheckpointError(f"{index}: weight_map must name files of its own folder.")
    missing = [n for n in names if not (index.parent / n).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(names)} files are missing: {', '.join(missing)}."
        )
    return tuple(index.parent / n for n in names)
