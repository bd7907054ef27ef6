"""Checkpoints of heads that draft: EAGLE-3, EAGLE-1, Medusa and the layer past a model's last one. Worker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvasir.attention.base import select as select_attention
from kvasir.config.engine import EngineConfig
from kvasir.errors import ModelError
from kvasir.layers.mesh import Mesh
from kvasir.models import architectures
from kvasir.models.architectures import qwen
from kvasir.models.checkpoint import Safetensors
from kvasir.models.config_reader import (
    flag,
    integer,
    listed,
    mapping,
    read_attention,
    read_gated_mlp,
    read_rms_norm,
)
from kvasir.models.draft_head import DraftHead, DraftHeadSpec, DraftVocabulary, MedusaHeads, MedusaSpec
from kvasir.models.loader import load_part, make_build, open_source
from kvasir.models.native import LibraryModel
from kvasir.models.spec import Config, DecoderSpec, LayerSpec, Names, TensorLayout
from kvasir.models.transformer import Transformer
from kvasir.quantization.formats import find_format


def load_draft_head(
    config: EngineConfig, method: str, device: torch.device, target: Transformer | LibraryModel
) -> DraftHead | MedusaHeads:
    """Load the head for this model. `config.model` describes the head: its directory and its config.json."""
    decoder = target.model if isinstance(target, LibraryModel) else target
    hf, path = _flattened(config.model.hf), Path(config.model.path)
    form = find_format(hf, path)
    plain = None if config.load.load_format == "dummy" else Safetensors(path, small=True)
    entries = None if plain is None else plain.entries
    build = make_build(config, getattr(torch, config.model.dtype), Mesh(), form, device)
    if method == "medusa":
        medusa, names = read_medusa(hf, decoder.spec, entries)
        head: DraftHead | MedusaHeads = MedusaHeads(build, medusa)
        ignored: tuple[str, ...] = ()
    else:
        spec, names, ignored = READERS[method](hf, decoder.spec, entries)
        backend = select_attention(config.device.attention_backend, device)
        head = DraftHead(build, spec, backend, config.model.max_model_len, decoder)
    source = None if plain is None else open_source(plain, names, ignored, form, device)
    load_part(head, source, decoder.spec, config, device, form)
    if head.offsets is not None:
        _check_vocabulary(head.offsets, decoder.vocab_size, path)
    return head.eval()


Entries = Mapping[str, Any] | None  # tensors of the checkpoint by name; None: there is no checkpoint
Reading = tuple[DraftHeadSpec, Names, tuple[str, ...]]  # a head, names as in Architecture, and what is ignored


def _flattened(hf: Config) -> Config:
    """Move the entries of the layer to the others, as config.json of models has them. `speculators` writes them
    apart."""
    return {**hf, **mapping(hf, "transformer_layer_config"), "architectures": hf.get("architectures")}


def _name(entries: Entries, *names: str) -> str:
    """Return the first of these names, bare or after "model.", that the checkpoint has; the first of all if it has
    none."""
    for name in (*names, *(f"model.{name}" for name in names)):
        if entries is not None and any(entry == name or entry.startswith(f"{name}.") for entry in entries):
            return name
    return names[0]


def _has(entries: Entries, name: str) -> bool:
    return entries is not None and any(_name(entries, name) + end in entries for end in ("", ".weight"))


def _layer_names(entries: Entries) -> dict[str, str | TensorLayout]:
    prefix = _name(entries, "midlayer", "layers.0")
    ours = {name: path for name, path in qwen.NAMES3.items() if path.startswith("layers.*.")}
    return {name.replace("model.layers.*", prefix): path.replace("layers.*", "layer") for name, path in ours.items()}


def _check_one_layer(hf: Config) -> None:
    if (layers := integer(hf, "num_hidden_layers", 1)) != 1:
        raise ModelError(f"config.json: num_hidden_layers is {layers}; heads that draft with one layer are supported.")
    if "sliding_attention" in (listed(hf, "layer_types", str) or ()):
        raise ModelError("config.json: a head that drafts with a sliding window is not supported.")


def read_eagle3(hf: Config, target: DecoderSpec, entries: Entries) -> Reading:
    """EAGLE-3 as SpecForge, its authors and `speculators` write it."""
    _check_one_layer(hf)
    size, norm = integer(hf, "hidden_size"), read_rms_norm(hf)
    own = mapping(hf, "eagle_config")
    reads_layers = flag(own, "use_aux_hidden_state", True)
    for entry in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if not flag(own, entry, True):
            raise ModelError(f"config.json: eagle_config has {entry}={own[entry]}, which is not supported.")
    features = _feature_layers(hf, own, len(target.layers)) if reads_layers else (len(target.layers),)
    wanted = integer(hf, "target_hidden_size", target.hidden_size)
    if wanted != target.hidden_size:
        raise ModelError(f"The head is for a model of hidden size {wanted}; this one has {target.hidden_size}.")
    prefix = _name(entries, "midlayer", "layers.0")
    qk_norm = norm if hf.get("model_type") == "qwen3" or _has(entries, f"{prefix}.self_attn.q_norm") else None
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, input_size=2 * size)
    vocab = integer(hf, "draft_vocab_size", target.vocab_size)
    if vocab > target.vocab_size:
        raise ModelError(f"config.json: draft_vocab_size is {vocab}, but the model has {target.vocab_size} tokens.")
    spec = DraftHeadSpec(
        LayerSpec(attention, read_gated_mlp(hf, bias=flag(hf, "mlp_bias")), attention_norm=norm, mlp_norm=norm),
        size,
        features,
        target.hidden_size,
        vocab,
        joins=False,
        state_norm=norm,
        projects_features=reads_layers,
        each_feature_norm=norm if flag(hf, "fc_norm") else None,
        all_features_norm=norm if flag(hf, "norm_before_fc") else None,
        residual_is_normed=flag(hf, "norm_before_residual"),
        final_norm=norm,
        passes_normed=flag(hf, "norm_output"),
        has_embedding=_has(entries, "embed_tokens"),
        has_head=_has(entries, "lm_head") or vocab != target.vocab_size,
        has_offsets=_has(entries, "d2t") or vocab != target.vocab_size,
    )
    if size != target.hidden_size and entries is not None and not (spec.has_embedding and spec.has_head):
        raise ModelError(f"A head of size {size} needs an embedding and lm_head of its own: the model has others.")
    names: dict[str, str | TensorLayout] = {
        **_layer_names(entries),
        f"{prefix}.hidden_norm": "state_norm",
        _name(entries, "fc"): "project",
        _name(entries, "fc_norm") + ".*": "each_norm.*",
        _name(entries, "input_norm"): "all_norm",
        _name(entries, "norm"): "norm",
        _name(entries, "embed_tokens"): "embedding",
        _name(entries, "lm_head"): "head",
        _name(entries, "d2t"): TensorLayout(("offsets",), bare=True),
    }
    return spec, names, ("t2d", "*.t2d", "verifier_*", "*rotary_emb.inv_freq")


def _feature_layers(hf: Config, own: Config, count: int) -> tuple[int, ...]:
    """The layers of the model whose entering states are read. `eagle_config` counts those that they leave."""
    layers = listed(hf, "eagle_aux_hidden_state_layer_ids", int)
    if not layers and (left := listed(own, "eagle_aux_hidden_state_layer_ids", int)):
        layers = [layer + 1 for layer in left]
    if not layers and count < 6:
        raise ModelError(
            f"config.json: eagle_aux_hidden_state_layer_ids is missing, and a model of {count} layers has no usual "
            f"ones; list the layers whose entering states the head reads."
        )
    found = tuple(layers or (2, count // 2, count - 3))
    if wrong := [layer for layer in found if not 0 <= layer < count]:
        raise ModelError(f"config.json: eagle_aux_hidden_state_layer_ids has {wrong[0]}; the model has {count} layers.")
    return found


def read_eagle(hf: Config, target: DecoderSpec, entries: Entries) -> Reading:
    """EAGLE-1 and 2: embedding and the model's last states are joined; the layer has no first norm."""
    _check_one_layer(hf)
    size, norm, bias = integer(hf, "hidden_size"), read_rms_norm(hf), flag(hf, "attention_bias")
    if size != target.hidden_size:
        raise ModelError(f"The head is for a model of hidden size {size}; this one has {target.hidden_size}.")
    attention = read_attention(hf, qkv_bias=bias, o_bias=bias)
    spec = DraftHeadSpec(
        LayerSpec(attention, read_gated_mlp(hf, bias=flag(hf, "mlp_bias")), mlp_norm=norm),
        size,
        (len(target.layers),),
        size,
        target.vocab_size,
        joins=True,
        join_bias=entries is not None and _name(entries, "fc") + ".bias" in entries,
        has_embedding=_has(entries, "embed_tokens"),
    )
    names = {
        **_layer_names(entries),
        _name(entries, "fc"): "join",
        _name(entries, "embed_tokens"): "embedding",
    }
    return spec, names, ("*rotary_emb.inv_freq", "lm_head.*", "model.lm_head.*")


def read_mtp(hf: Config, target: DecoderSpec, entries: Entries) -> Reading:
    """The layer past the last one of DeepSeek-V3 and GLM-4.5, which predicts one token more."""
    known = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
    if not any(name in known for name in hf.get("architectures") or ()):
        raise ModelError(f"method='mtp' is for {' and '.join(known)}; use another method of speculative_config.")
    if not integer(hf, "num_nextn_predict_layers", 0, least=0):
        raise ModelError("config.json: num_nextn_predict_layers is 0, so the model has no layer for method='mtp'.")
    norm, last = read_rms_norm(hf), f"model.layers.{len(target.layers)}"
    spec = DraftHeadSpec(
        target.layers[-1],
        target.hidden_size,
        (len(target.layers),),
        target.hidden_size,
        target.vocab_size,
        joins=True,
        embedding_norm=norm,
        state_norm=norm,
        final_norm=norm,
        passes_normed=True,
        has_embedding=entries is not None and f"{last}.embed_tokens.weight" in entries,
        has_head=entries is not None and f"{last}.shared_head.head.weight" in entries,
    )
    names: dict[str, str | TensorLayout] = {
        f"{last}.enorm": "embedding_norm",
        f"{last}.hnorm": "state_norm",
        f"{last}.eh_proj": "join",
        f"{last}.shared_head.norm": "norm",
        f"{last}.shared_head.head": "head",
        f"{last}.embed_tokens": "embedding",
    }
    for name, ours in architectures.find(hf).names_for(hf).items():
        if name.startswith("model.layers.*."):
            theirs = name.replace("model.layers.*", last, 1)
            if isinstance(ours, str):
                names[theirs] = ours.replace("layers.*", "layer", 1)
            else:
                targets = tuple(target.replace("layers.*", "layer", 1) for target in ours.targets)
                names[theirs] = replace(ours, targets=targets)
    return (
        spec,
        names,
        (
            "*.rotary_emb.inv_freq",
            *(f"model.layers.{layer}.*" for layer in _others(target, hf)),
            "model.embed_tokens.*",
            "model.norm.*",
            "lm_head.*",
        ),
    )


def _others(target: DecoderSpec, hf: Config) -> list[int]:
    """Return the layers of the checkpoint except the first one past the model's."""
    count = len(target.layers)
    return [*range(count), *range(count + 1, count + integer(hf, "num_nextn_predict_layers"))]


READERS = {"eagle3": read_eagle3, "eagle": read_eagle, "mtp": read_mtp}


def read_medusa(hf: Config, target: DecoderSpec, entries: Entries) -> tuple[MedusaSpec, Names]:
    """Medusa, as its authors write it and as vLLM reads it: a stack of blocks and a matrix to the vocabulary for each
    draft."""
    by_authors = "medusa_num_heads" in hf
    heads = integer(hf, "medusa_num_heads" if by_authors else "num_heads")
    layers = integer(hf, "medusa_num_layers" if by_authors else "num_hidden_layers", 1)
    size = integer(hf, "hidden_size", target.hidden_size)
    if size != target.hidden_size:
        raise ModelError(f"The heads are for a model of hidden size {size}; this one has {target.hidden_size}.")
    if flag(hf, "original_lm_head"):
        raise ModelError("config.json: original_lm_head is not supported; use Medusa heads with matrices of their own.")
    vocab = integer(hf, "truncated_vocab_size", target.vocab_size)
    if vocab > target.vocab_size:
        raise ModelError(f"config.json: truncated_vocab_size is {vocab}; the model has {target.vocab_size} tokens.")
    block = "*.*.linear" if by_authors else "blocks.*.layers.*"
    first = block.replace("*", "0")
    names: dict[str, str | TensorLayout] = {
        block: "blocks.*.*",
        f"*.{layers}" if by_authors else "lm_heads.*": "heads.*",
        "token_map": TensorLayout(("offsets",), bare=True),
    }
    has_bias = by_authors if entries is None else f"{first}.bias" in entries
    return MedusaSpec(heads, layers, size, (len(target.layers),), vocab, has_bias, _has(entries, "token_map")), names


def _check_vocabulary(vocabulary: DraftVocabulary, vocab_size: int, path: Path) -> None:
    tokens = vocabulary(torch.arange(vocabulary.size, device=vocabulary.weight.device))
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ModelError(
            f"The weights in {path} are damaged: d2t or token_map leads outside of the model's {vocab_size} tokens."
        )
