"""What transformers' tokenizer classes do whatever tokenizer.json says: NFC, BERT's normalizer, a space before texts.

The class is found by the name in tokenizer_config.json and the type of the model, as in transformers. What else a
class would replace, such as a pattern that splits texts, stays as tokenizer.json has it: the model learnt with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

_COMPOSING = ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_BYTE_LEVEL = ("GPT2Tokenizer", "CodeGenTokenizer", "RobertaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
# The class of a type of model (model_type in config.json) unless tokenizer_config.json names another.
_CLASSES = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_next", "qwen3_vl", "qwen3_vl_moe", "internvl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("aya_vision", "cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("bert", "distilbert", "nomic_bert"), "BertTokenizer"),
    "mpnet": "MPNetTokenizer",
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "codegen", "opt", "phi", "starcoder2", "dbrx"), "GPT2Tokenizer"),
    "roberta": "RobertaTokenizer",
}
# Types for which transformers ignores the named class: it has the right one, or uses tokenizer.json as it is.
_OVERRULING_TYPES = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_PLAIN_TYPES = (
    *("arctic", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode"),
    *("granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hyperclovax", "internlm2", "jamba", "kimi_k25"),
    *("kimi_linear", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3"),
    *("mixtral", "modernbert", "modernbert-decoder", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3"),
    *("phimoe", "smolvlm", "stablelm", "umt5", "xlm-roberta-xl"),
)


def follow_class(backend: tokenizers.Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Change the tokenizer as its class would. `config`: tokenizer_config.json, `model`: config.json."""
    name = _class_of(backend, config, model)
    if name in _COMPOSING:
        backend.normalizer = normalizers.NFC()
    elif name in _BERT:
        backend.normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=config.get("tokenize_chinese_chars", True),
            strip_accents=config.get("strip_accents"),
            lowercase=config.get("do_lower_case", True),
        )
    if name in _BYTE_LEVEL and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        backend.pre_tokenizer.add_prefix_space = bool(config.get("add_prefix_space", False))


def _class_of(backend: tokenizers.Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The class that transformers would choose; None if it uses tokenizer.json as it is."""
    kind = model.get("model_type")
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    if named == "LlamaTokenizer" and type(backend.decoder).__name__ == "ByteLevel":  # tokenizer.json is used as it is
        return None
    if not named or kind in _OVERRULING_TYPES:
        return _CLASSES.get(str(kind))
    return None if kind in _PLAIN_TYPES else named
