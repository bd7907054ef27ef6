"""Whether a GGUF file's numbers can be: by themselves, with each other, and with the tensors it holds. No torch.

A file may be damaged anywhere, and what is built on a wrong number fails far from it, or takes all memory first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelError
from kvasir.gguf_file import GGUFFile
from kvasir.models.values import fault_of_integer, fault_of_real

_REALS = ("rms_norm_eps", "rope_theta", "attn_logit_softcapping", "final_logit_softcapping")
_MAY_BE_NONE = ("sliding_window",)  # a zero means none
_TOKENS = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_LAYER = re.compile(r"blk\.(\d+)\.")


def damaged(file: GGUFFile, what: str) -> ModelError:
    return ModelError(f"{file.path} is damaged: {what}; download it again.")


def check_entries(file: GGUFFile, entries: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Each number by itself. `entries`: the file's names of them -> config.json's."""
    for theirs, ours in entries.items():
        value = config.get(ours)
        if value is None:
            continue
        least = 0 if ours in _MAY_BE_NONE else 1
        if fault := fault_of_real(ours, value) if ours in _REALS else fault_of_integer(ours, value, least):
            raise damaged(file, f"{file.architecture}.{theirs} {fault}")
    for name in filter(_TOKENS.fullmatch, file.metadata):
        value = file.metadata[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise damaged(file, f"{name} must be the number of a token, but is {value!r}"[:200])


def check_tensors(file: GGUFFile, config: Mapping[str, Any]) -> None:
    """The numbers with each other and with the tensors."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    if heads % kv_heads:
        raise _differ(file, "attention.head_count", heads, f"no multiple of attention.head_count_kv, {kv_heads}")
    layers = {int(match.group(1)) for name in file.tensors if (match := _LAYER.match(name))}
    if config["num_hidden_layers"] > len(layers):
        raise _differ(file, "block_count", config["num_hidden_layers"], f"but the file has {len(layers)} layers")
    vocab_size, width = _matrix(file, "token_embd.weight")
    if config["hidden_size"] != width:
        raise _differ(file, "embedding_length", config["hidden_size"], f"but token_embd.weight has {width} columns")
    if not vocab_size:
        raise damaged(file, "token_embd.weight has no rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise damaged(file, f"it names {len(tokens)} tokens, and token_embd.weight has {vocab_size} rows")


def _matrix(file: GGUFFile, name: str) -> tuple[int, int]:
    shape = file.tensors[name].shape
    if len(shape) != 2:
        raise damaged(file, f"{name} is {list(shape)}, but should be a matrix")
    return shape[0], shape[1]


def _differ(file: GGUFFile, entry: str, value: object, why: str) -> ModelError:
    return damaged(file, f"{file.architecture}.{entry} is {value}, {why}")
