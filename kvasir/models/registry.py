"""The known architectures, by their names in config.json. No torch; an architecture is imported when it is used.

Users add their own with ModelRegistry.register_model, or from an installed package: an entry point of the group
"kvasir.plugins" is a function that is called in every process before the first model is looked up.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from kvasir.errors import ConfigError, ModelError
from kvasir.log import get_logger
from kvasir.models.config_reader import Config, check_numbers, listed
from kvasir.models.spec import Architecture

logger = get_logger(__name__)
PLUGINS = "kvasir.plugins"

# Name in config.json -> an Architecture, or where to import it: "module:NAME", or "module" for its ARCHITECTURE.
_ARCHITECTURES: dict[str, str | Architecture] = {
    "LlamaForCausalLM": "kvasir.models.architectures.llama",
    "MistralForCausalLM": "kvasir.models.architectures.mistral:MISTRAL",
    "MixtralForCausalLM": "kvasir.models.architectures.mistral:MIXTRAL",
    "Qwen2ForCausalLM": "kvasir.models.architectures.qwen:QWEN2",
    "Qwen2MoeForCausalLM": "kvasir.models.architectures.qwen:QWEN2_MOE",
    "Qwen3ForCausalLM": "kvasir.models.architectures.qwen:QWEN3",
    "Qwen3MoeForCausalLM": "kvasir.models.architectures.qwen:QWEN3_MOE",
    "GemmaForCausalLM": "kvasir.models.architectures.gemma:GEMMA",
    "Gemma2ForCausalLM": "kvasir.models.architectures.gemma:GEMMA2",
    "Gemma3ForCausalLM": "kvasir.models.architectures.gemma:GEMMA3",
    "Phi3ForCausalLM": "kvasir.models.architectures.phi3",
    "GPT2LMHeadModel": "kvasir.models.architectures.gpt2",
    "GPTJForCausalLM": "kvasir.models.architectures.gptj",
    "GPTNeoXForCausalLM": "kvasir.models.architectures.gpt_neox",
    "OPTForCausalLM": "kvasir.models.architectures.opt",
    "FalconForCausalLM": "kvasir.models.architectures.falcon",
    "Starcoder2ForCausalLM": "kvasir.models.architectures.starcoder2",
    "Olmo2ForCausalLM": "kvasir.models.architectures.olmo2",
    "GraniteForCausalLM": "kvasir.models.architectures.granite",
    "SmolLM3ForCausalLM": "kvasir.models.architectures.smollm3",
    "CohereForCausalLM": "kvasir.models.architectures.cohere:COHERE",
    "Cohere2ForCausalLM": "kvasir.models.architectures.cohere:COHERE2",
    "StableLmForCausalLM": "kvasir.models.architectures.stablelm",
    "InternLM2ForCausalLM": "kvasir.models.architectures.internlm2",
}


class ModelRegistry:
    """The registry as users see it."""

    @staticmethod
    def register_model(name: str, architecture: Architecture | str) -> None:
        """Run models that config.json calls `name` as `architecture`, which may be given as "module:name". It replaces
        an architecture of the same name."""
        if not isinstance(architecture, Architecture | str):
            raise ConfigError(
                f"register_model({name!r}): an Architecture or 'module:name' is needed, "
                f"not {type(architecture).__name__}."
            )
        _ARCHITECTURES[name] = architecture

    @staticmethod
    def get_supported_archs() -> tuple[str, ...]:
        return supported()


def supported() -> tuple[str, ...]:
    """The supported values of `architectures` in config.json."""
    _load_plugins()
    return tuple(_ARCHITECTURES)


def find(config: Config) -> Architecture:
    """The architecture of a model, by the `architectures` of its config.json."""
    found = _find(config)
    if found is not None:
        return found
    names, known = listed(config, "architectures", str) or (), ", ".join(_ARCHITECTURES)
    if not names:
        raise ModelError(
            f"config.json does not name the model's architecture; set `architectures` there or through hf_overrides "
            f"to one of {known}."
        )
    raise ModelError(f"The architecture {', '.join(names)} is not supported; supported are {known}.")


def settle_implementation(config: Config, asked: str) -> str:
    """The implementation that runs the model: "kvasir" if the architecture is known here, else "transformers" if it is
    known there."""
    if asked == "transformers":
        return asked
    if asked == "kvasir" or _find(config) is not None or not _transformers_has(config):
        find(config)  # an unknown architecture is refused here, before anything is loaded
        check_numbers(config)
        return "kvasir"
    logger.warning(
        "Kvasir has no %s of its own: it runs through transformers, which is slower", ", ".join(config["architectures"])
    )
    return "transformers"


def _find(config: Config) -> Architecture | None:
    _load_plugins()
    for name in listed(config, "architectures", str) or ():
        if name in _ARCHITECTURES:
            found = _ARCHITECTURES[name]
            return _import(name, found) if isinstance(found, str) else found
    return None


def _import(name: str, place: str) -> Architecture:
    module, _, attribute = place.partition(":")
    try:
        found = getattr(import_module(module), attribute or "ARCHITECTURE")
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"The architecture {name} is registered as {place!r}, which cannot be imported: {error}."
        ) from error
    if not isinstance(found, Architecture):
        raise ModelError(f"The architecture {name} is registered as {place!r}, which is not an Architecture.")
    return found


def _transformers_has(config: Config) -> bool:
    # Imported here because it takes seconds, and known architectures do without.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

    return any(name in MODELS.values() for name in config.get("architectures") or ())


@cache
def _load_plugins() -> None:
    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()()
        except Exception as error:  # a plugin may raise anything
            raise ConfigError(
                f"The plugin {plugin.name} ({plugin.value}) failed: {type(error).__name__}: {error}."
            ) from error
        logger.info("plugin %s is loaded", plugin.name)
