"""Which architectures there are, by the name config.json gives them. No torch; an architecture is imported on use."""

from __future__ import annotations

from importlib import import_module

from kvasir.errors import ModelError
from kvasir.models.spec import Architecture, Config

# Hugging Face's name -> the module whose ARCHITECTURE it is, or an Architecture itself.
_ARCHITECTURES: dict[str, str | Architecture] = {
    "LlamaForCausalLM": "kvasir.models.llama",
    "MistralForCausalLM": "kvasir.models.mistral",
    "Qwen2ForCausalLM": "kvasir.models.qwen2",
    "Qwen3ForCausalLM": "kvasir.models.qwen3",
}


def supported() -> tuple[str, ...]:
    """The names that may stand in a config.json."""
    return tuple(_ARCHITECTURES)


def find(config: Config) -> Architecture:
    """The architecture of a model, by the `architectures` of its config.json."""
    names = config.get("architectures") or ()
    for name in names:
        if name in _ARCHITECTURES:
            found = _ARCHITECTURES[name]
            return import_module(found).ARCHITECTURE if isinstance(found, str) else found
    known = ", ".join(_ARCHITECTURES)
    if not names:
        raise ModelError(
            f"config.json does not name the model's architecture; set `architectures` there or through hf_overrides "
            f"to one of {known}."
        )
    raise ModelError(f"The architecture {', '.join(names)} is not supported; supported are {known}.")
