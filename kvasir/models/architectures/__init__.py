"""The known architectures, by their names in config.json. No torch; an architecture is imported when it is used.

Users add their own with ModelRegistry.register_model, or from an installed package: an entry point of the group
"kvasir.plugins" is a function that is called in every process before the first model is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from kvasir.errors import ConfigError, ModelError
from kvasir.log import get_logger
from kvasir.models.config_reader import check_numbers, listed
from kvasir.models.spec import Architecture, Config

logger = get_logger(__name__)
PLUGINS = "kvasir.plugins"

# Name in config.json -> an Architecture, or where to import it: "module:NAME".
_ARCHITECTURES: dict[str, str | Architecture] = {
    "LlamaForCausalLM": "kvasir.models.architectures.llama:LLAMA",
    "MistralForCausalLM": "kvasir.models.architectures.llama:MISTRAL",
    "MixtralForCausalLM": "kvasir.models.architectures.llama:MIXTRAL",
    "Qwen2ForCausalLM": "kvasir.models.architectures.qwen:QWEN2",
    "Qwen2MoeForCausalLM": "kvasir.models.architectures.qwen:QWEN2_MOE",
    "Qwen3ForCausalLM": "kvasir.models.architectures.qwen:QWEN3",
    "Qwen3MoeForCausalLM": "kvasir.models.architectures.qwen:QWEN3_MOE",
    "GemmaForCausalLM": "kvasir.models.architectures.gemma:GEMMA",
    "Gemma2ForCausalLM": "kvasir.models.architectures.gemma:GEMMA2",
    "Gemma3ForCausalLM": "kvasir.models.architectures.gemma:GEMMA3",
    "Phi3ForCausalLM": "kvasir.models.architectures.llama:PHI3",
    "GPT2LMHeadModel": "kvasir.models.architectures.gpt:GPT2",
    "GPTJForCausalLM": "kvasir.models.architectures.gpt:GPTJ",
    "GPTNeoXForCausalLM": "kvasir.models.architectures.gpt:GPT_NEOX",
    "OPTForCausalLM": "kvasir.models.architectures.gpt:OPT",
    "FalconForCausalLM": "kvasir.models.architectures.gpt:FALCON",
    "Starcoder2ForCausalLM": "kvasir.models.architectures.llama:STARCODER2",
    "Olmo2ForCausalLM": "kvasir.models.architectures.llama:OLMO2",
    "GraniteForCausalLM": "kvasir.models.architectures.llama:GRANITE",
    "SmolLM3ForCausalLM": "kvasir.models.architectures.llama:SMOLLM3",
    "CohereForCausalLM": "kvasir.models.architectures.llama:COHERE",
    "Cohere2ForCausalLM": "kvasir.models.architectures.llama:COHERE2",
    "StableLmForCausalLM": "kvasir.models.architectures.llama:STABLELM",
    "InternLM2ForCausalLM": "kvasir.models.architectures.llama:INTERNLM2",
    "DeepseekV2ForCausalLM": "kvasir.models.architectures.deepseek:DEEPSEEK_V2",
    "DeepseekV3ForCausalLM": "kvasir.models.architectures.deepseek:DEEPSEEK_V3",
    "OlmoeForCausalLM": "kvasir.models.architectures.experts:OLMOE",
    "PhimoeForCausalLM": "kvasir.models.architectures.experts:PHIMOE",
    "GraniteMoeForCausalLM": "kvasir.models.architectures.experts:GRANITEMOE",
    "GraniteMoeSharedForCausalLM": "kvasir.models.architectures.experts:GRANITEMOESHARED",
    "DbrxForCausalLM": "kvasir.models.architectures.experts:DBRX",
    "Glm4MoeForCausalLM": "kvasir.models.architectures.experts:GLM4_MOE",
    "MiniMaxM2ForCausalLM": "kvasir.models.architectures.experts:MINIMAX_M2",
    "Llama4ForCausalLM": "kvasir.models.architectures.experts:LLAMA4",
    "GptOssForCausalLM": "kvasir.models.architectures.experts:GPT_OSS",
    "BertModel": "kvasir.models.architectures.encoders:BERT",
    "RobertaModel": "kvasir.models.architectures.encoders:ROBERTA",
    "XLMRobertaModel": "kvasir.models.architectures.encoders:ROBERTA",
    "CamembertModel": "kvasir.models.architectures.encoders:ROBERTA",
    "DistilBertModel": "kvasir.models.architectures.encoders:DISTILBERT",
    "MPNetModel": "kvasir.models.architectures.encoders:MPNET",
    "ModernBertModel": "kvasir.models.architectures.encoders:MODERNBERT",
    "NomicBertModel": "kvasir.models.architectures.encoders:NOMIC_BERT",
    "GteModel": "kvasir.models.architectures.encoders:GTE",
    "NewModel": "kvasir.models.architectures.encoders:NEW",
    "GteNewModel": "kvasir.models.architectures.encoders:NEW",
    "JinaEmbeddingsV3Model": "kvasir.models.architectures.encoders:JINA",
    "LlamaBidirectionalModel": "kvasir.models.architectures.llama:LLAMA_BIDIRECTIONAL",
    "T5EncoderModel": "kvasir.models.architectures.encoders:T5",
    "MT5EncoderModel": "kvasir.models.architectures.encoders:T5",
}

# How an architecture's name ends when it is no model that generates text -> what it does, see config.pooling. Without
# the ending, and with one of _BASES, it is a name above.
_POOLING_ENDINGS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "reward",
    "ForRewardModel": "reward",
    "ForMaskedLM": "embed",
    "TextModel": "embed",
    "Model": "embed",
}
_BASES = ("Model", "ForCausalLM", "LMHeadModel")


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
    if asked != "kvasir" and config.get("auto_map") and _find(config) is None and not _transformers_knows_type(config):
        raise ModelError(
            f"The architecture {', '.join(listed(config, 'architectures', str) or ['of this model'])} comes only as "
            f"Python code with the model (auto_map in config.json). Kvasir runs no code of models, with "
            f"trust_remote_code or without; use a model of an architecture that Kvasir or transformers has."
        )
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
        for known in _possible_names(name):
            if known in _ARCHITECTURES:
                found = _ARCHITECTURES[known]
                return _import(known, found) if isinstance(found, str) else found
    return None


def _possible_names(name: str) -> Iterator[str]:
    """The names under which an architecture may be registered: its own, and those of the model without its head."""
    yield name
    for ending in _POOLING_ENDINGS:
        if name.endswith(ending):
            yield from (name.removesuffix(ending) + base for base in _BASES)


def _pooling_kind(config: Config) -> str | None:
    """What a model that does not generate text does; None: it generates."""
    for name in listed(config, "architectures", str) or ():
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return "embed" if config.get("is_causal") is False else None  # its tokens see later ones
        if _find({"architectures": [name]}) is not None:
            return next((kind for ending, kind in _POOLING_ENDINGS.items() if name.endswith(ending)), None)
    return None


def settle_runner(config: Config, runner: str, convert: str, has_pooling: bool) -> tuple[str, str]:
    """What the model is run for: "generate" and "none", or "pooling" and the kind of its poolers (config.pooling).
    `has_pooling`: it comes with sentence-transformers' files."""
    own = _pooling_kind(config)
    if runner == "auto":
        runner = "pooling" if own is not None or has_pooling or convert in ("embed", "classify") else "generate"
    names = ", ".join(listed(config, "architectures", str) or ())
    if runner == "generate":
        if own is not None:
            raise ConfigError(f"runner='generate' is not possible: {names} does not generate text. Leave it at auto.")
        if convert not in ("auto", "none"):
            raise ConfigError(f"convert={convert!r} is for runner='pooling', but runner is 'generate'.")
        return "generate", "none"
    if convert == "none" and own is None:
        raise ConfigError(
            f"runner='pooling' needs convert='embed' or 'classify': {names} generates text. Leave convert at auto."
        )
    if own in ("classify", "token_classify", "reward") and convert == "embed":
        return "pooling", "embed"
    if convert == "classify" and own in (None, "embed"):
        return "pooling", "classify"
    return "pooling", own or "embed"


def _import(name: str, place: str) -> Architecture:
    module, _, attribute = place.partition(":")
    try:
        found = getattr(import_module(module), attribute)
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


def _transformers_knows_type(config: Config) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return _transformers_has(config) or str(config.get("model_type")) in CONFIG_MAPPING_NAMES


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
