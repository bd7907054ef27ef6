"""Finds a model's directory: a local one, or one fetched by name from the Hugging Face hub.

The process that builds the engine. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to
huggingface_hub. Reads no file of the model itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kvasir.config.engine import LoadConfig, ModelConfig, did_you_mean
from kvasir.errors import ConfigError, ModelError
from kvasir.log import get_logger

logger = get_logger(__name__)

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
# Subdirectories and consolidated files hold the same weights again, in another layout.
NOT_NEEDED = ["*/*", "consolidated*"]


def find_model(model: ModelConfig, load: LoadConfig) -> Path:
    """The model's directory; fetched first if it has a hub name."""
    files = SMALL_FILES if load.load_format == "dummy" else [*SMALL_FILES, "*.safetensors"]
    return _find("model", model.model, model.revision, files, model, load)


def find_tokenizer(model: ModelConfig, load: LoadConfig) -> Path:
    """The tokenizer's directory, where it is not the model's."""
    return _find("tokenizer", model.tokenizer or model.model, model.tokenizer_revision, SMALL_FILES, model, load)


def _find(what: str, name: str, revision: str | None, files: list[str], model: ModelConfig, load: LoadConfig) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"{what}={name!r} is a directory, and only the hub has revisions. Drop {revision!r}.")
        return path.resolve()
    if path.is_file() and (name.endswith(".gguf") or _begins_like_gguf(path)):
        return path.resolve()
    if path.exists():
        raise ModelError(f"{what}={name!r} is a file, but no GGUF file; give one, or a directory with safetensors.")
    if name.endswith(".gguf"):
        raise ModelError(f"{what}={name!r}: there is no such file.{_neighbours(path)}")
    if not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"{what}={name!r}: there is no such directory.{_neighbours(path)}")
    return _download(what, name, revision, files, model, load)


def _begins_like_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _neighbours(path: Path) -> str:
    """What else lies where `path` was looked for, the nearest names if any are near."""
    parent = path.parent
    if not parent.is_dir():
        return f" Nor is there {parent}."
    beside = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf")
    return did_you_mean(path.name, beside) or (
        f" {parent} holds: {', '.join(beside[:5])}." if beside else f" {parent} is empty."
    )


def _download(
    what: str, name: str, revision: str | None, files: list[str], model: ModelConfig, load: LoadConfig
) -> Path:
    import huggingface_hub

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": files, "ignore_patterns": NOT_NEEDED}
    try:
        found = huggingface_hub.snapshot_download(name, cache_dir=load.download_dir, token=model.hf_token, **wanted)
    except Exception as error:  # the client raises its own, its HTTP library's and the system's errors
        near = did_you_mean(name, _cached_names(load.download_dir) - {name})
        raise ModelError(f"{what}={name!r}: {_reason(error, name, revision)}{near or _local_hint(name)}") from error
    logger.info("%s %s is at %s", what, name, found)
    return Path(found)


def _reason(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "access to it must be granted on the hub first; then set HF_TOKEN or hf_token."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the hub knows no such model, or it is private. Check the name; for a private one set HF_TOKEN or hf_token."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision!r} on the hub."
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        return f"it is not in the local cache, and {why}. Give a directory, or fetch it where there is a network."
    if isinstance(error, errors.HFValidationError):
        return f"there is no such directory, and {name!r} cannot be a name on the hub."
    first_line = (str(error).strip() or "no reason given").splitlines()[0]
    return f"it could not be fetched from the hub ({type(error).__name__}: {first_line})."


def _cached_names(cache_dir: str | None) -> set[str]:
    """Models that were fetched before."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = {
        snapshot.parent.parent.name for snapshot in Path(cache_dir or HF_HUB_CACHE).glob("models--*/snapshots/*")
    }
    return {folder.removeprefix("models--").replace("--", "/") for folder in folders}


def _local_hint(name: str) -> str:
    """If the first part of the name is a directory here, a path was probably meant."""
    path = Path(name)
    return (
        f" As a directory it does not exist either.{_neighbours(path)}" if "/" in name and path.parent.is_dir() else ""
    )
