"""Adapters as the API process sees them: reads and checks a PEFT directory, identifies it by its content, and keeps the
names under which requests ask for it. No torch: of the tensors only the file's header is looked at, and its hash.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.config.engine import EngineConfig
from kvasir.errors import ModelError, PromptTooLongError, RequestError
from kvasir.messages import AdapterTarget, AdapterTargets, EngineRequest, Resource
from kvasir.models.hub import find_adapter
from kvasir.sampling_params import SamplingParams

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING")
TYPES = ("LORA", *PROMPT_TYPES)
# Entries of a LoRA config that change what the adapter computes and that Kvasir does not compute.
NOT_SUPPORTED = (
    *("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "trainable_token_indices"),
    *("kasa_config", "arrow_config", "monteclora_config"),
)
# What init_lora_weights may begin with if the adapter was trained beside changed weights of the model. PEFT changes
# them again whenever it loads such an adapter.
CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
VIRTUAL_TOKEN = 0  # id in the places of a soft prompt, where no id is read; one for all, so that blocks are shared
_HEADER_BYTES = 100 << 20  # safetensors allows no longer header
_FLOATS = ("F64", "F32", "F16", "BF16")


class AdapterError(RequestError):
    """An adapter cannot be used: its files are damaged, or do not fit the model."""


class AdapterNotFoundError(AdapterError):
    """There is no such adapter (HTTP 404)."""


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, as in vLLM: a name, a number of the caller's choice, and a PEFT directory or a name on
    the Hugging Face Hub. Kvasir identifies adapters by their content; the number is only handed back."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    task_id: int | None = None  # of a multitask prompt
    base_model_name: str | None = None
    load_inplace: bool = False  # a name always means the content that its path has when the request comes

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise RequestError("lora_name is empty; give the adapter a name.", "lora_request")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be 1 or more, not {self.lora_int_id!r}.", "lora_request")
        if not self.lora_path:
            raise RequestError("lora_path is empty; give a PEFT directory or a name on the Hub.", "lora_request")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


# ---------------------------------------------------------------- what an adapter is


@dataclass(frozen=True)
class Factors:
    """What an adapter does to one module: names of tensors of its file, empty where it has none."""

    down: str = ""  # lora_A
    up: str = ""  # lora_B
    scale: float = 1.0
    rank: int = 0
    is_turned: bool = False  # of experts: lora_A is on the side of the outputs, as PEFT has it for Llama 4
    up_bias: str = ""  # of lora_B
    magnitude: str = ""  # DoRA's
    weight: str = ""  # replaces the module's weight (modules_to_save)
    bias: str = ""  # replaces its bias


@dataclass(frozen=True)
class AdapterPlan:
    """All that the worker must know to load an adapter; it has been checked against the model."""

    directory: str
    modules: dict[str, Factors] = field(default_factory=dict)
    prompt_type: str = ""  # one of PROMPT_TYPES
    num_virtual_tokens: int = 0
    task: int = 0  # of a multitask prompt

    @cached_property
    def text(self) -> str:
        """The plan for the worker. Every request of the adapter carries it, so it is written once."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> AdapterPlan:
        read = json.loads(text)
        modules = {name: Factors(**factors) for name, factors in read.pop("modules").items()}
        return cls(modules=modules, **read)


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read and checked."""

    name: str
    path: str  # as it was given
    digest: bytes  # of config and tensors: two adapters with the same digest are the same
    plan: AdapterPlan
    base: str | None = None  # the model that its config names
    request: LoRARequest | None = None  # by which a caller asked for it

    @property
    def num_virtual_tokens(self) -> int:
        return self.plan.num_virtual_tokens

    @cached_property
    def resource(self) -> Resource:
        return Resource(self.digest, self.plan.text)

    @cached_property
    def changes_head(self) -> bool:
        """Whether it changes more than layers between embedding and head, or stands before the prompt."""
        return bool(self.num_virtual_tokens) or any(
            factors.weight or module.rpartition(".")[2] in ("lm_head", "embed_out", "output")
            for module, factors in self.plan.modules.items()
        )

    def salted(self, salt: bytes) -> bytes:
        """The cache salt of a request with this adapter. No user's salt begins with this byte, as those are UTF-8."""
        return b"\xff" + self.digest + salt


def with_adapter(request: EngineRequest, adapter: Adapter, params: SamplingParams, max_model_len: int) -> EngineRequest:
    """Return the request with an adapter. Only requests with the same adapter share its cached blocks.

    The virtual tokens of a soft prompt stand before the prompt; their ids mean nothing.
    """
    if params.prompt_logprobs is not None and adapter.changes_head:
        message = f"prompt_logprobs cannot be had with adapter {adapter.name!r}, which changes the head or the prompt."
        raise RequestError(message, "prompt_logprobs")
    request = replace(request, resource=adapter.resource, cache_salt=adapter.salted(request.cache_salt))
    count = adapter.num_virtual_tokens
    if not count:
        return request
    length = count + len(request.prompt_token_ids)
    if length >= max_model_len:
        message = f"With the {count} virtual tokens of adapter {adapter.name!r} the prompt has {length} tokens, but "
        raise PromptTooLongError(f"{message}max_model_len={max_model_len}; shorten it.", "prompt", length)
    sampling, extras = request.sampling, request.sampling.extras
    if extras is not None:
        extras = replace(extras, num_prompt_tokens=length, num_virtual_tokens=count)
    until = sampling.banned_until + count if sampling.banned_until else 0
    virtual = np.full(count, VIRTUAL_TOKEN, np.int32)
    return replace(
        request,
        prompt_token_ids=np.concatenate([virtual, request.prompt_token_ids]),
        max_tokens=min(request.max_tokens, max_model_len - length),
        sampling=replace(sampling, banned_until=until, extras=extras),
    )


# ---------------------------------------------------------------- reading a directory


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    shape: tuple[int, ...]


def read_adapter(name: str, directory: Path, path: str, targets: AdapterTargets, task_id: int | None = None) -> Adapter:
    """Read and check the adapter in a directory. Raises an AdapterError that names what is wrong."""
    config_file, weights_file = directory / CONFIG, directory / WEIGHTS
    if not directory.is_dir():
        raise AdapterNotFoundError(f"adapter {name!r}: there is no directory {path}.", "lora_path")
    if not config_file.is_file():
        raise AdapterNotFoundError(f"adapter {name!r}: {path} has no {CONFIG}.", "lora_path")
    if not weights_file.is_file():
        more = "; save it with safetensors" if (directory / "adapter_model.bin").is_file() else ""
        raise AdapterNotFoundError(f"adapter {name!r}: {path} has no {WEIGHTS}{more}.", "lora_path")
    reader = _Reader(name, targets, _read_config(name, config_file), _read_header(name, weights_file), str(directory))
    plan = reader.plan(task_id)
    digest = _Digest(reader.config, plan.task)
    with weights_file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.add(block)
    return Adapter(name, path, digest.value, plan, reader.config.get("base_model_name_or_path"))


def read_weights(plan: AdapterPlan, digest: bytes) -> bytearray:
    """Read the adapter's file, if it still has the digest. It is read whole: mapped tensors would change, or end the
    process, when the file is overwritten."""
    directory = Path(plan.directory)
    with (directory / WEIGHTS).open("rb") as opened:
        content = bytearray(os.fstat(opened.fileno()).st_size)
        del content[opened.readinto(content) :]
    found = _Digest(_read_config(directory.name, directory / CONFIG), plan.task)
    found.add(content)
    if found.value != digest:
        message = f"{plan.directory} has changed since it was read; load the adapter again under its name."
        raise AdapterError(message, "lora_path")
    return content


def _read_config(name: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: {file.name} cannot be read ({error}).", "lora_path") from error
    if not isinstance(config, dict) or config.get("peft_type") not in TYPES:
        found = config.get("peft_type") if isinstance(config, dict) else config
        raise AdapterError(
            f"adapter {name!r}: {file.name} has peft_type={found!r}; Kvasir runs {', '.join(TYPES)}.", "lora_path"
        )
    return config


def _read_header(name: str, file: Path) -> dict[str, TensorHeader]:
    """Read the names, types and shapes of a safetensors file."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > min(_HEADER_BYTES, file.stat().st_size):
                raise ValueError("its header is longer than the file")
            header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            found = {each: TensorHeader(info["dtype"], tuple(info["shape"])) for each, info in header.items()}
            ends = max((info["data_offsets"][1] for info in header.values()), default=0)
            if 8 + size + ends != file.stat().st_size:
                raise ValueError("its tensors do not fill the file")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"adapter {name!r}: {file.name} is damaged ({error}).", "lora_path") from error
    return found


class _Digest:
    """sha256 of the file of tensors and of what the config says about them."""

    def __init__(self, config: Mapping[str, Any], task: int) -> None:
        self._found = sha256(json.dumps(config, sort_keys=True).encode() + b"\0%d\0" % task)

    def add(self, content: bytes | bytearray) -> None:
        self._found.update(content)

    @property
    def value(self) -> bytes:
        return self._found.digest()


_LORA = re.compile(
    r"(?P<module>.+)\.lora_(?P<which>A|B|embedding_A|embedding_B|magnitude_vector)(?P<rest>\.weight|\.bias|)"
)
_PREFIX = "base_model.model."
_EXPERTS = re.compile(r"(.+\.)?layers\.(?P<layer>\d+)\.(.+\.)?experts(?P<inner>(\.base_layer)?)")


class _Reader:
    """Checks one adapter's tensors, name by name, against its config and the model."""

    def __init__(
        self,
        name: str,
        targets: AdapterTargets,
        config: dict[str, Any],
        tensors: dict[str, TensorHeader],
        directory: str,
    ) -> None:
        self.name, self.targets, self.config, self.tensors, self.directory = name, targets, config, tensors, directory

    def plan(self, task_id: int | None) -> AdapterPlan:
        for tensor, header in self.tensors.items():
            if header.dtype not in _FLOATS:
                raise self._wrong(tensor, f"is of the type {header.dtype}; floats are needed")
        if self.config["peft_type"] != "LORA":
            return self._prompt(task_id)
        if task_id is not None:
            raise AdapterError(f"adapter {self.name!r} has no tasks: leave task_id out.", "task_id")
        for entry in NOT_SUPPORTED:
            if self.config.get(entry):
                raise AdapterError(f"adapter {self.name!r}: {entry} in {CONFIG} is not supported.", "lora_path")
        start = self.config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(CHANGE_THE_MODEL):
            raise AdapterError(
                f"adapter {self.name!r}: init_lora_weights={start!r} in {CONFIG} changes the model's own weights. "
                "Merge it with PEFT, or save it there with path_initial_model_for_weight_conversion.",
                "lora_path",
            )
        found: dict[str, dict[str, Any]] = {}
        for tensor in self.tensors:
            module, entry = self._place(tensor)
            found.setdefault(module, {})[entry] = tensor
        if not found:
            raise AdapterError(f"adapter {self.name!r}: {WEIGHTS} has no tensors.", "lora_path")
        modules: dict[str, Factors] = {}
        for module, given in found.items():
            container = module.removesuffix(".base_layer")
            if container in self.targets.modules and self.targets.modules[container].kind == "experts":
                stack, factors = self._of_experts(self.targets.modules[container], container, given)
                modules[f"{container}.{stack}"] = factors
            else:
                modules[module] = self._factors(module, given)
        return AdapterPlan(self.directory, modules)

    def _wrong(self, tensor: str, what: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: {tensor} {what}.", "lora_path")

    def _place(self, tensor: str) -> tuple[str, str]:
        """Return the module that a tensor changes, and the tensor's field of Factors."""
        match = _LORA.fullmatch(tensor)
        if match is not None:
            which, rest = match["which"], match["rest"]
            fields = {
                "A": "down",
                "B": "up",
                "embedding_A": "down",
                "embedding_B": "up",
                "magnitude_vector": "magnitude",
            }
            if which == "B" and rest == ".bias":
                return self._module(tensor, match["module"]), "up_bias"
            if rest != ".bias":
                return self._module(tensor, match["module"]), fields[which]
            raise self._wrong(tensor, "has no meaning that Kvasir knows")
        module, _, last = tensor.rpartition(".")
        if last not in ("weight", "bias"):
            raise self._wrong(tensor, "has no meaning that Kvasir knows")
        for middle in (".base_layer", ".modules_to_save"):
            module = module.removesuffix(middle)
        return self._module(tensor, module), last

    def _module(self, tensor: str, path: str) -> str:
        """Return the model's name of a module."""
        name, prefix, modules = path.removeprefix(_PREFIX), self.targets.prefix, self.targets.modules
        for candidate in (name, prefix + name):
            if candidate in modules:
                return candidate
        # PEFT names the experts of a layer as transformers does, whatever the model's checkpoints call them.
        if (match := _EXPERTS.fullmatch(name)) is not None:
            container = f"{prefix}layers.{match['layer']}.mlp.experts"
            if container in modules:
                return container + match["inner"]
        routed = name.replace(".mlp.", ".block_sparse_moe.")  # Mixtral's router
        if routed in modules:
            return routed
        kinds = sorted({each.rpartition(".")[2] for each in modules})
        raise self._wrong(
            tensor, f"matches no module of the model that adapters can change; those are {', '.join(kinds)}"
        )

    def _factors(self, module: str, given: dict[str, Any]) -> Factors:
        target = self.targets.modules[module]
        if target.kind == "expert":
            self._only_low_rank(given)
        if "bias" in given:
            self._check(given["bias"], (target.outputs,))
            if target.kind == "embedding":
                raise self._wrong(given["bias"], "is the bias of an embedding, which has none")
        if "weight" in given:
            shape = (target.outputs, target.inputs)
            self._check(given["weight"], shape[::-1] if target.transposed else shape)
        if "down" not in given and "up" not in given:
            for entry in ("magnitude", "up_bias"):
                if entry in given:
                    raise self._wrong(given[entry], "comes without lora_A and lora_B")
            return Factors(**given)
        for entry, word in (("down", "lora_A"), ("up", "lora_B")):
            if entry not in given:
                raise self._wrong(next(iter(given.values())), f"comes without its {word}")
        return self._low_rank(module, target, given)

    def _low_rank(self, module: str, target: AdapterTarget, given: dict[str, Any]) -> Factors:
        down, shape = given["down"], self.tensors[given["down"]].shape
        rank = shape[0] if len(shape) == 2 else 0
        inputs, outputs = (target.inputs, target.outputs)
        if target.kind == "embedding":
            inputs, outputs = outputs, inputs
        self._check(down, (rank, inputs))
        self._check(given["up"], (outputs, rank))
        scale = self._scale(module, down, rank)
        if "up_bias" in given:
            self._check(given["up_bias"], (outputs,))
        if "magnitude" in given:
            self._check_magnitude(target, given["magnitude"])
        elif self.config.get("use_dora"):
            raise self._wrong(down, "comes without the lora_magnitude_vector that use_dora needs")
        return Factors(scale=scale, rank=rank, **given)

    def _scale(self, module: str, down: str, rank: int) -> float:
        """Check the rank of the factors, and return the number that their product is multiplied by."""
        if not 1 <= rank <= self.targets.max_rank:
            raise self._wrong(down, f"has rank {rank}, but max_lora_rank={self.targets.max_rank} allows no more")
        expected = _pattern(self.config.get("rank_pattern"), module, self.config.get("r"))
        if expected != rank:
            raise self._wrong(down, f"has rank {rank}, but {CONFIG} says {expected}")
        alpha = _pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise AdapterError(f"adapter {self.name!r}: lora_alpha={alpha!r} in {CONFIG} is no number.", "lora_path")
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _only_low_rank(self, given: dict[str, Any]) -> None:
        for entry in given.keys() - {"down", "up"}:
            raise self._wrong(given[entry], "is of an expert, where only lora_A and lora_B are supported")

    def _of_experts(self, target: AdapterTarget, module: str, given: dict[str, Any]) -> tuple[str, Factors]:
        """Read the factors of all experts of a layer (PEFT's target_parameters), and return them with their stack. Only
        the shapes say whether that is gate and up, or down."""
        self._only_low_rank(given)
        for entry, word in (("down", "lora_A"), ("up", "lora_B")):
            if entry not in given:
                raise self._wrong(next(iter(given.values())), f"comes without its {word}")
        down, up = self._shape(given["down"]), self._shape(given["up"])
        count, inner, hidden = target.num_experts, target.outputs, target.inputs
        sizes = {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
        for stack, is_turned in ((stack, is_turned) for is_turned in (False, True) for stack in sizes):
            inputs, outputs = sizes[stack][::-1] if is_turned else sizes[stack]
            if len(down) == 2 and down[0] % count == 0 and (down[1], *up) == (inputs, outputs, down[0]):
                rank = down[0] // count
                scale = self._scale(f"{module}.{stack}_proj", given["down"], rank)
                return stack, Factors(given["down"], given["up"], scale, rank, is_turned)
        raise self._wrong(
            given["down"],
            f"is {list(down)} and its lora_B {list(up)}, which fits neither gate and up nor down of {count} experts "
            f"with inputs of {hidden} and {inner}",
        )

    def _check_magnitude(self, target: AdapterTarget, tensor: str) -> None:
        if target.kind != "linear":
            raise self._wrong(tensor, "is DoRA of an embedding or of the head, which is not supported")
        if self.targets.num_ranks > 1:
            raise self._wrong(tensor, "is DoRA, which needs whole matrices: set tensor_parallel_size=1, or merge it")
        self._check(tensor, (target.outputs,))

    def _check(self, tensor: str, shape: tuple[int, ...]) -> None:
        found = self.tensors[tensor].shape
        if found != shape:
            raise self._wrong(tensor, f"is {list(found)}, but the model needs {list(shape)}")

    # ------------------------------------------------------------ soft prompts

    def _prompt(self, task_id: int | None) -> AdapterPlan:
        kind, targets = self.config["peft_type"], self.targets
        if not targets.takes_prompts:
            raise AdapterError(f"adapter {self.name!r}: this model takes no soft prompts.", "lora_path")
        count, shape = self.config.get("num_virtual_tokens"), self._shape("prompt_embeddings")
        width = targets.num_layers * 2 * targets.kv_size if kind == "PREFIX_TUNING" else targets.hidden_size
        if not isinstance(count, int) or count < 1:
            raise AdapterError(f"adapter {self.name!r}: num_virtual_tokens={count!r} in {CONFIG}.", "lora_path")
        if shape != (count, width):
            raise self._wrong("prompt_embeddings", f"is {list(shape)}, but the model needs {[count, width]}")
        known = {"prompt_embeddings"}
        task = 0
        if kind == "MULTITASK_PROMPT_TUNING":
            tasks, ranks = self.config.get("num_tasks"), self.config.get("num_ranks")
            for tensor, expected in {
                "prefix_task_cols": (tasks, count, ranks),
                "prefix_task_rows": (tasks, ranks, width),
            }.items():
                if self._shape(tensor) != expected:
                    raise self._wrong(tensor, f"is {list(self._shape(tensor))}, but should be {list(expected)}")
                known.add(tensor)
            task = self._task(task_id, int(tasks or 0))
        elif task_id is not None:
            raise AdapterError(f"adapter {self.name!r} has no tasks: leave task_id out.", "task_id")
        for tensor in self.tensors.keys() - known:
            raise self._wrong(tensor, f"has no place in an adapter of the type {kind}")
        return AdapterPlan(self.directory, {}, kind, count, task)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.tensors:
            raise AdapterError(f"adapter {self.name!r}: {WEIGHTS} lacks {tensor}.", "lora_path")
        return self.tensors[tensor].shape

    def _task(self, asked: int | None, tasks: int) -> int:
        if asked is None and tasks == 1:
            return 0
        if asked is None or isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked < tasks:
            raise AdapterError(
                f"adapter {self.name!r} has {tasks} tasks: give task_id from 0 to {tasks - 1}, not {asked!r}.",
                "task_id",
            )
        return asked


def _pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that the module's name ends with, as PEFT finds it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


# ---------------------------------------------------------------- names


class AdapterCatalog:
    """The adapters that requests of one API process may name. Reading is slow (it hashes files), so a file that has not
    changed is read once."""

    def __init__(self, config: EngineConfig, targets: AdapterTargets | None) -> None:
        self._config, self._targets = config, targets
        self.used_ids: set[int] = set()  # of LoRARequests
        self._by_name: dict[str, Adapter] = {}
        self._read: OrderedDict[tuple[Any, ...], Adapter] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def add(self, adapter: Adapter) -> None:
        """Serve an adapter under its name from now on. Running requests keep the adapter that they have."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> bool:
        return self._by_name.pop(name, None) is not None

    def find(self, asked: object) -> Adapter:
        """Return the adapter of a LoRARequest, as its files are now."""
        if not isinstance(asked, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(asked).__name__}.", "lora_request")
        self.used_ids.add(asked.lora_int_id)
        return replace(self.read(asked.lora_name, asked.lora_path, asked.task_id), request=asked)

    def read(self, name: str, path: str, task_id: int | None = None) -> Adapter:
        """Read and check a PEFT directory, or an adapter of the Hub, which is downloaded first."""
        if self._targets is None:
            raise RequestError("this engine takes no adapters: start it with enable_lora=True.", "lora_request")
        try:
            directory = find_adapter(path, self._config.model, self._config.load)
        except ModelError as error:
            raise AdapterNotFoundError(f"adapter {name!r}: {error}", "lora_path") from error
        key = (name, path, task_id, *(_stamp(directory / file) for file in (CONFIG, WEIGHTS)))
        if key not in self._read:
            self._read[key] = read_adapter(name, directory, path, self._targets, task_id)
            while len(self._read) > _MOST_READ:
                self._read.popitem(last=False)
        return self._read[key]


_MOST_READ = 4096  # adapters of which the checks and digests are kept


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return a value that changes when a file's content does."""
    try:
        found = file.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino
