"""The engine's settings: a few frozen dataclasses, every field written once.

A field made by `setting()` becomes an EngineArgs field, an `LLM(...)` keyword, a flag, a key of the `--config` file and
a line of docs/configuration.md. One made by `settled()` is filled in by resolve.py. A setting with `auto` holds None
until resolve.py has settled it; annotations state the settled type. Any process; knows no files, devices or models.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from kvasir.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting beside its name, type and default."""

    help: str
    choices: tuple[Any, ...] = ()
    refused: str | None = None  # why nothing but the default is taken
    minimum: float | None = None
    above: float | None = None  # an open lower bound
    maximum: float | None = None
    short: tuple[str, ...] = ()  # short flags
    auto: str | None = None  # what None (or "auto") is settled to


def setting(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    """A field that a user may set. `default` may be a class or a function, such as dict, which is then called."""
    known = {"setting": Setting(help, **metadata)}
    if callable(default):
        return field(default_factory=default, metadata=known, repr=not secret)
    return field(default=default, metadata=known, repr=not secret)


def settled(default: Callable[[], Any]) -> Any:
    """A field that resolve.py fills in; not a setting."""
    return field(default_factory=default)


class _Checked:
    """Checks every setting's type, choices and range when an instance is made."""

    def __post_init__(self) -> None:
        for f in fields(cast(Any, self)):
            if f.name in all_settings():
                all_settings()[f.name].check(f.name, getattr(self, f.name))


# ---------------------------------------------------------------- the settings


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """Which model, and what of its own configuration to change."""

    model: str = setting(None, "The model: a directory, a GGUF file, or a name on the Hugging Face hub.")
    tokenizer: str = setting(None, "The tokenizer: a directory, a GGUF file or a hub name.", auto="the model's own")
    skip_tokenizer_init: bool = setting(False, "Load no tokenizer: prompts are token ids, outputs have no text.")
    revision: str | None = setting(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_revision: str | None = setting(None, "Branch, tag or commit of the tokenizer on the hub.")
    hf_token: bool | str | None = setting(
        None, "Token for the hub. True: the stored one. Unset: HF_TOKEN or the stored one.", secret=True
    )
    trust_remote_code: bool = setting(
        False, "Run Python code shipped with a model.", refused="Kvasir runs no such code."
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations. auto: the checkpoint's own; a float32 one becomes bfloat16 on a GPU.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    seed: int = setting(0, "Seed of requests that bring none, and of dummy weights.", minimum=0)
    max_model_len: int = setting(
        None, "Longest sequence, prompt and output together.", minimum=1, auto="the most the model was made for"
    )
    max_logprobs: int = setting(
        20, "Most log-probabilities a request may ask for per token; -1: the whole vocabulary.", minimum=-1
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "What stands in logprobs: of the model's own distribution (raw) or of the one drawn from, after penalties, "
        "temperature and filters (processed); log-probabilities or logits.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    hf_overrides: dict[str, Any] = setting(
        dict, "Replaces entries of the model's config.json (nested ones are merged)."
    )
    generation_config: str = setting(
        "auto",
        "Where default sampling parameters come from. auto: the model's generation_config.json; kvasir (or vllm): "
        "none; else a directory that holds such a file.",
    )
    override_generation_config: dict[str, Any] = setting(dict, "Replaces entries of the generation config.")
    chat_template: str | None = setting(None, "Chat template: a file, or the Jinja text itself.")
    model_impl: str = setting(
        "auto",
        "Whose code runs the model. auto: Kvasir's where it has the architecture, else transformers' with Kvasir's "
        "attention, scheduling and sampling.",
        choices=("auto", "kvasir", "transformers"),
    )
    runner: str = setting("auto", "What the model is run for.", choices=("auto", "generate"))
    convert: str = setting("auto", "Adapter that turns the model into another kind.", choices=("auto", "none"))
    quantization: str | None = setting(
        None,
        "How weights are kept on the CPU: int8 or int4, quantized while they are loaded; gguf: as a GGUF file has "
        "them, which is what unset means for such a file; none: expanded to dtype.",
        choices=("int8", "int4", "gguf", "none"),
    )
    enable_lora: bool = setting(False, "Serve LoRA adapters.", refused="LoRA adapters are not served yet.")
    speculative_config: dict[str, Any] | None = setting(
        None, "Speculative decoding.", refused="Speculative decoding is not there yet."
    )
    logits_processors: list[Any] | None = setting(
        None, "Python callables that change every request's logits, as 'module:name'. See docs/sampling.md."
    )

    path: str = settled(str)  # the model's local directory
    hf: dict[str, Any] = settled(dict)  # config.json after hf_overrides, the text model's part
    vocab_size: int = settled(int)
    generation: dict[str, Any] = settled(dict)  # the generation config's entries; at least the end-of-text ids

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("No model was given. Pass a directory, a GGUF file or a hub name as `model`.")


@dataclass(frozen=True)
class LoadConfig(_Checked):
    """How weights get into memory."""

    load_format: str = setting(
        "auto",
        "auto: what the checkpoint is, safetensors or gguf; dummy: random weights, for measuring.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    download_dir: str | None = setting(
        None, "Where models from the hub are kept. Unset: the hub's own cache (HF_HOME)."
    )
    packed_weights_dir: str | None = setting(
        None, "Where the CPU library's packed weights are kept, so that a checkpoint is quantized once. Unset: nowhere."
    )
    use_tqdm_on_load: bool = setting(True, "Show a progress bar while weights load.")


# torch's names for types of 8 bits that the KV cache may have.
EIGHT_BIT_KV = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class CacheConfig(_Checked):
    """The KV cache: block size, memory, reuse."""

    block_size: int = setting(
        None,
        "Tokens per block of the KV cache.",
        choices=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        auto="64 on CUDA (256 where FlashAttention 2 runs), 16 elsewhere",
    )
    gpu_memory_utilization: float = setting(
        0.92, "Share of the device's memory the engine may take: weights, activations and KV cache.", above=0, maximum=1
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "Size of the KV cache in bytes; takes the place of gpu_memory_utilization.", minimum=1
    )
    num_gpu_blocks_override: int | None = setting(
        None, "Number of KV cache blocks, instead of a measured one.", minimum=1
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of keys and values in the cache. auto: the model's. fp8 (which is fp8_e4m3) and fp8_e5m2 take half the "
        "memory of 16 bits and round more; so does int8, which is the CPU library's.",
        choices=("auto", "bfloat16", "float16", "int8", *EIGHT_BIT_KV),
    )
    enable_prefix_caching: bool = setting(True, "Reuse cached blocks of a prompt's beginning across requests.")
    swap_space: float = setting(
        0.0,
        "GiB of host memory for each device in which blocks of preempted requests wait for their return.",
        minimum=0,
    )
    kv_offloading_size: float = setting(
        0.0, "GiB of host memory, over all devices, in which evicted blocks of cached prefixes live on.", minimum=0
    )
    preemption_mode: str = setting(
        "auto",
        "What becomes of a preempted request's blocks. swap: they wait in swap_space; recompute: they are computed "
        "again; auto: whichever is quicker, as measured at the start, each time.",
        choices=("auto", "swap", "recompute"),
    )
    cpu_offload_gb: float = setting(0.0, "GiB of weights kept in CPU memory.", refused="Weights are not offloaded yet.")

    kv_dtype: str = settled(str)  # kv_cache_dtype as torch names it

    @property
    def is_eight_bit(self) -> bool:
        return self.kv_dtype in EIGHT_BIT_KV.values()

    @property
    def has_host_tier(self) -> bool:
        return self.swap_space > 0 or self.kv_offloading_size > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("preemption_mode='swap' needs room to swap to: set swap_space to some GiB.")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size keeps evicted prefixes, and enable_prefix_caching is off, so there are none. "
                "Turn it on, or set swap_space for the blocks of preempted requests."
            )


POLICY_NAMES = ("fcfs", "priority", "wrr", "deadline")


@dataclass(frozen=True)
class SchedulerConfig(_Checked):
    """Who runs in a step."""

    max_num_seqs: int = setting(
        None, "Most requests running at once.", minimum=1, auto="256; 1024 on a GPU of 70 GiB and more"
    )
    max_num_batched_tokens: int = setting(
        None,
        "Most tokens computed in one step.",
        minimum=1,
        auto="8192; 16896 on a GPU of 70 GiB and more, 2048 on a CPU; never under max_num_seqs",
    )
    enable_chunked_prefill: bool = setting(True, "Split long prompts over several steps.")
    long_prefill_token_threshold: int = setting(
        0, "Most prompt tokens one request may compute in a step while prefilling; 0: no such limit.", minimum=0
    )
    scheduling_policy: str = setting(
        "fcfs",
        "Order of the queue: fcfs, priority, wrr (weighted, by tokens of each tenant), deadline (earliest first), or a "
        "class of your own as 'module:Class'. See docs/scheduling.md.",
    )
    priority_aging_seconds: float = setting(
        0.0, "Under priority: seconds of waiting that raise a request by one; 0: waiting raises nobody.", minimum=0
    )
    priority_aging_best: int = setting(
        0, "Under priority: the value to which waiting raises a request at best; lower ones always go before it."
    )
    default_deadline: float = setting(
        60.0, "Under deadline: seconds after which requests that bring none are ordered as if due.", above=0
    )
    deadline_least_chance: float = setting(
        0.5,
        "Under deadline: a request that has to wait is ended early if, of those served lately, fewer than this share "
        "took no longer than it has left; 0: only if it cannot be done in time.",
        minimum=0,
        maximum=1,
    )
    max_queued_requests: int = setting(
        0, "Most requests that may wait while all rows are taken; more are refused. 0: no limit.", minimum=0
    )
    max_queued_tokens: int = setting(
        0, "Most prompt tokens that may wait; requests beyond them are refused. 0: no limit.", minimum=0
    )
    watermark: float = setting(
        0.01,
        "Share of the KV cache that must stay free when a request joins others, so that it is not preempted soon.",
        minimum=0,
        maximum=0.5,
    )
    async_scheduling: bool = setting(
        None,
        "Schedule the next step while the device runs this one.",
        auto="on, except on the CPU, which cannot do both",
    )

    stream_interval: int = setting(1, "Tokens between two outputs of a streaming request.", minimum=1)
    stall_timeout: float = setting(
        120.0,
        "Seconds a step may take, or a request wait for the next one, before an engine in its own process counts as "
        "stuck (check_health).",
        above=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduling_policy not in POLICY_NAMES and ":" not in self.scheduling_policy:
            raise ConfigError(
                f"scheduling_policy={self.scheduling_policy!r} is not possible. Possible: {', '.join(POLICY_NAMES)}, "
                f"or a class of your own as 'module:Class'."
            )
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}: every running request needs a "
                f"token per step. Raise the first or lower the second."
            )


@dataclass(frozen=True)
class ParallelConfig(_Checked):
    """How the model is spread over devices."""

    tensor_parallel_size: int = setting(
        1, "Devices each layer is split over; on the CPU, processes.", minimum=1, short=("-tp",)
    )
    pipeline_parallel_size: int = setting(
        1,
        "Devices the layers are dealt to.",
        minimum=1,
        short=("-pp",),
        refused="Every device has a part of each layer so far (tensor_parallel_size).",
    )
    data_parallel_size: int = setting(
        1,
        "Copies of the model, an engine process and its devices for each; requests go where their prefix is cached or "
        "where there is less to do.",
        minimum=1,
        short=("-dp",),
    )
    enable_expert_parallel: bool = setting(
        False, "Spread experts over devices.", refused="Experts are split like other layers so far."
    )
    distributed_executor_backend: str = setting(
        None,
        "What drives the workers. uni: the engine's own process; mp: a process for each.",
        choices=("uni", "mp"),
        auto="uni for one device, mp for several",
    )


@dataclass(frozen=True)
class DeviceConfig(_Checked):
    """What the model runs on."""

    device: str = setting("auto", "cpu, cuda, xpu or mps, or one of several (cuda:1). auto: the best there is.")
    attention_backend: str = setting(
        "auto",
        "Attention implementation, and with it who runs the layers. torch: plain torch, on any device; triton: our "
        "kernels, on a GPU; cpu: our C++ library; flash_attn and flashinfer: those packages, where they are installed, "
        "on NVIDIA GPUs. vLLM's names (FLASH_ATTN, TRITON_ATTN) mean the same.",
        choices=("auto", "torch", "triton", "cpu", "flash_attn", "flashinfer"),
    )
    cpu_threads: int | None = setting(
        None,
        "Threads that compute on the CPU, for each worker. Unset: the CPUs this process may use by affinity, container "
        "quota and OMP_NUM_THREADS, shared by the workers.",
        minimum=1,
    )
    cpu_bind: str | None = setting(
        None,
        "CPUs that the threads are bound to, such as 0-3,8, shared by the workers. Unset: those the process may use.",
    )
    enforce_eager: bool = setting(False, "Launch every kernel by itself instead of replaying CUDA graphs.")


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is built from: plain data, fit to be sent to another process."""

    model: ModelConfig
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


# ---------------------------------------------------------------- reading the settings back


@dataclass(frozen=True, slots=True)
class Known:
    """A setting with its type and default, as found on its class."""

    section: str  # the EngineConfig field it lives in
    field: Field[Any]
    setting: Setting
    types: tuple[type, ...]

    @property
    def default(self) -> Any:
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    def check(self, name: str, value: Any) -> None:
        """Raise a ConfigError unless `value` may stand here."""
        rule = self.setting
        if value is None and (self.default is None or type(None) in self.types):
            return
        if not (type(value) in self.types or (type(value) is int and float in self.types)):
            raise ConfigError(f"{name}={value!r} is {_a(type(value).__name__)}; {name} takes {self.describe_type()}.")
        if rule.refused and value != self.default:
            raise ConfigError(f"{name}={value!r} is not available: {rule.refused} Leave it at {self.default!r}.")
        if rule.choices and value not in rule.choices:
            raise ConfigError(f"{name}={value!r} is not possible. Possible: {', '.join(map(str, rule.choices))}.")
        if rule.minimum is not None and not value >= rule.minimum:
            raise ConfigError(f"{name}={value!r} is too small: at least {rule.minimum} is needed.")
        if rule.above is not None and not value > rule.above:
            raise ConfigError(f"{name}={value!r} is too small: it must be more than {rule.above}.")
        if rule.maximum is not None and not value <= rule.maximum:
            raise ConfigError(f"{name}={value!r} is too large: at most {rule.maximum} is possible.")

    def describe_type(self) -> str:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a mapping"}
        described = [words.get(t, _a(t.__name__)) for t in self.types if t is not type(None)]
        return " or ".join([*described, *(["'auto'"] if self.setting.auto else [])])


@cache
def all_settings() -> dict[str, Known]:
    """Every setting of every config class, by name, in order."""
    sections = get_type_hints(EngineConfig).items()
    return {name: known for section, cls in sections for name, known in settings_of(section, cls).items()}


def settings_of(section: str, cls: type[Any]) -> dict[str, Known]:
    """The settings of one config class."""
    hints = get_type_hints(cls)
    return {
        f.name: Known(section, f, f.metadata["setting"], tuple(_plain_types(hints[f.name])))
        for f in fields(cls)
        if "setting" in f.metadata
    }


def did_you_mean(name: object, possible: Iterable[object]) -> str:
    """A sentence with the names nearest to `name`, or nothing."""
    near = difflib.get_close_matches(str(name), [str(p) for p in possible], n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _plain_types(hint: Any) -> Iterator[type]:
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _plain_types(part)
    else:
        yield get_origin(hint) or hint


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
