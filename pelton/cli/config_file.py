"""`--config FILE`: a command's flags, as YAML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pelton.cli.flags import did_you_mean
from pelton.config.reasons import reason_of
from pelton.errors import ConfigError


def read_config(file: str, known: Iterable[str]) -> dict[str, Any]:
    """Names of flags -> values. Names may have dashes or underscores.

    Raises ConfigError for a file that cannot be read, and for a name that is not `known`.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(
            "--config needs pyyaml: python -m pip install 'pelton[server]'."
        ) from None
    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} cannot be read: {reason_of(error)}.") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {file}: {reason}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: must hold lines of the form `flag: value`.")
    names = list(known)
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in names:
            hint = did_you_mean(str(key), [known.replace("_", "-") for known in names])
            raise ConfigError(f"--config {file}: unknown flag {key!r}{hint or '.'}")
        if name in found:
            raise ConfigError(f"--config {file}: {key!r} stands there twice.")
        found[name] = value
    return found
