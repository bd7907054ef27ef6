"""What a pooling model makes of its hidden states: one PoolerSpec per task, read from config.json and from the files of
a sentence-transformers directory. Any process; no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, ModelError

POOLINGS = ("cls", "last", "mean", "max", "all", "step")
ACTIVATIONS = ("none", "tanh", "relu", "gelu", "gelu_tanh", "sigmoid", "silu")  # of a DenseSpec
FUNCTIONS = ("none", "normalize", "softmax", "sigmoid", "relu")  # of a PoolerSpec
_MODULES = "modules.json"
_LENGTHS = (
    ("sentence_bert_config.json", "max_seq_length"),
    ("sentence_roberta_config.json", "max_seq_length"),
    ("sentence_distilbert_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
_NO_LENGTH = 1 << 30  # tokenizers without a limit have a huge number
# Activations as sentence-transformers writes them: the last word of a class's name.
_TORCH_NAMES = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last", "last": "last"}


@dataclass(frozen=True)
class DenseSpec:
    """One layer of a pooler's head: activation(weight · x + bias), then perhaps a norm. Computed in float32."""

    name: str  # of its tensors in the checkpoint
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "none"
    norm: str | None = None  # name of the tensors of a LayerNorm after the activation
    norm_eps: float = 1e-5
    norm_bias: bool = True
    file: str | None = None  # a directory or file beside the checkpoint that holds the tensors
    from_tokens: tuple[str, ...] = ()  # its one row is the LM head's of the last of these tokens, less the first's


@dataclass(frozen=True)
class PoolerSpec:
    """How the vectors of one task are made."""

    task: str  # of messages.POOLING_TASKS
    pooling: str  # of POOLINGS; "all" and "step" for tasks on single tokens
    size: int  # numbers in a vector
    layers: tuple[DenseSpec, ...] = ()
    function: str = "none"  # applied last, unless a request turns it off
    num_skipped: int = 0  # first tokens of a prompt that have no vector, for tasks on single tokens
    step_tag_id: int | None = None  # of "step": the token whose vectors are returned
    returned_token_ids: tuple[int, ...] = ()  # of "step": the entries of a vector that are returned
    is_matryoshka: bool = True  # whether shorter vectors may be asked for

    @property
    def is_per_token(self) -> bool:
        return self.task.startswith("token_")

    @property
    def needs_all_tokens(self) -> bool:
        """Whether hidden states of tokens before the last are read, so that none may come from the prefix cache."""
        return self.pooling != "last"


def read_poolers(
    hf: Mapping[str, Any],
    path: Path,
    kind: str,  # embed, classify, token_classify or reward
    default_pooling: str,
    heads: Callable[[Mapping[str, Any], str], tuple[DenseSpec, ...]],
    asked: Mapping[str, Any] | None = None,  # the setting pooler_config
) -> tuple[PoolerSpec, ...]:
    """The poolers of a model; the first is that of its main task."""
    if kind == "embed":
        found = _embedders(hf, path, default_pooling)
    elif kind == "classify":
        pooling = hf.get("classifier_pooling") or ("last" if default_pooling == "last" else "cls")
        if pooling not in POOLINGS:
            raise ModelError(f"config.json: classifier_pooling {pooling!r} is not supported.")
        found = (_classifier(hf, pooling, heads(hf, kind)),)
    else:
        found = (_token_classifier(hf, kind, heads(hf, kind)),)
    made = tuple(_with_settings(each, asked or {}) for each in found)
    if not any(each.pooling == "step" for each in made):
        for name in ("step_tag_id", "returned_token_ids"):
            if (asked or {}).get(name) is not None:
                raise ConfigError(f"pooler_config: {name} is for pooling_type=step; set that, or leave {name} out.")
    return made


def num_labels(hf: Mapping[str, Any]) -> int:
    labels = hf.get("id2label")
    if isinstance(labels, Mapping) and labels:
        return len(labels)
    count = hf.get("num_labels", 2)
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"config.json: num_labels must be a whole number of at least 1, but is {count!r}.")
    return count


def _size(hf: Mapping[str, Any]) -> int:
    for name in ("hidden_size", "dim", "d_model", "n_embd"):
        if isinstance(hf.get(name), int):
            return int(hf[name])
    raise ModelError("config.json has no hidden_size, which this model needs.")


# ---------------------------------------------------------------- embeddings


def _embedders(hf: Mapping[str, Any], path: Path, default: str) -> tuple[PoolerSpec, ...]:
    size = _size(hf)
    whole = PoolerSpec("embed", default, size, function="normalize", is_matryoshka=_is_matryoshka(hf))
    tokens = PoolerSpec("token_embed", "all", size, function="normalize")
    modules = _read_list(path / _MODULES) if (path / _MODULES).is_file() else []
    if modules:
        whole, tokens = _read_modules(modules, path, replace(whole, function="none"), tokens)
    if tokens.layers and whole.pooling != "all":
        return (whole,)  # the layers before pooling are this pooler's own
    found = [whole, tokens] if whole.pooling != "all" else [tokens]
    if (path / "colbert_linear.pt").is_file() and (path / "sparse_linear.pt").is_file():  # bge-m3
        colbert = DenseSpec("", size, size, file="colbert_linear.pt")
        found[1:] = [
            replace(tokens, layers=(colbert,), num_skipped=1),
            PoolerSpec("token_classify", "all", 1, (DenseSpec("", size, 1, file="sparse_linear.pt"),), "relu"),
        ]
    return tuple(found)


def _is_matryoshka(hf: Mapping[str, Any]) -> bool:
    return bool(hf.get("is_matryoshka") or hf.get("matryoshka_dimensions"))


def has_pooling(path: Path) -> bool:
    """Whether this is a sentence-transformers directory whose modules make one vector of a text."""
    if not (path / _MODULES).is_file():
        return False
    return any(_module_kind(each) in ("Pooling", "Dense", "Normalize") for each in _read_list(path / _MODULES))


def _module_kind(module: Any) -> str:
    if not isinstance(module, Mapping) or not isinstance(module.get("type"), str):
        raise ModelError(f"{_MODULES} must be a list of modules with a type and a path, but has {module!r:.80}.")
    return str(module["type"]).rsplit(".", 1)[-1]


def _read_modules(
    modules: list[Any], path: Path, whole: PoolerSpec, tokens: PoolerSpec
) -> tuple[PoolerSpec, PoolerSpec]:
    """Read the poolers from sentence-transformers' modules. Modules before Pooling work on single tokens."""
    has_pooling = False
    size = whole.size
    for module in modules[1:]:
        kind, folder = _module_kind(module), str(module.get("path", ""))
        if kind == "Pooling":
            whole = replace(whole, pooling=_read_pooling(path / folder / "config.json"), layers=tokens.layers)
            has_pooling = True
        elif kind == "Dense":
            layer = _read_dense(path / folder, folder, size)
            size = layer.outputs
            whole = replace(whole, layers=(*whole.layers, layer), size=size)
            if not has_pooling:
                tokens = replace(tokens, layers=(*tokens.layers, layer), size=size)
        elif kind == "Normalize":
            whole = replace(whole, function="normalize")
        elif kind not in ("Dropout", "Transformer"):
            raise ModelError(
                f"{path / _MODULES}: modules of the type {kind} are not supported; supported are Transformer, Pooling, "
                f"Dense, Dropout and Normalize."
            )
    if not has_pooling:
        whole = replace(whole, pooling="all")
    return whole, tokens


def _read_pooling(file: Path) -> str:
    config = _read_object(file)
    if config.get("include_prompt") is False:
        raise ModelError(f"{file}: include_prompt=false is not supported: all tokens of a text are pooled.")
    mode = config.get("pooling_mode")
    if isinstance(mode, str) and mode in _POOLING_NAMES:
        return _POOLING_NAMES[mode]
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) == 1 and on[0] in _POOLING_FLAGS:
        return _POOLING_FLAGS[on[0]]
    shown = mode if mode is not None else ", ".join(on) or "none"
    raise ModelError(f"{file}: pooling {shown!r} is not supported; one of {', '.join(_POOLING_NAMES)} is.")


def _read_dense(folder: Path, name: str, inputs: int) -> DenseSpec:
    config = _read_object(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _TORCH_NAMES:
        known = ", ".join(_TORCH_NAMES)
        raise ModelError(f"{folder / 'config.json'}: activation {activation} is not supported; supported are {known}.")
    outputs = config.get("out_features")
    if config.get("in_features") != inputs or not isinstance(outputs, int) or outputs < 1:
        raise ModelError(
            f"{folder / 'config.json'}: in_features is {config.get('in_features')!r} and out_features {outputs!r}, but "
            f"the vectors before have {inputs} numbers."
        )
    bias = bool(config.get("bias", True))
    return DenseSpec("linear", inputs, outputs, bias, _TORCH_NAMES[activation], file=name)


def read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """The prompts of a sentence-transformers directory by name, and the name of the default one."""
    file = path / "config_sentence_transformers.json"
    if not file.is_file():
        return {}, None
    config = _read_object(file)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(each, str) for each in prompts.values()):
        raise ModelError(f"{file}: prompts must be texts by name, but are {prompts!r:.80}.")
    default = config.get("default_prompt_name")
    return dict(prompts), default if isinstance(default, str) else None


def max_seq_length(path: Path) -> int | None:
    """Length at which sentence-transformers cuts texts for this model; None if its files do not say."""
    if not (path / _MODULES).is_file():
        return None
    for name, key in _LENGTHS:  # newer versions write it into the tokenizer's file
        length = _read_object(path / name).get(key) if (path / name).is_file() else None
        if isinstance(length, int) and 0 < length < _NO_LENGTH:
            return length
    return None


# ---------------------------------------------------------------- classes


def _classifier(hf: Mapping[str, Any], pooling: str, layers: tuple[DenseSpec, ...]) -> PoolerSpec:
    count = layers[-1].outputs
    return PoolerSpec("classify", pooling, count, layers, _class_function(hf, count), is_matryoshka=False)


def _class_function(hf: Mapping[str, Any], count: int) -> str:
    """Name the function that turns a classifier's outputs into scores: the one that a cross-encoder's file names, or
    else the one for its kind of problem."""
    own = hf.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else hf.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        function = _TORCH_NAMES.get(named.rsplit(".", 1)[-1])
        if function not in FUNCTIONS:
            raise ModelError(f"config.json: the activation {named} of the scores is not supported.")
        return function
    if hf.get("problem_type") == "regression":
        return "none"
    if hf.get("problem_type") == "multi_label_classification" or count == 1:
        return "sigmoid"
    return "softmax"


def _token_classifier(hf: Mapping[str, Any], kind: str, layers: tuple[DenseSpec, ...]) -> PoolerSpec:
    count = layers[-1].outputs
    function = "softmax" if kind == "token_classify" else "none"
    return PoolerSpec("token_classify", "all", count, layers, function, is_matryoshka=False)


# ---------------------------------------------------------------- the setting pooler_config

_ENTRIES = (
    *("pooling_type", "seq_pooling_type", "tok_pooling_type", "normalize", "use_activation", "softmax", "activation"),
    *("step_tag_id", "returned_token_ids"),
)


def _with_settings(pooler: PoolerSpec, asked: Mapping[str, Any]) -> PoolerSpec:
    unknown = sorted(asked.keys() - set(_ENTRIES))
    if unknown:
        raise ConfigError(f"pooler_config has no entry {unknown[0]!r}; it takes {', '.join(_ENTRIES)}.")
    kinds = ("pooling_type", "tok_pooling_type" if pooler.is_per_token else "seq_pooling_type")
    named = next((asked[name] for name in kinds if asked.get(name) is not None), None)
    if named is not None:
        name = str(named).lower()
        if name not in POOLINGS:
            raise ConfigError(f"pooler_config: pooling_type={named!r} is not known; there is {', '.join(POOLINGS)}.")
        if (name in ("all", "step")) == pooler.is_per_token:
            pooler = replace(pooler, pooling=name)
    default = "normalize" if pooler.task.endswith("embed") else "softmax"
    for name in ("normalize", "use_activation", "softmax", "activation"):
        value = asked.get(name)
        if value is None or ((name == "normalize") != (default == "normalize") and name != "use_activation"):
            continue
        if not isinstance(value, bool):
            raise ConfigError(f"pooler_config: {name} must be true or false, but is {value!r}.")
        kept = pooler.function if pooler.function != "none" else default
        pooler = replace(pooler, function=kept if value else "none")
    return _with_steps(pooler, asked) if pooler.pooling == "step" else pooler


def _with_steps(pooler: PoolerSpec, asked: Mapping[str, Any]) -> PoolerSpec:
    tag, entries = asked.get("step_tag_id"), asked.get("returned_token_ids")
    if tag is not None and (type(tag) is not int or tag < 0):
        raise ConfigError(f"pooler_config: step_tag_id must be the id of a token, but is {tag!r}.")
    if entries is None:
        entries = pooler.returned_token_ids
    if not isinstance(entries, list | tuple) or not all(
        type(each) is int and 0 <= each < pooler.size for each in entries
    ):
        raise ConfigError(
            f"pooler_config: returned_token_ids must be whole numbers from 0 to {pooler.size - 1}, the entries "
            f"of this model's vectors, but is {entries!r:.80}."
        )
    return replace(pooler, step_tag_id=pooler.step_tag_id if tag is None else tag, returned_token_ids=tuple(entries))


def _read_object(file: Path) -> Mapping[str, Any]:
    found = _read_json(file)
    if not isinstance(found, Mapping):
        raise ModelError(f"{file} must hold a JSON object, not a {type(found).__name__}.")
    return found


def _read_list(file: Path) -> list[Any]:
    found = _read_json(file)
    if not isinstance(found, list) or not found:
        raise ModelError(f"{file} must hold a list of modules.")
    return found


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing, and {_MODULES} names its directory. Is the download complete?") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}). Is the download complete?") from None
