"""The engine's settings as frozen dataclasses. Any process; knows no files, devices or models.

A field made by `setting()` becomes an EngineArgs field, an `LLM(...)` keyword, a flag, a key of the `--config` file and
a line of docs/configuration.md. resolve.py fills in fields made by `resolved()`, and settings with automatic defaults,
which are None until then; annotations give the type after that.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from kvasir.config.pooling import PoolerSpec
from kvasir.config.speculative import read_speculative
from kvasir.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Setting:
    """Metadata of a setting beside its name, type and default."""

    help: str
    choices: tuple[Any, ...] = ()
    refused: str | None = None  # why only the default is accepted
    minimum: float | None = None
    above: float | None = None  # an open lower bound
    maximum: float | None = None
    short: tuple[str, ...] = ()  # short flags
    auto: str | None = None  # describes the value that None or "auto" is resolved to


def setting(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    """A field that a user may set. If `default` is callable, such as dict, it is called to make the default."""
    known = {"setting": Setting(help, **metadata)}
    if callable(default):
        return field(default_factory=default, metadata=known, repr=not secret)
    return field(default=default, metadata=known, repr=not secret)


def resolved(default: Callable[[], Any]) -> Any:
    """A field that resolve.py fills in and users cannot set."""
    return field(default_factory=default)


class _Checked:
    """Checks the type, choices and range of every setting when an instance is made."""

    def __post_init__(self) -> None:
        for f in fields(cast(Any, self)):
            if f.name in all_settings():
                all_settings()[f.name].check(f.name, getattr(self, f.name))


_STRUCTURED_CHOICES = {"backend": ("auto", "guidance", "llguidance"), "whitespace": ("spaced", "compact", "flexible")}
_VLLM_STRUCTURED = ("xgrammar", "outlines", "lm-format-enforcer")
_STRUCTURED_FLAGS = ("disable_any_whitespace", "disable_additional_properties", "lenient", "jump_forward")


def _check_structured_outputs(given: dict[str, Any]) -> None:
    known = [*_STRUCTURED_CHOICES, *_STRUCTURED_FLAGS]
    for name, value in given.items():
        where = f"structured_outputs_config: {name}={value!r}"
        if name not in known:
            raise ConfigError(f"{where} is not known; known are {', '.join(known)}.{did_you_mean(name, known)}")
        if name in _STRUCTURED_FLAGS and not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false.")
        if name == "backend" and value in _VLLM_STRUCTURED:
            raise ConfigError(
                f"{where} is a backend of vLLM. Leave backend out: Kvasir enforces JSON schemas, regular expressions, "
                f"choices and grammars with its own, guidance."
            )
        if name in _STRUCTURED_CHOICES and value not in _STRUCTURED_CHOICES[name]:
            raise ConfigError(f"{where} is not possible. Possible: {', '.join(_STRUCTURED_CHOICES[name])}.")
    if given.get("disable_any_whitespace") and given.get("whitespace", "compact") != "compact":
        raise ConfigError("structured_outputs_config: disable_any_whitespace means whitespace=compact; set one.")


# ---------------------------------------------------------------- the settings


AT_LOAD = ("fp8", "fp8_block", "int8", "int4")  # ways of quantizing a plain checkpoint while it is loaded
CHECKPOINT_FORMATS = ("gptq", "awq", "compressed-tensors", "mxfp4", "modelopt", "auto-round", "bitsandbytes")


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """The model, its tokenizer, and changes to the model's own configuration."""

    model: str = setting(None, "Model to run: a directory, a GGUF file, or a name on the Hugging Face Hub.")
    tokenizer: str = setting(None, "Tokenizer to use: a directory, a GGUF file or a Hub name.", auto="the model's own")
    skip_tokenizer_init: bool = setting(
        False, "Load no tokenizer. Prompts must be token ids, and outputs have no text."
    )
    revision: str | None = setting(None, "Branch, tag or commit of the model on the Hub.")
    tokenizer_revision: str | None = setting(None, "Branch, tag or commit of the tokenizer on the Hub.")
    hf_token: bool | str | None = setting(
        None,
        "Access token for the Hub. True uses the stored one; if unset, HF_TOKEN or the stored one is used.",
        secret=True,
    )
    trust_remote_code: bool = setting(
        False,
        "Accepted because scripts set it for models that need no such code. Kvasir runs no Python code that comes with "
        "a model; it warns of this, and refuses a model that has nothing else.",
    )
    dtype: str = setting(
        "auto",
        "Data type of weights and activations. auto uses the checkpoint's, but bfloat16 for float32 checkpoints on a "
        "GPU.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    seed: int = setting(
        0,
        "Random seed for requests without a seed of their own, and for dummy weights. None in Python draws one.",
        minimum=0,
    )
    max_model_len: int = setting(
        None,
        "Maximum number of tokens in a sequence, prompt and output together.",
        minimum=1,
        auto="the context length in the model's config.json",
    )
    max_logprobs: int = setting(
        20,
        "Maximum number of log-probabilities per token that a request may ask for; -1 allows the whole vocabulary.",
        minimum=-1,
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "Values returned in logprobs. raw_* are computed before penalties, temperature and filters, processed_* after "
        "them; *_logits returns logits instead of log-probabilities.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    hf_overrides: dict[str, Any] = setting(
        dict, "Entries that replace those of the model's config.json; nested mappings are merged."
    )
    generation_config: str = setting(
        "auto",
        "Source of default sampling parameters. auto reads the model's generation_config.json, kvasir (or vllm) reads "
        "none, and a path names a directory that holds such a file.",
    )
    override_generation_config: dict[str, Any] = setting(dict, "Entries that replace those of the generation config.")
    chat_template: str | None = setting(
        None, "Chat template: a file or the Jinja text. If unset, the tokenizer's template is used."
    )
    model_impl: str = setting(
        "auto",
        "Implementation of the model. auto uses Kvasir's where it has the architecture, and otherwise that of "
        "transformers, with Kvasir's attention, scheduling and sampling.",
        choices=("auto", "kvasir", "transformers"),
    )
    runner: str = setting(
        "auto",
        "What the model does: generate text, or pool, which is to embed, classify and score. auto chooses by the "
        "model's files. See docs/embeddings.md.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto",
        "With runner=pooling: use a model that generates text to embed or classify. auto converts a model that needs "
        "it, to embed; none converts nothing.",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: dict[str, Any] | None = setting(
        None,
        "Entries that replace what the model's files say of its pooler: pooling_type (cls, last, mean, max, all or "
        "step), normalize, use_activation, step_tag_id, returned_token_ids.",
    )
    quantization: str | None = setting(
        None,
        "Format of weights in memory. fp8, fp8_block, int8 and int4 quantize a plain checkpoint while it is loaded; "
        "gguf keeps the format of a GGUF file, which is the default for such a file; none expands it to dtype. The "
        "format of a quantized checkpoint is found by itself and may be named.",
        choices=(*AT_LOAD, "gguf", "none", *CHECKPOINT_FORMATS),
    )
    head_quantization: str | None = setting(
        None,
        "Quantizes the head, and the embedding where the head shares it, while they are loaded, if the checkpoint has "
        "not. none leaves them as they are.",
        choices=("none", "int8", "int4"),
        auto="on a CPU that of quantization=int8 or int4, otherwise none",
    )
    speculative_config: dict[str, Any] | None = setting(
        None,
        "Speculative decoding: how tokens are drafted, which a step then verifies all at once. The text stays the "
        "same. See docs/speculative_decoding.md.",
    )
    structured_outputs_config: dict[str, Any] = setting(
        dict,
        "Defaults of structured outputs, as JSON: whitespace (spaced, compact or flexible), disable_any_whitespace, "
        "disable_additional_properties, lenient (skip keywords of JSON schemas that cannot be enforced, instead of "
        "refusing the schema), jump_forward (append tokens that must follow without a pass for each; on by default), "
        "backend (auto, guidance or llguidance).",
    )
    enable_prompt_embeds: bool = setting(
        False,
        "Accept prompt_embeds, tensors in place of a prompt's tokens. No log shows what they mean, so allow them only "
        "to people you trust.",
    )
    logits_processors: list[Any] | None = setting(
        None, "Logits processors to load, each a Python callable as 'module:name'. See docs/sampling.md."
    )

    path: str = resolved(str)  # the model's local directory
    hf: dict[str, Any] = resolved(dict)  # config.json after hf_overrides; only the text model's part
    vocab_size: int = resolved(int)
    generation: dict[str, Any] = resolved(dict)  # entries of the generation config
    draft: ModelConfig | None = resolved(lambda: None)  # the model that drafts, if speculative_config names one
    poolers: tuple[PoolerSpec, ...] = resolved(tuple)  # empty: the model generates text
    is_encoder: bool = resolved(bool)  # tokens see later ones, so a prompt is computed in one step
    num_token_types: int = resolved(int)
    prompts: dict[str, str] = resolved(dict)  # prefixes for texts to embed, by name
    default_prompt: str | None = resolved(lambda: None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("No model was given. Pass a directory, a GGUF file or a Hub name as `model`.")
        if self.structured_outputs_config:
            _check_structured_outputs(self.structured_outputs_config)
        read_speculative(self.speculative_config)


@dataclass(frozen=True)
class LoadConfig(_Checked):
    """How weights are loaded."""

    load_format: str = setting(
        "auto",
        "Format of the checkpoint. auto detects it; dummy uses random weights, for benchmarks.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    download_dir: str | None = setting(
        None, "Directory for models downloaded from the Hub. If unset, the Hub's cache (HF_HOME) is used."
    )
    packed_weights_dir: str | None = setting(
        None,
        "Directory in which the CPU library keeps packed weights, so that a checkpoint is quantized only once. If "
        "unset, it is quantized at every start.",
    )
    use_tqdm_on_load: bool = setting(True, "Show a progress bar while weights are loaded.")


# 8-bit floating-point types of the KV cache -> torch's names for them.
EIGHT_BIT_KV = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class AdapterConfig(_Checked):
    """LoRA adapters and soft prompts, which requests choose by name."""

    enable_lora: bool = setting(False, "Serve LoRA adapters and soft prompts (docs/adapters.md).")
    max_loras: int = setting(
        8, "Number of adapters on the device at once; requests for others wait for a place.", minimum=1, maximum=1024
    )
    max_lora_rank: int = setting(
        16, "Largest rank of an adapter. The device keeps max_loras adapters of this rank.", minimum=1, maximum=512
    )
    max_cpu_loras: int = setting(
        None,
        "Number of adapters kept in host memory, from where they reach the device without reading files.",
        minimum=1,
        auto="four times max_loras",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}; every adapter on the "
                f"device is in host memory too, so raise it."
            )


@dataclass(frozen=True)
class CacheConfig(_Checked):
    """The KV cache: block size, memory and prefix caching."""

    block_size: int = setting(
        None,
        "Number of tokens in a block of the KV cache.",
        choices=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        auto="64 on CUDA (256 where FlashAttention 2 runs), 16 elsewhere",
    )
    gpu_memory_utilization: float = setting(
        0.92,
        "Fraction of device memory that the engine may use for weights, activations and KV cache.",
        above=0,
        maximum=1,
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "Size of the KV cache in bytes for each device; overrides gpu_memory_utilization.", minimum=1
    )
    num_gpu_blocks_override: int | None = setting(
        None, "Number of KV cache blocks; overrides the number that fits into memory.", minimum=1
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Data type of the KV cache. auto uses dtype. fp8 (the same as fp8_e4m3) and fp8_e5m2 need half the memory of a "
        "16-bit type but are less exact; so is int8, which only the CPU library supports.",
        choices=("auto", "bfloat16", "float16", "int8", *EIGHT_BIT_KV),
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV cache of prompt prefixes across requests.")
    swap_space: float = setting(
        0.0,
        "Host memory in GiB for each device, to which KV cache blocks of preempted requests are swapped.",
        minimum=0,
    )
    kv_offloading_size: float = setting(
        0.0,
        "Host memory in GiB, for all devices together, that keeps prefix cache blocks evicted from the device.",
        minimum=0,
    )
    preemption_mode: str = setting(
        "auto",
        "What happens to the blocks of a preempted request. swap moves them to swap_space, recompute computes them "
        "again later, and auto chooses the faster way for each request, by costs measured at the start.",
        choices=("auto", "swap", "recompute"),
    )
    cpu_offload_gb: float = setting(
        0.0, "Weights to keep in CPU memory, in GiB.", refused="Offloading weights is not supported yet."
    )

    kv_dtype: str = resolved(str)  # torch's name of kv_cache_dtype

    @property
    def is_eight_bit(self) -> bool:
        return self.kv_dtype in EIGHT_BIT_KV.values()

    @property
    def has_host_tier(self) -> bool:
        return self.swap_space > 0 or self.kv_offloading_size > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("preemption_mode='swap' needs host memory to swap to. Set swap_space to its size in GiB.")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size keeps evicted prefixes, but enable_prefix_caching is off. Turn it on, or set "
                "swap_space instead, which keeps the blocks of preempted requests."
            )


POLICY_NAMES = ("fair", "fcfs", "priority", "wrr", "deadline")


@dataclass(frozen=True)
class SchedulerConfig(_Checked):
    """Batching, queueing and the order of requests."""

    max_num_seqs: int = setting(
        None, "Maximum number of requests that run at once.", minimum=1, auto="256; 1024 on a GPU with 70 GiB or more"
    )
    max_num_batched_tokens: int = setting(
        None,
        "Maximum number of tokens in one step.",
        minimum=1,
        auto="8192; 16896 on a GPU with 70 GiB or more, 2048 on a CPU; at least max_num_seqs",
    )
    enable_chunked_prefill: bool = setting(True, "Split the prefill of long prompts into chunks over several steps.")
    long_prefill_token_threshold: int = setting(
        0, "Maximum number of prompt tokens that one request may prefill in a step; 0 means no limit.", minimum=0
    )
    target_step_ms: float | None = setting(
        None,
        "Milliseconds that a step with prompt tokens should take while other requests generate: prompts are computed "
        "in chunks of that size, or larger ones if many wait. Lower values give evener gaps between tokens, higher "
        "ones an earlier first token of long prompts; 0 means steps of up to max_num_batched_tokens.",
        minimum=0,
        auto="on a GPU twice the time of a step of single tokens, measured at the start; 0 for LLM and on a CPU",
    )
    scheduling_policy: str = setting(
        "fair",
        "Order in which requests are scheduled: fair (an equal share of rows and KV blocks for each API key or tenant, "
        "and first come, first served within it), fcfs (first come, first served), priority, wrr (weighted round robin "
        "over tenants, by tokens), deadline (earliest first), or your own class as 'module:Class'. See "
        "docs/scheduling.md.",
    )
    priority_aging_seconds: float = setting(
        0.0,
        "With the priority policy: seconds of waiting that improve a request's priority by one; 0 turns aging off.",
        minimum=0,
    )
    priority_aging_best: int = setting(
        0, "With the priority policy: the best (lowest) priority that a request can reach by waiting."
    )
    default_deadline: float = setting(
        60.0,
        "With the deadline policy: deadline in seconds that orders requests without a timeout. It does not end them.",
        above=0,
    )
    deadline_least_chance: float = setting(
        0.5,
        "With the deadline policy: a waiting request is ended early if its chance to meet its deadline is below this "
        "fraction. The chance is the fraction of recent requests that took no longer than it has left. 0 ends only "
        "requests that cannot meet it.",
        minimum=0,
        maximum=1,
    )
    max_queued_requests: int = setting(
        None,
        "Maximum number of waiting requests while max_num_seqs requests run; further ones are refused. 0 means no "
        "limit.",
        minimum=0,
        auto="8192 in a server, no limit in Python",
    )
    max_queued_tokens: int = setting(
        None,
        "Maximum number of prompt tokens of waiting requests; further requests are refused. 0 means no limit.",
        minimum=0,
        auto="33554432 in a server, no limit in Python",
    )
    watermark: float = setting(
        0.01,
        "Fraction of KV cache blocks that must stay free when a request is added to the batch, so that it is not "
        "preempted soon.",
        minimum=0,
        maximum=0.5,
    )
    async_scheduling: bool = setting(
        None,
        "Schedule the next step while the device runs the current one.",
        auto="on, except on a CPU",
    )

    stream_interval: int = setting(1, "Number of tokens between two outputs of a streaming request.", minimum=1)
    stall_timeout: float = setting(
        60.0,
        "Seconds that a step, a request's wait for its first step, or the answer to a ping may take before health "
        "checks report the engine process as stuck.",
        above=0,
    )

    def with_queue_limits(self, max_requests: int, max_tokens: int) -> SchedulerConfig:
        """Return these settings, with default limits of the queue where none was chosen."""
        requests = max_requests if self.max_queued_requests is None else self.max_queued_requests
        tokens = max_tokens if self.max_queued_tokens is None else self.max_queued_tokens
        return replace(self, max_queued_requests=requests, max_queued_tokens=tokens)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduling_policy not in POLICY_NAMES and ":" not in self.scheduling_policy:
            raise ConfigError(
                f"scheduling_policy={self.scheduling_policy!r} is not possible. Possible: {', '.join(POLICY_NAMES)}, "
                f"or your own class as 'module:Class'."
            )
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}, but every running request "
                f"needs a token per step. Raise the first or lower the second."
            )


@dataclass(frozen=True)
class ParallelConfig(_Checked):
    """How the model is distributed over devices."""

    tensor_parallel_size: int = setting(
        1, "Number of devices (on a CPU, processes) that each layer is split over.", minimum=1, short=("-tp",)
    )
    pipeline_parallel_size: int = setting(
        1,
        "Number of stages that the layers are divided into.",
        minimum=1,
        short=("-pp",),
        refused="Pipeline parallelism is not supported yet; tensor_parallel_size is.",
    )
    data_parallel_size: int = setting(
        1,
        "Number of copies of the model, each in an engine process with its own devices. A request goes to the engine "
        "that has its prefix cached or the least load.",
        minimum=1,
        short=("-dp",),
    )
    enable_expert_parallel: bool = setting(
        False,
        "Give each of the tensor_parallel_size devices some experts whole instead of a part of every expert.",
    )
    expert_load_metrics: bool = setting(
        None,
        "Count which experts tokens are sent to (kvasir:expert_tokens_total). Padding of CUDA graphs counts, too.",
        auto="on; off on a GPU, where each layer with experts takes a few more launches",
    )
    distributed_executor_backend: str = setting(
        None,
        "Where workers run: uni in the engine's process, mp in a process for each.",
        choices=("uni", "mp"),
        auto="uni for one device, mp for several",
    )


@dataclass(frozen=True)
class DeviceConfig(_Checked):
    """The device and its kernels."""

    device: str = setting("auto", "Device: cpu, cuda, xpu, mps, or one of several such as cuda:1. auto prefers a GPU.")
    attention_backend: str = setting(
        "auto",
        "Attention kernels. torch works on any device, triton needs a GPU, cpu is Kvasir's C++ library, which also "
        "runs the other layers, and flash_attn and flashinfer use these packages, if installed, on NVIDIA GPUs. vLLM's "
        "names (FLASH_ATTN, TRITON_ATTN) are accepted.",
        choices=("auto", "torch", "triton", "cpu", "flash_attn", "flashinfer"),
    )
    cpu_threads: int | None = setting(
        None,
        "Number of CPU threads for each worker. If unset, the workers share the CPUs that affinity, container quota "
        "and OMP_NUM_THREADS allow.",
        minimum=1,
    )
    cpu_bind: str | None = setting(
        None,
        "CPUs to bind threads to, such as 0-3,8, divided among the workers. If unset, all usable CPUs.",
    )
    enforce_eager: bool = setting(False, "Launch kernels one by one instead of replaying CUDA graphs.")
    batch_invariant: bool = setting(
        False,
        "Start only if a request's logits are the same bits whatever else runs, however its prompt is divided, and "
        "after preemption. Kvasir's C++ library for CPUs computes so; elsewhere the start fails.",
    )


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine: plain data that can be sent to another process."""

    model: ModelConfig
    load: LoadConfig = field(default_factory=LoadConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


# ---------------------------------------------------------------- introspection


@dataclass(frozen=True, slots=True)
class SettingField:
    """A setting with its section, type and default."""

    section: str  # its field of EngineConfig
    field: Field[Any]
    setting: Setting
    types: tuple[type, ...]

    @property
    def default(self) -> Any:
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    def check(self, name: str, value: Any) -> None:
        """Raise a ConfigError if the setting cannot have this value."""
        rule = self.setting
        if value is None and (self.default is None or type(None) in self.types):
            return
        if not (type(value) in self.types or (type(value) is int and float in self.types)):
            raise ConfigError(f"{name}={value!r} is {_a(type(value).__name__)}; {name} takes {self.describe_type()}.")
        if rule.refused and value != self.default:
            raise ConfigError(f"{name}={value!r} is not available: {rule.refused} Leave it at {self.default!r}.")
        if rule.choices and value not in rule.choices:
            hint = did_you_mean(value, rule.choices)
            raise ConfigError(f"{name}={value!r} is not possible.{hint} Possible: {', '.join(map(str, rule.choices))}.")
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
def all_settings() -> dict[str, SettingField]:
    """Every setting of every config class, by name, in order."""
    sections = get_type_hints(EngineConfig).items()
    return {name: known for section, cls in sections for name, known in settings_of(section, cls).items()}


def settings_of(section: str, cls: type[Any]) -> dict[str, SettingField]:
    """The settings of one config class."""
    hints = get_type_hints(cls)
    return {
        f.name: SettingField(section, f, f.metadata["setting"], tuple(_plain_types(hints[f.name])))
        for f in fields(cls)
        if "setting" in f.metadata
    }


def _plain_types(hint: Any) -> Iterator[type]:
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _plain_types(part)
    else:
        yield get_origin(hint) or hint


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
