"""Checkpoints from the Hugging Face hub, through huggingface_hub, which is loaded only here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pelton.config.reasons import reason_of
from pelton.errors import CheckpointError, ConfigError

_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
# "consolidated" files and subfolders repeat the weights in another layout.
_NOT_WANTED = ["consolidated*", "*/*"]


def download(repo: str, *, revision: str | None, token: str | None, weights: bool) -> Path:
    """Folder with the repository's configuration, tokenizer and (if `weights`) safetensors files,
    downloaded with progress or found in huggingface_hub's cache.

    HF_HUB_OFFLINE=1 means the cache only. Raises ConfigError when huggingface_hub is absent or the
    repository cannot be had, CheckpointError when a download breaks off.
    """
    hub = _hub(repo)
    with _explained(repo, revision):
        return Path(
            hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                allow_patterns=_SMALL_FILES + (_WEIGHT_FILES if weights else []),
                ignore_patterns=_NOT_WANTED,
            )
        )


def download_files(
    repo: str, names: Sequence[str], *, revision: str | None, token: str | None
) -> Path:
    """Folder with these files of the repository. Raises as `download` does."""
    hub = _hub(repo)
    with _explained(repo, revision):
        return Path(
            hub.snapshot_download(repo, revision=revision, token=token, allow_patterns=list(names))
        )


def list_files(repo: str, *, revision: str | None, token: str | None) -> list[str]:
    """Paths of the repository's files; without a connection, of those in the cache. Raises as
    `download` does."""
    hub = _hub(repo)
    errors = importlib.import_module("huggingface_hub.errors")
    with _explained(repo, revision):
        try:
            return list(hub.list_repo_files(repo, revision=revision, token=token))
        except (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.HFValidationError,
        ):
            raise
        except Exception:  # offline, or what its HTTP library raises when nobody answers
            cached = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
            return [
                path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()
            ]


def _hub(repo: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"Model {repo!r} is not a local path, and a hub id needs the package huggingface_hub: "
            "run `pip install huggingface_hub`, or give a local folder or .gguf file."
        ) from None


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """The hub's errors as one sentence each."""
    errors = importlib.import_module("huggingface_hub.errors")
    at = f" at revision {revision!r}" if revision is not None else ""
    try:
        yield
    # Order matters: a gated repository's error is a kind of not-found error.
    except errors.GatedRepoError:
        raise ConfigError(
            f"Model {repo!r} is gated: accept its terms at https://huggingface.co/{repo} and give "
            "hf_token (or run `hf auth login`) of an account that may read it."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"Model {repo!r} is neither a local path nor a repository on the hub that this token "
            "may see: check the spelling, or give hf_token if it is private."
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"Model {repo!r} has no revision {revision!r} on the hub.") from None
    except errors.HFValidationError as error:
        raise ConfigError(f"Model {repo!r} is not a legal hub id: {error}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ConfigError(
            f"Model {repo!r}{at} is not in the local hub cache and the hub cannot be reached "
            "(offline, or HF_HUB_OFFLINE is set): connect once, or give a local folder or .gguf."
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"Model {repo!r}{at} could not be downloaded: {reason_of(error)}."
        ) from None
