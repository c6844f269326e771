"""Which of several GGUF files is meant: models, their parts and their quantisations, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from pelton.checkpoint.gguf_header import PART_NAME
from pelton.errors import ConfigError

# How files are named: MODEL-Q4_K_M.gguf, MODEL.q8_0.gguf, UD-IQ2_M/MODEL-UD-IQ2_M-00001-of-00002.
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_0|BF16|F16|FP16|F32|MXFP4\w*|NVFP4))$", re.IGNORECASE
)
# Parts of a model for images, and statistics for quantising: not models by themselves.
_NOT_MODELS = ("mmproj", "imatrix")


def gguf_models(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Model -> its files, in order. A model is called as its file is, without the part's number and
    ".gguf". names: paths, of which those that are no GGUF model are left out."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix != ".gguf" or path.name.lower().startswith(_NOT_MODELS):
            continue
        part = PART_NAME.fullmatch(path.name)
        stem = path.stem if part is None else part["stem"]
        models.setdefault(str(path.with_name(stem)), []).append(name)
    return {model: tuple(files) for model, files in models.items()}


def quant_of(model: str) -> str:
    """The quantisation in a model's file name, in capitals; else in its folder's name; else the
    whole file name."""
    path = PurePosixPath(model)
    for text in (path.name, path.parent.name):
        if found := _QUANT.search(text):
            return found[1].upper()
    return path.name


def choose_gguf(repo: str, names: Iterable[str], quant: str | None) -> tuple[str, ...]:
    """The files of a hub repository's model of this quantisation, or of its only model.

    Raises ConfigError that lists what there is.
    """
    models = gguf_models(names)
    if not models:
        raise ConfigError(f"Model {repo!r} has no GGUF files on the hub.")
    quants = sorted({quant_of(model) for model in models})
    if quant is None:
        if len(models) == 1:
            return next(iter(models.values()))
        raise ConfigError(
            f"Model {repo!r} has {len(models)} GGUF models; name one as {repo}:{quants[0]}. "
            f"There are: {', '.join(quants)}."
        )
    found = [model for model in models if quant_of(model).upper() == quant.upper()]
    if not found:
        raise ConfigError(
            f"Model {repo!r} has no quantisation {quant!r}. There are: {', '.join(quants)}."
        )
    if len(found) > 1:
        raise ConfigError(
            f"Model {repo!r} has {len(found)} GGUF models of quantisation {quant!r}: "
            f"{', '.join(found)}. Download one and give its path."
        )
    return models[found[0]]
