"""GGUF files as models: their metadata as config.json, checks of it, and their tensors under the decoder's names.

The process that resolves settings reads the config; the worker loads tensors. Files of Llama have the rows of queries
and keys in the order of interleaved rotation, so the decoder rotates interleaved and rows need not be moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvasir.errors import ModelError
from kvasir.models.architectures import find
from kvasir.models.checkpoint import TensorEntry
from kvasir.models.config_reader import fault_of_integer, fault_of_real
from kvasir.models.spec import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_UP,
    QKV,
    DecoderSpec,
    LayerSpec,
    Names,
    TensorLayout,
    halves,
    stacked_qkv,
)
from kvasir.quantization.gguf import PackedRows
from kvasir.quantization.gguf_file import GGUFFile

# general.architecture in the file -> architecture in config.json
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
}
_MIXTURES = {**ARCHITECTURES, "llama": "MixtralForCausalLM"}  # of files with experts
_WITH_EXPERTS = (
    "llama",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "deepseek2",
    "glm4moe",
    "gpt-oss",
    "granitemoe",
    "dbrx",
    "minimax-m2",
)
_ENTRIES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
}


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata in the words of config.json."""
    kind = file.architecture
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path} holds a model of the kind {kind!r:.80}; supported in GGUF files are {known}.")
    is_mixture = bool(file.get("expert_count"))
    if is_mixture and kind not in _WITH_EXPERTS:
        known = ", ".join(_WITH_EXPERTS)
        raise ModelError(
            f"{file.path} holds a mixture of experts of the kind {kind}; supported in GGUF files are those of {known}. "
            f"Others run from safetensors."
        )
    config = {ours: file.get(theirs) for theirs, ours in _ENTRIES.items() if file.get(theirs) is not None}
    if not is_mixture:
        config = {ours: value for ours, value in config.items() if not ours.startswith("num_experts")}
    if missing := [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads") if key not in config]:
        raise damaged(file, f"it does not say what {missing[0]} is")
    check_entries(file, _ENTRIES, config)
    config |= {
        "architectures": [(_MIXTURES if is_mixture else ARCHITECTURES)[kind]],
        "model_type": kind,
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
    }
    check_tensors(file, config)
    config.setdefault("head_dim", _head_dim(file, config))
    if kind == "llama":
        config |= {"sliding_window": None, "attention_bias": "blk.0.attn_q.bias" in file.tensors}
        if is_mixture:
            config["num_local_experts"] = config["num_experts"]
    config |= {"rope_scaling": _scaling(file)} | _OF_KIND.get(kind, lambda *_: {})(file, config)
    try:
        find(config).read_spec(config)
    except ModelError as error:
        what = str(error).removeprefix("config.json: ").rstrip(".")
        raise ModelError(f"{file.path}: {what}.") if "not supported" in what else damaged(file, what) from error
    return config


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight.")
    return file.tensors["token_embd.weight"].shape[0]


def _head_dim(file: GGUFFile, config: dict[str, Any]) -> int:
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if size % heads:
        kind = file.architecture
        raise damaged(
            file, f"{kind}.embedding_length is {size}, not a multiple of {kind}.attention.head_count, {heads}"
        )
    return int(size // heads)


def _scaling(file: GGUFFile) -> dict[str, Any] | None:
    """RoPE scaling. Factors for each pair of dimensions are tensors of the file; Llama 3's hold for all lengths."""
    if "rope_freqs.weight" in file.tensors and "rope_factors_long.weight" not in file.tensors:
        same = file.floats("rope_freqs.weight")
        return {"rope_type": "longrope", "long_factor": same, "short_factor": same, "attention_factor": 1.0}
    found = {ours: file.get(f"rope.scaling.{theirs}") for theirs, ours in _SCALING.items()}
    given = {key: value for key, value in found.items() if value is not None}
    if "rope_factors_long.weight" in file.tensors:
        factors = {f"{kind}_factor": file.floats(f"rope_factors_{kind}.weight") for kind in ("long", "short")}
        return {"rope_type": "longrope", **given, **factors}
    kind = file.get("rope.scaling.type")
    if not isinstance(kind, str | None):
        raise damaged(file, f"{file.architecture}.rope.scaling.type is not a string")
    return {"rope_type": kind, **given} if kind not in (None, "none") else None


def _gemma(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    # Only the largest model of each generation scales scores by something other than the size of a head.
    largest = {"gemma2": 46, "gemma3": 62}.get(file.architecture) == config["num_hidden_layers"]
    shared = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": shared if largest else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    rotated = file.get("rope.dimension_count") or config["head_dim"]
    if fault := fault_of_integer("head_dim", rotated):
        raise damaged(file, f"phi3.rope.dimension_count {fault}")
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "sliding_window": config.get("sliding_window") or None,
    }


def _qwen_moe(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return {"norm_topk_prob": file.architecture == "qwen3moe", "qkv_bias": "blk.0.attn_q.bias" in file.tensors}


def _glm4_moe(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Read GLM-4.5's entries. Its files count layers that predict several tokens at once with the others."""
    extra = file.get("nextn_predict_layers") or 0
    rotated = file.get("rope.dimension_count") or config["head_dim"] // 2
    for name, value, least in (("nextn_predict_layers", extra, 0), ("rope.dimension_count", rotated, 1)):
        if fault := fault_of_integer(name, value, least):
            raise damaged(file, f"glm4moe.{name} {fault}")
    return {
        **_routing(file),
        "num_hidden_layers": config["num_hidden_layers"] - extra,
        "num_nextn_predict_layers": extra,
        "partial_rotary_factor": rotated / config["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _deepseek2(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek 2 and 3. Files say the sizes of a head either of the cached vector or, with _mla, of the heads."""
    sizes: dict[str, Any] = {
        ours: file.get(theirs)
        for theirs, ours in (
            ("attention.kv_lora_rank", "kv_lora_rank"),
            ("attention.q_lora_rank", "q_lora_rank"),
            ("rope.dimension_count", "qk_rope_head_dim"),
        )
    }
    key = file.get("attention.key_length_mla") or file.get("attention.key_length")
    sizes["v_head_dim"] = file.get("attention.value_length_mla") or file.get("attention.value_length")
    for name, value in {**sizes, "key_length": key}.items():
        if (value is not None or name != "q_lora_rank") and (fault := fault_of_integer(name, value)):
            raise damaged(file, f"deepseek2: {name} {fault}")
    is_third = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    found = {
        "first_k_dense_replace": 0,
        **_routing(file),
        **sizes,
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - sizes["qk_rope_head_dim"],
        "head_dim": sizes["qk_rope_head_dim"],
        "architectures": ["DeepseekV3ForCausalLM" if is_third else "DeepseekV2ForCausalLM"],
    }
    if not is_third:
        found |= {"norm_topk_prob": False}
        found |= {"topk_method": "group_limited_greedy"} if file.get("expert_group_count") else {}
    if (scaling := config.get("rope_scaling") or _scaling(file)) is not None:
        log = file.get("rope.scaling.yarn_log_multiplier")
        if log is not None and fault_of_real("yarn_log_multiplier", log) is None:
            scaling = {**scaling, "mscale": log / 0.1, "mscale_all_dim": log / 0.1}
        found["rope_scaling"] = scaling
    return found


def _routing(file: GGUFFile) -> dict[str, Any]:
    """Read how experts are chosen, from the files of DeepSeek and its like."""
    names = {
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    found = {ours: file.get(theirs) for theirs, ours in names.items() if file.get(theirs) is not None}
    return {"n_shared_experts": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, **found}


def _gpt_oss(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    scaling = _scaling(file)
    return {
        "intermediate_size": config.get("moe_intermediate_size", config.get("intermediate_size")),
        "num_local_experts": config.get("num_experts"),
        "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False},
    }


def _granite_moe(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    found: dict[str, Any] = {ours: file.get(theirs) for theirs, ours in names.items() if file.get(theirs) is not None}
    for name, value in found.items():
        if fault := fault_of_real(name, value):
            raise damaged(file, f"granitemoe: {name} {fault}")
    shared = config.get("shared_expert_intermediate_size")
    return {**found, "num_local_experts": config.get("num_experts"), "shared_intermediate_size": shared}


def _dbrx(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Its config.json has the sizes of attention and of experts in sections."""
    attention = {"kv_n_heads": config.get("num_key_value_heads"), "rope_theta": config.get("rope_theta")}
    inner, count, chosen = (config.get(name) for name in ("intermediate_size", "num_experts", "num_experts_per_tok"))
    experts = {"ffn_hidden_size": inner, "moe_num_experts": count, "moe_top_k": chosen}
    return {
        "attn_config": {**attention, "clip_qkv": file.get("attention.clamp_kqv")},
        "ffn_config": {**experts, "moe_normalize_expert_weights": 1.0},
    }


def _minimax_m2(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": config.get("moe_intermediate_size", config.get("intermediate_size")),
        "num_local_experts": config.get("num_experts"),
        "rotary_dim": file.get("rope.dimension_count") or config["head_dim"],
    }


_OF_KIND: dict[str, Callable[[GGUFFile, dict[str, Any]], dict[str, Any]]] = {
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite_moe,
    "dbrx": _dbrx,
    "minimax-m2": _minimax_m2,
}

# ---------------------------------------------------------------- tensors

_COMMON: dict[str, str | TensorLayout] = {
    "token_embd": "embedding",
    "blk.*.attn_norm": "layers.*.attention_norm",
    "blk.*.attn_output": "layers.*.attention.o",
    "blk.*.ffn_norm": "layers.*.mlp_norm",
    "blk.*.ffn_down": "layers.*.mlp.down",
    "output_norm": "norm",
    "output": "head",
}
_SPLIT: dict[str, str | TensorLayout] = {
    **_COMMON,
    "blk.*.attn_q": "layers.*.attention.qkv:q",
    "blk.*.attn_k": "layers.*.attention.qkv:k",
    "blk.*.attn_v": "layers.*.attention.qkv:v",
    "blk.*.ffn_gate": "layers.*.mlp.gate_up:gate",
    "blk.*.ffn_up": "layers.*.mlp.gate_up:up",
    "blk.*.attn_q_norm": "layers.*.attention.q_norm",
    "blk.*.attn_k_norm": "layers.*.attention.k_norm",
}
_EXPERTS: dict[str, str | TensorLayout] = {
    "blk.*.ffn_gate_inp": "layers.*.mlp.router",
    "blk.*.ffn_gate_exps": TensorLayout(EXPERT_GATE_UP[:1], stacked="entries"),
    "blk.*.ffn_up_exps": TensorLayout(EXPERT_GATE_UP[1:], stacked="entries"),
    "blk.*.ffn_down_exps": TensorLayout(EXPERT_DOWN, stacked="entries"),
    "blk.*.ffn_gate_inp_shexp": "layers.*.mlp.shared_gate",
    "blk.*.ffn_gate_shexp": "layers.*.mlp.shared.gate_up:gate",
    "blk.*.ffn_up_shexp": "layers.*.mlp.shared.gate_up:up",
    "blk.*.ffn_down_shexp": "layers.*.mlp.shared.down",
}
_CORRECTED: dict[str, str | TensorLayout] = {
    **_EXPERTS,
    "blk.*.exp_probs_b.bias": TensorLayout(("layers.*.mlp.routing",), bare=True),
}
_LATENT: dict[str, str | TensorLayout] = {
    "blk.*.attn_q": "layers.*.attention.down:q",
    "blk.*.attn_q_a": "layers.*.attention.down:q",
    "blk.*.attn_q_a_norm": "layers.*.attention.query_norm",
    "blk.*.attn_q_b": "layers.*.attention.query_up:q",
    "blk.*.attn_kv_a_mqa": "layers.*.attention.down:kv",
    "blk.*.attn_kv_a_norm": "layers.*.attention.latent_norm",
    "blk.*.attn_kv_b": "layers.*.attention.latent_up",
}
_SINKS: dict[str, str | TensorLayout] = {
    "blk.*.attn_sinks.weight": TensorLayout(("layers.*.attention.sinks",), bare=True),
}
_NORM_AFTER: dict[str, str | TensorLayout] = {"blk.*.post_attention_norm": "layers.*.mlp_norm"}
_FUSED = {
    **_COMMON,
    "blk.*.attn_qkv": TensorLayout(QKV, stacked_qkv),
    "blk.*.ffn_up": TensorLayout(GATE_UP, halves),
}
_AROUND = {
    "blk.*.post_attention_norm": "layers.*.attention_post_norm",
    "blk.*.post_ffw_norm": "layers.*.mlp_post_norm",
}
IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def ignored(file: GGUFFile, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of tensors that are not used: layers past the last one predict several tokens at once."""
    first, extra = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return *IGNORED, *(f"blk.{first + number}.*" for number in range(extra))


def _less_one(tensor: Any, layer: LayerSpec | None) -> tuple[Any]:
    """GGUF files hold Gemma's gains themselves, and the decoder adds one to the gains it loads."""
    return (tensor - 1.0,)


def names_for(file: GGUFFile) -> Names:
    if file.architecture == "phi3":
        return _FUSED
    if file.architecture == "deepseek2":
        other = "blk.*.attn_q" if file.get("attention.q_lora_rank") else "blk.*.attn_q_a"
        latent = {theirs: ours for theirs, ours in _LATENT.items() if theirs != other}
        return {**{theirs: ours for theirs, ours in _SPLIT.items() if ours not in QKV}, **_CORRECTED, **latent}
    if file.architecture in ("glm4moe", "gpt-oss"):
        own = _CORRECTED if file.architecture == "glm4moe" else {**_EXPERTS, **_SINKS}
        names = {theirs: ours for theirs, ours in _SPLIT.items() if theirs != "blk.*.ffn_norm"}
        return {**names, **own, **_NORM_AFTER}
    if file.architecture == "dbrx":
        names = {
            theirs: ours for theirs, ours in _FUSED.items() if ours not in ("layers.*.mlp_norm", "layers.*.mlp.down")
        }
        return {**names, **_EXPERTS, "blk.*.attn_output_norm": "layers.*.mlp_norm"}
    if file.get("expert_count"):
        return {**_SPLIT, **(_CORRECTED if file.architecture == "minimax-m2" else _EXPERTS)}
    if not file.architecture.startswith("gemma"):
        return _SPLIT
    names = _SPLIT if file.architecture == "gemma" else {**_SPLIT, **_AROUND}
    return {
        theirs: TensorLayout((ours,), _less_one) if isinstance(ours, str) and theirs.endswith("norm") else ours
        for theirs, ours in names.items()
    }


def adapt(spec: DecoderSpec, file: GGUFFile) -> DecoderSpec:
    """The spec, with the rotation that fits the file's order of queries and keys."""
    if file.architecture not in ("llama", "granitemoe"):
        return spec
    ropes = [layer.attention.rope and replace(layer.attention.rope, interleaved=True) for layer in spec.layers]
    layers = [layer.with_attention(rope=rope) for layer, rope in zip(spec.layers, ropes, strict=True)]
    return replace(spec, layers=tuple(layers))


class GGUFCheckpoint:
    """The tensors of a GGUF file, or of several, by name, as the loader reads a checkpoint. Files are mapped: a tensor
    is read when it is used."""

    described_by = "the file's own description"

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.directory = file, file.path
        self.entries = {name: TensorEntry(place.file, name, self._shape(name)) for name, place in file.tensors.items()}
        self._halves = {name for name in file.tensors if name.endswith(".attn_k_b.weight")}
        for name in self._halves:
            self._join_heads(name)
        # Copy-on-write, because torch takes no array that cannot be written to.
        paths = {tensor.file for tensor in file.tensors.values()}
        self.data = {path: np.memmap(path, np.uint8, mode="c") for path in paths}

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.file.tensors[name].shape
        # A matrix of one row is a vector in the file.
        return (1, *shape) if name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape

    def packed(self, name: str) -> PackedRows:
        tensor = self.file.tensors[name]
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        rows = self.data[tensor.file][tensor.offset : end].reshape(tensor.num_rows, tensor.row_bytes)
        return PackedRows(torch.from_numpy(rows), tensor.kind, self._shape(name))

    def read(self, names: Collection[str]) -> Iterator[tuple[str, PackedRows | torch.Tensor]]:
        for name in names:
            keys = name.replace("attn_kv_b", "attn_k_b")
            yield name, self._joined(keys) if keys in self._halves else self.packed(name)

    # Files of DeepSeek have the matrix that makes keys and values of cached vectors in two parts, each with a matrix
    # for each head, and that of keys transposed: [heads, vector, key] and [heads, value, vector].

    def _join_heads(self, keys: str) -> None:
        values = keys.replace("attn_k_b", "attn_v_b")
        shapes = [self.file.tensors[name].shape for name in (keys, values) if name in self.file.tensors]
        fits = len(shapes) == 2 and all(len(shape) == 3 for shape in shapes)
        if not fits or (shapes[0][0], shapes[0][1]) != (shapes[1][0], shapes[1][2]):
            raise damaged(self.file, f"{keys} and {values} are {', '.join(str(list(shape)) for shape in shapes)}")
        heads, width, plain = shapes[0]
        name = keys.replace("attn_k_b", "attn_kv_b")
        self.entries[name] = TensorEntry(self.file.path, name, (heads * (plain + shapes[1][1]), width))
        del self.entries[keys], self.entries[values]

    def _joined(self, keys: str) -> torch.Tensor:
        parts = [self.packed(name).expand().float() for name in (keys, keys.replace("attn_k_b", "attn_v_b"))]
        return torch.cat([parts[0].transpose(1, 2), parts[1]], 1).flatten(0, 1)


# ---------------------------------------------------------------- checks
# A file may be damaged anywhere. A wrong number is refused here; later it would fail far away or take all memory.

_REALS = ("rms_norm_eps", "rope_theta", "attn_logit_softcapping", "final_logit_softcapping")
_MAY_BE_NONE = ("sliding_window",)  # a zero means none
_TOKENS = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_LAYER = re.compile(r"blk\.(\d+)\.")


def damaged(file: GGUFFile, what: str) -> ModelError:
    return ModelError(f"{file.path} is damaged: {what}; download it again.")


def check_entries(file: GGUFFile, entries: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Check each number by itself. `entries`: names in the file -> names in config.json."""
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
    """Check the numbers against each other and against the tensors."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    if heads % kv_heads:
        raise _differ(file, "attention.head_count", heads, f"not a multiple of attention.head_count_kv, {kv_heads}")
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
