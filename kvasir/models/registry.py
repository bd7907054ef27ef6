"""Which architectures there are, by the name config.json gives them. No torch; an architecture is imported on use."""

from __future__ import annotations

from importlib import import_module

from kvasir.errors import ModelError
from kvasir.models.spec import Architecture
from kvasir.models.values import Config

# Hugging Face's name -> the module whose ARCHITECTURE it is, or an Architecture itself.
_ARCHITECTURES: dict[str, str | Architecture] = {
    "LlamaForCausalLM": "kvasir.models.llama",
    "MistralForCausalLM": "kvasir.models.mistral",
    "MixtralForCausalLM": "kvasir.models.mixtral",
    "Qwen2ForCausalLM": "kvasir.models.qwen2",
    "Qwen2MoeForCausalLM": "kvasir.models.qwen2_moe",
    "Qwen3ForCausalLM": "kvasir.models.qwen3",
    "Qwen3MoeForCausalLM": "kvasir.models.qwen3_moe",
    "GemmaForCausalLM": "kvasir.models.gemma",
    "Gemma2ForCausalLM": "kvasir.models.gemma2",
    "Gemma3ForCausalLM": "kvasir.models.gemma3",
    "Phi3ForCausalLM": "kvasir.models.phi3",
    "GPT2LMHeadModel": "kvasir.models.gpt2",
    "GPTJForCausalLM": "kvasir.models.gptj",
    "GPTNeoXForCausalLM": "kvasir.models.gpt_neox",
    "OPTForCausalLM": "kvasir.models.opt",
    "FalconForCausalLM": "kvasir.models.falcon",
    "Starcoder2ForCausalLM": "kvasir.models.starcoder2",
    "Olmo2ForCausalLM": "kvasir.models.olmo2",
    "GraniteForCausalLM": "kvasir.models.granite",
    "SmolLM3ForCausalLM": "kvasir.models.smollm3",
    "CohereForCausalLM": "kvasir.models.cohere",
    "Cohere2ForCausalLM": "kvasir.models.cohere2",
    "StableLmForCausalLM": "kvasir.models.stablelm",
    "InternLM2ForCausalLM": "kvasir.models.internlm2",
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
