"""Write docs/models.md from the registry: what runs, and the test that proves it.

usage: models_page.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from kvasir.frontend.text.tokenizer_gguf import SPLITTINGS
from kvasir.models import gguf, registry
from kvasir.quantization.gguf_file import TENSOR_TYPES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TEST = "test_logits_and_text_equal_transformers_under_every_kind_of_load"

HEAD = """# Models

Written by `make docs`; do not edit. An architecture is the name that a model's config.json gives in `architectures`.

The proof of each is `tests/cpu/test_engine.py::{test}[NAME]`: log-probabilities
within 1e-4 of transformers' and its greedy text, in float32, chunked, batched, with prefix hits and after preemption.
`tests/cpu/test_models_parity.py` compares all logits with scattered blocks. NAME stands in the last column; variants of
an architecture have names that begin with it.

| architecture | what it is | proof |
|---|---|---|
"""
TAIL = """
RoPE scaling: linear, dynamic, yarn, llama3, longrope. ALiBi is not there.

## Everything else

Any other model that transformers has as `AutoModelForCausalLM`, and whose code uses its attention interface, runs
through transformers' own code with Kvasir's paged attention, scheduling and sampling (`model_impl`, on one device;
proof: `tests/cpu/test_fallback.py`). What the CPU library does with weights and caches (`quantization`,
`packed_weights_dir`, `kv_cache_dtype=int8`) is refused for them.
Models of your own: `kvasir.ModelRegistry.register_model`, or an entry point of the group `kvasir.plugins`;
`examples/add_a_model.py` adds one in under 60 lines.

## GGUF

`LLM("model.gguf")` runs files of {kinds} (Mistral's are `llama`), with tensors of {types},
which the CPU library [keeps as they are](cpu.md#gguf-files) and anything else expands to the model's type. The
tokenizer is made from the file: SentencePiece vocabularies, and byte-level ones split in the ways {splits}.
Proof: `tests/cpu/test_gguf.py`, and on the CPU library `tests/cpu/test_gguf_native.py`.
"""


def page() -> str:
    lines = []
    for name, place in sorted(registry._ARCHITECTURES.items()):
        assert isinstance(place, str), f"{name} was registered by a user"
        text = " ".join((import_module(place).__doc__ or "").split())
        lines.append(f"| `{name}` | {text} | `{place.rsplit('.', 1)[1]}` |\n")
    kinds = ", ".join(gguf.ARCHITECTURES)
    types = ", ".join(kind for kind, _, _ in TENSOR_TYPES.values())
    return HEAD.format(test=TEST) + "".join(lines) + TAIL.format(kinds=kinds, types=types, splits=", ".join(SPLITTINGS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/models.md is not up to date: run `make docs`.")


if __name__ == "__main__":
    main()
