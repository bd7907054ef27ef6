"""Heads that draft: one decoder layer on top of a model, which reads the model's own hidden states. EAGLE-3 reads those
of three layers, EAGLE-1 and MTP the last ones. Worker process.

Position p of a head stands for the token p + 1 and the model's states at p, from which it predicts the token p + 2.
Where the model's states are not known yet, those that the head computed itself take their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvasir.attention.base import AttentionBackend, AttentionBatch
from kvasir.attention.select import select as select_attention
from kvasir.config.engine import EngineConfig
from kvasir.distributed import Mesh
from kvasir.errors import ModelError
from kvasir.layers.attention import ATTENTIONS
from kvasir.layers.base import Build, DecoderBuild, WeightLayer, weight_bytes
from kvasir.layers.embedding import Embedding, Head
from kvasir.layers.linear import replicated_linear
from kvasir.layers.mlp import FEED_FORWARDS
from kvasir.layers.norm import make_norm
from kvasir.layers.spec import NormSpec
from kvasir.messages import KVSpec
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
from kvasir.models.loader import load_part, make_build, open_source
from kvasir.models.native import LibraryModel
from kvasir.models.spec import Config, DecoderSpec, LayerSpec, Names, TensorLayout
from kvasir.models.transformer import Transformer
from kvasir.quantization.base import parameter
from kvasir.quantization.formats import find_format


@dataclass(frozen=True)
class DraftHeadSpec:
    """What a head is made of. Sizes are those of the head, unless said otherwise."""

    layer: LayerSpec  # its attention_norm reads the result of `joins`, or where nothing joins, the token's embedding
    hidden_size: int
    features: tuple[int, ...]  # layers of the model whose entering states are read; the number of layers: the last ones
    feature_size: int  # of the model's states
    vocab_size: int  # that it drafts from
    joins: bool  # embedding and states are projected to one vector; if not, they stand side by side
    join_bias: bool = False
    embedding_norm: NormSpec | None = None  # these two are of what joins
    state_norm: NormSpec | None = None
    projects_features: bool = False  # states of several layers, or of another size, are projected to one vector
    each_feature_norm: NormSpec | None = None  # of each layer's states before that
    all_features_norm: NormSpec | None = None  # of all of them as one vector
    residual_is_normed: bool = False  # EAGLE-3: the residual begins after the norm of the states
    final_norm: NormSpec | None = None
    passes_normed: bool = False  # the next draft is computed from states after the final norm
    has_embedding: bool = False  # of its own; if not, the model's is used
    has_head: bool = False  # the same
    has_offsets: bool = False  # its vocabulary is a part of the model's


class DraftVocabulary(WeightLayer):
    """Which of the model's tokens the head's tokens are: the head's number and an offset."""

    def __init__(self, build: Build, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = parameter((size,), torch.int64, build.device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.weight[tokens]


class DraftLayer(nn.Module):
    """The attention and the feed-forward network of a head, and what stands between."""

    def __init__(self, build: DecoderBuild, spec: LayerSpec) -> None:
        super().__init__()
        self.attention_norm = make_norm(build, spec.attention_norm, build.hidden_size)
        self.attention = ATTENTIONS.make(build, spec.attention, "layer.attention")
        self.mlp_norm = make_norm(build, spec.mlp_norm, build.hidden_size)
        self.mlp = FEED_FORWARDS.make(build, spec.mlp, "layer.mlp")


class DraftHead(nn.Module):
    """Drafts the next token from a token and states. `target` gives what the checkpoint of the head lacks."""

    def __init__(
        self, build: Build, spec: DraftHeadSpec, backend: AttentionBackend, max_positions: int, target: Transformer
    ) -> None:
        super().__init__()
        self.spec, self.backend, self.dtype = spec, backend, build.dtype
        self._target = (target,)  # in a tuple, so that its parameters are not listed as this module's
        size, features = spec.hidden_size, len(spec.features) * spec.feature_size
        self.each_norm = nn.ModuleList(
            make_norm(build, spec.each_feature_norm, spec.feature_size) for _ in spec.features if spec.each_feature_norm
        )
        self.all_norm = make_norm(build, spec.all_features_norm, features)
        self.project: nn.Module = nn.Identity()
        if spec.projects_features:
            self.project = replicated_linear(build, "project", features, size, bias=False)
        self.embedding: Embedding | None = None
        if spec.has_embedding:
            self.embedding = Embedding(build, target.vocab_size, size)
        self.embedding_norm = make_norm(build, spec.embedding_norm, size)
        self.state_norm = make_norm(build, spec.state_norm, size)
        self.join: nn.Module = nn.Identity()
        if spec.joins:
            self.join = replicated_linear(build, "join", 2 * size, size, bias=spec.join_bias)
        parts = DecoderBuild(**vars(build), hidden_size=size, backend=backend, max_positions=max_positions)
        self.layer = DraftLayer(parts, spec.layer)
        self.rotaries = nn.ModuleList(parts.rotaries.values())
        self.norm = make_norm(build, spec.final_norm, size)
        self.head = Head(build, spec.vocab_size, size) if spec.has_head else None
        self.offsets = DraftVocabulary(build, spec.vocab_size) if spec.has_offsets else None

    # ------------------------------------------------------------ a step

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The model's states of `spec.features`, side by side, as the head reads them: [tokens, hidden]."""
        if len(self.each_norm):
            parts = states.chunk(len(self.each_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.each_norm, parts, strict=True)], dim=-1)
        combined: torch.Tensor = self.project(self.all_norm(states))
        return combined

    def store(self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the keys and values of tokens and states that are known; a single layer needs no more of them."""
        self.layer.attention.store(self._enter(ids, states)[0], positions, slots)

    def forward(
        self,
        ids: torch.Tensor,  # [rows] int64
        states: torch.Tensor,  # [rows, hidden]
        positions: torch.Tensor,  # [rows] int64
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafted tokens [rows] int64, and the states from which the next ones are drafted. They may take the
        memory of `states`."""
        layer = self.layer
        hidden, residual = self._enter(ids, states)
        hidden, residual = layer.mlp_norm.add(layer.attention(hidden, positions, batch), residual)
        normed, stream = self.norm.add(layer.mlp(hidden), residual)
        if self.head is None:
            tokens = self._target[0].logits(normed).argmax(dim=-1)
        else:
            tokens = self.head(normed).argmax(dim=-1)
        if self.offsets is not None:
            tokens = self.offsets(tokens)
        return tokens, normed if self.spec.passes_normed else stream

    def _enter(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the residual."""
        embedding = self._target[0].embedding if self.embedding is None else self.embedding
        embedded, layer = embedding(ids), self.layer
        if self.spec.joins:
            pair = torch.cat((self.embedding_norm(embedded), self.state_norm(states)), dim=-1)
            joined: torch.Tensor = self.join(pair)
            return layer.attention_norm(joined), joined
        normed = self.state_norm(states)
        residual = normed if self.spec.residual_is_normed else states
        return torch.cat((layer.attention_norm(embedded), normed), dim=-1), residual

    # ------------------------------------------------------------ what the worker asks

    @property
    def capturable(self) -> bool:
        return self.backend.capturable

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        return KVSpec(1, block_size, prod(self.page_shape(block_size, dtype)) * dtype.itemsize)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        return self.layer.attention.page_shape(block_size, dtype)

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        (self.layer.attention.kv_cache,) = caches

    def compile_key(self) -> str:
        return f"{self.spec} {type(self.backend).__name__}"

    def weight_bytes(self) -> int:
        return weight_bytes(self)


# ---------------------------------------------------------------- checkpoints


def load_draft_head(
    config: EngineConfig, method: str, device: torch.device, target: Transformer | LibraryModel
) -> DraftHead:
    """The head for this model. `config.model` describes the head: its directory and its config.json."""
    decoder = target.model if isinstance(target, LibraryModel) else target
    hf, path = _flattened(config.model.hf), Path(config.model.path)
    form = find_format(hf, path)
    plain = None if config.load.load_format == "dummy" else Safetensors(path, small=True)
    entries = None if plain is None else plain.entries
    spec, names, ignored = READERS[method](hf, decoder.spec, entries)
    build = make_build(config, getattr(torch, config.model.dtype), Mesh(), form, device)
    backend = select_attention(config.device.attention_backend, device)
    head = DraftHead(build, spec, backend, config.model.max_model_len, decoder)
    source = None if plain is None else open_source(plain, names, ignored, form, device)
    around = DecoderSpec(spec.vocab_size, spec.hidden_size, (spec.layer,), spec.final_norm)
    load_part(head, source, around, config, device, form)
    if head.offsets is not None:
        _check_offsets(head.offsets, decoder.vocab_size, path)
    return head.eval()


Entries = Mapping[str, Any] | None  # tensors of the checkpoint by name; None: there is no checkpoint
Reading = tuple[DraftHeadSpec, Names, tuple[str, ...]]  # a head, names as in Architecture, and what is ignored


def _flattened(hf: Config) -> Config:
    """The entries of the layer beside all others, as in config.json of models: `speculators` writes them apart."""
    return {**hf, **mapping(hf, "transformer_layer_config"), "architectures": hf.get("architectures")}


def _name(entries: Entries, *names: str) -> str:
    """The first of these names, bare or after "model.", that the checkpoint has; the first of all if it has none."""
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
    """The layers of the checkpoint that are not the first one past the model's."""
    count = len(target.layers)
    return [*range(count), *range(count + 1, count + integer(hf, "num_nextn_predict_layers"))]


READERS = {"eagle3": read_eagle3, "eagle": read_eagle, "mtp": read_mtp}


def _check_offsets(vocabulary: DraftVocabulary, vocab_size: int, path: Path) -> None:
    tokens = torch.arange(vocabulary.size, device=vocabulary.weight.device) + vocabulary.weight
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ModelError(f"The weights in {path} are damaged: d2t leads outside of the model's {vocab_size} tokens.")
