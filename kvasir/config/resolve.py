"""Resolves settings: chooses a value for each one left at `auto`, checks that all fit together, and logs the reasons.

Runs in the process that builds the engine. Reads a model's JSON files but not its weights, and asks the platform about
the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir import platforms
from kvasir.config import env, pooling, startup
from kvasir.config.args import DTYPE_NAMES, EngineArgs
from kvasir.config.engine import (
    AT_LOAD,
    CHECKPOINT_FORMATS,
    EIGHT_BIT_KV,
    AdapterConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from kvasir.config.quantized import quantization_of
from kvasir.config.speculative import SpeculativeConfig, read_speculative
from kvasir.errors import ConfigError, ModelError
from kvasir.log import get_logger, warn_once
from kvasir.models import hub
from kvasir.platforms import attention_packages
from kvasir.platforms.attention_packages import PACKAGES, Package
from kvasir.platforms.cpu import prepare_cpu
from kvasir.platforms.limits import parse_cpus, usable_cpus
from kvasir.quantization.gguf_file import read_gguf

logger = get_logger(__name__)

LENGTH_KEYS = (
    "max_position_embeddings",
    "max_trained_positions",  # of NomicBERT, which longer texts need another rotation for
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
)
LARGE_GPU = 70 * 2**30  # bytes
LARGE_STEP = 128 * 132  # tokens: one tile of 128 rows for each multiprocessor of an H100 or H200, so none is idle
NO_GENERATION_CONFIG = ("kvasir", "vllm")
END_OF_TEXT = "eos_token_id"
EIGHT_BIT_BACKENDS = ("torch", "triton")  # attention backends that read an 8-bit KV cache


def resolve(asked: EngineArgs | EngineConfig) -> EngineConfig:
    """The resolved configuration. A configuration that is resolved already is returned unchanged."""
    env.validate()
    config = asked.create_engine_config() if isinstance(asked, EngineArgs) else asked
    if config.model.path:
        return config
    with startup.phase(startup.SETTINGS):
        return _resolve(config)


def _resolve(config: EngineConfig) -> EngineConfig:
    path = hub.find_model(config.model, config.load)
    prepare_cpu()  # asking the platform may import torch
    with startup.phase(startup.DEVICE):
        platform = platforms.select(config.device.device)
    model = _resolve_model(config.model, path, platform)
    model = replace(model, tokenizer=_tokenizer(config.model, config.load, path))
    model = replace(model, draft=_draft_model(config, model, platform))
    load = _resolve_load(config.load, path)
    device = _resolve_device(config.device, model.dtype, config.cache.kv_cache_dtype, platform)
    device = _resolve_threads(device, config.parallel.tensor_parallel_size, platform)
    package = _resolve_package(device.attention_backend, model, platform)
    _check_cpu_library_settings(config, model, device)
    _check_drafts_fit(config, model, device)
    if device.batch_invariant:
        _check_batch_invariant(config, model, device)
    return EngineConfig(
        model=replace(model, quantization=_quantization(model.quantization, model, load, device)),
        load=load,
        adapters=_resolve_adapters(config.adapters, model),
        cache=_resolve_cache(
            _without_prefixes(config.cache, model), model.dtype, device.attention_backend, package, platform
        ),
        scheduler=_resolve_scheduler(_without_chunks(config.scheduler, model), model.max_model_len, platform),
        parallel=_resolve_parallel(config.parallel, platform),
        device=device,
    )


def _resolve_adapters(asked: AdapterConfig, model: ModelConfig) -> AdapterConfig:
    if asked.enable_lora and model.model_impl == "transformers":
        raise ConfigError(
            "enable_lora needs one of Kvasir's own models, and this one runs through transformers. Merge the adapter "
            "into the checkpoint, or leave enable_lora out."
        )
    if asked.enable_lora and model.poolers:
        raise ConfigError("enable_lora is for models that generate text; this one pools. Leave enable_lora out.")
    most = asked.max_cpu_loras
    return replace(asked, max_cpu_loras=4 * asked.max_loras if most is None else most)


# ---------------------------------------------------------------- the model


def _resolve_model(asked: ModelConfig, path: Path, platform: platforms.Platform) -> ModelConfig:
    from kvasir.models import architectures

    hf = read_hf_config(path, asked.hf_overrides)
    pools = path.is_dir() and pooling.has_pooling(path)
    runner, kind = architectures.settle_runner(hf, asked.runner, asked.convert, pools)
    if asked.model_impl == "transformers" and path.is_file():
        raise ConfigError("model_impl='transformers' runs no GGUF files. Leave it at auto, or name a checkpoint.")
    implementation = architectures.settle_implementation(hf, asked.model_impl)
    if asked.trust_remote_code:
        whose = "transformers'" if implementation == "transformers" else "Kvasir's own"
        warn_once(
            logger, f"Kvasir runs no code of models; trust_remote_code changes nothing: {whose} code runs this one."
        )
    if runner == "pooling":
        asked = _resolve_pooling(asked, hf, path, kind, implementation)
    elif asked.pooler_config is not None:
        raise ConfigError("pooler_config is for pooling models, but runner is 'generate'. Leave it unset.")
    return replace(
        asked,
        path=str(path),
        hf=hf,
        vocab_size=_vocab_size(hf, path),
        dtype=_dtype(asked, hf, platform),
        max_model_len=_max_model_len(asked.max_model_len, _with_longest(hf, path, runner), path),
        generation=_generation(asked, path),
        chat_template=_chat_template(asked.chat_template),
        model_impl=implementation,
        runner=runner,
        convert=kind if kind in ("embed", "classify") else "none",
    )


def _draft_model(config: EngineConfig, model: ModelConfig, platform: platforms.Platform) -> ModelConfig | None:
    """The model that drafts, with the same vocabulary and lengths; None if none is named."""
    drafting = read_speculative(config.model.speculative_config)
    if drafting is not None and drafting.is_head:
        return _draft_head(config, model, drafting)
    if drafting is None or drafting.model is None:
        return None
    own: dict[str, Any] = {
        "max_model_len": None,
        "hf_overrides": {},
        "revision": None,
        "quantization": None,
        "head_quantization": None,
        "dtype": model.dtype,
    }
    asked = replace(config.model, model=drafting.model, speculative_config=None, **own)
    path = hub.find_model(asked, config.load)
    draft = _resolve_model(asked, path, platform)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {drafting.model} has a vocabulary of {draft.vocab_size} tokens, and "
            f"the model one of {model.vocab_size}. They must be the same: choose a draft model of the same family."
        )
    if draft.max_model_len < model.max_model_len:
        raise ConfigError(
            f"speculative_config: the draft model {drafting.model} knows texts of up to {draft.max_model_len} tokens, "
            f"but max_model_len is {model.max_model_len}. Set max_model_len={draft.max_model_len}, or choose another."
        )
    return replace(draft, max_model_len=model.max_model_len)


def _draft_head(config: EngineConfig, model: ModelConfig, drafting: SpeculativeConfig) -> ModelConfig:
    """Return the configuration of the head that drafts. It handles texts as long as the model's, whatever its
    config.json says."""
    if model.model_impl != "kvasir":
        raise ConfigError(
            f"speculative_config: method={drafting.method!r} reads the model's hidden states, which a model that runs "
            f"through transformers does not hand out. Use method='suffix', or a draft model."
        )
    if config.adapters.enable_lora:
        raise ConfigError(f"enable_lora does not work with method={drafting.method!r}; use method='suffix'.")
    head = replace(
        model, model=drafting.model or model.model, quantization=None, head_quantization=None, speculative_config=None
    )
    if drafting.model is None:
        if not Path(model.path).is_dir():
            raise ConfigError(
                f"speculative_config: method={drafting.method!r} reads a layer of the model's safetensors, and "
                f"{model.path} is a GGUF file. Use method='suffix', or a draft model."
            )
        return head
    path = hub.find_draft_head(drafting.model, config.model, config.load)
    if not path.is_dir():
        raise ConfigError(f"speculative_config: model={drafting.model!r} must be a directory or a name on the Hub.")
    return replace(head, path=str(path), hf=read_hf_config(path, {}))


def _resolve_pooling(asked: ModelConfig, hf: dict[str, Any], path: Path, kind: str, implementation: str) -> ModelConfig:
    from kvasir.models import architectures

    if implementation != "kvasir":
        raise ConfigError("model_impl='transformers' runs models that generate text only. Leave it at auto.")
    if asked.speculative_config:
        raise ConfigError(
            "speculative_config is for models that generate text, and this one is a pooling model. Leave it unset."
        )
    if asked.quantization not in (None, "none", "int8", "int4"):
        raise ConfigError(f"quantization={asked.quantization!r} is not possible for a pooling model. Leave it unset.")
    architecture = architectures.find(hf)
    spec = architecture.read_spec(hf)
    poolers = pooling.read_poolers(hf, path, kind, architecture.pooling, architecture.heads, asked.pooler_config)
    prompts, default = pooling.read_prompts(path) if kind == "embed" else ({}, None)
    logger.info("This model pools: %s", ", ".join(f"{each.task} by {each.pooling}" for each in poolers))
    return replace(
        asked,
        poolers=poolers,
        is_encoder=spec.is_encoder,
        num_token_types=spec.num_token_types,
        prompts=prompts,
        default_prompt=default,
    )


def _with_longest(hf: dict[str, Any], path: Path, runner: str) -> dict[str, Any]:
    """Return config.json with the length that a pooling model's positions, and sentence-transformers' files, allow."""
    if runner != "pooling":
        return hf
    from kvasir.models import architectures

    lengths = [_longest(hf), architectures.find(hf).read_spec(hf).num_positions, pooling.max_seq_length(path)]
    known = [length for length in lengths if length is not None]
    return {"max_position_embeddings": min(known)} if known else hf


def read_hf_config(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of config.json with the overrides merged in, and RoPE in the form of `rope_parameters`."""
    hf = (
        _read_gguf_config(path)
        if path.is_file()
        else _read_json(path / "config.json", lambda: hub.without_config(path))
    )
    if "rope_scaling" in overrides and overrides["rope_scaling"] is None:
        overrides = {**overrides, "rope_scaling": {"rope_type": "default"}}
    hf = _merge(_with_rope_parameters(hf), _with_rope_parameters(overrides))
    if isinstance(hf.get("text_config"), dict):
        kept = ("architectures", "dtype", "torch_dtype", "quantization_config", "compression_config")
        outer = {key: hf[key] for key in kept if key in hf}
        hf = _with_rope_parameters(outer | hf["text_config"])
    return hf


def _read_gguf_config(path: Path) -> dict[str, Any]:
    from kvasir.models import gguf

    return gguf.read_config(read_gguf(path))


def _with_rope_parameters(entries: dict[str, Any]) -> dict[str, Any]:
    """Move rope_theta and rope_scaling, which older configs have, into rope_parameters, which holds both."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(entries.get(name) or {}, dict):
            raise ConfigError(
                f"{name}={entries[name]!r} must be a mapping, such as {{'rope_type': 'linear', 'factor': 2.0}}."
            )
    if "rope_theta" in entries:
        rope["rope_theta"] = entries["rope_theta"]
    if "rope_scaling" in entries:
        scaling = entries["rope_scaling"] or {}
        rope |= {key: value for key, value in scaling.items() if key != "type"}
        if "type" in scaling:
            rope.setdefault("rope_type", scaling["type"])
    if not rope:
        return entries
    rest = {key: value for key, value in entries.items() if key not in ("rope_theta", "rope_scaling")}
    return rest | {"rope_parameters": rope | (rest.get("rope_parameters") or {})}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _vocab_size(hf: dict[str, Any], path: Path) -> int:
    size = hf.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(
            f"vocab_size={size!r} in {path / 'config.json'} is not a positive number. Is this a text model?"
        )
    return size


def _dtype(model: ModelConfig, hf: dict[str, Any], platform: platforms.Platform) -> str:
    if model.dtype != "auto":
        return DTYPE_NAMES.get(model.dtype, model.dtype)
    if model.quantization in AT_LOAD and model.quantization is not None:
        _log_choice("dtype", "bfloat16", f"quantization={model.quantization} computes with it")
        return "bfloat16"
    checkpoint = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = platform.default_dtype(checkpoint)
    _log_choice("dtype", dtype, f"for a {checkpoint} checkpoint on {platform.device}")
    return dtype


def _max_model_len(asked: int | None, hf: dict[str, Any], path: Path) -> int:
    limit = _longest(hf)
    if asked is None:
        if limit is None:
            raise ModelError(f"{path / 'config.json'} does not give the context length. Set max_model_len.")
        _log_choice("max_model_len", limit, "the model's context length")
        return limit
    if limit is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is more than the {limit} tokens of the model's context length. Lower it, or, if "
            f'the model works with longer sequences, set hf_overrides to {{"max_position_embeddings": {asked}}}.'
        )
    return asked


def _longest(hf: dict[str, Any]) -> int | None:
    """The context length in config.json. A sliding window does not limit it, nor the length before llama3 scaling."""
    lengths = [hf[key] for key in LENGTH_KEYS if isinstance(hf.get(key), int)]
    if not lengths:
        return None
    rope = hf.get("rope_parameters") or {}
    factor = rope.get("factor") or 1.0
    kind = rope.get("rope_type", "default")
    if str(hf.get("model_type")).startswith("gemma3"):
        return int(min(lengths))  # its lengths are given after scaling
    if kind in ("linear", "dynamic"):
        return int(min(lengths) * factor)
    if kind == "yarn" and "original_max_position_embeddings" in rope:
        return int(rope["original_max_position_embeddings"] * factor)
    return int(min(lengths))


def _generation(asked: ModelConfig, path: Path) -> dict[str, Any]:
    """Entries of the generation config. The end-of-text ids are read even if generation_config turns the rest off."""
    own = asked.generation_config in ("auto", *NO_GENERATION_CONFIG)
    if own and path.is_file():
        return dict(asked.override_generation_config)
    file = (path if own else Path(asked.generation_config)) / "generation_config.json"
    if not own and not file.is_file():
        raise ConfigError(
            f"generation_config={asked.generation_config!r}: there is no {file}. Possible: auto, kvasir or a directory."
        )
    entries = _read_json(file) if file.is_file() else {}
    if asked.generation_config in NO_GENERATION_CONFIG:
        entries = {key: value for key, value in entries.items() if key == END_OF_TEXT}
    return entries | asked.override_generation_config


def _chat_template(asked: str | None) -> str | None:
    """The template's text. A value without braces must be a file name."""
    if asked is None or "{" in asked:
        return asked
    try:
        return Path(asked).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={asked!r} is neither a readable file nor Jinja text ({error}).") from None


def _tokenizer(asked: ModelConfig, load: LoadConfig, path: Path) -> str:
    if asked.skip_tokenizer_init or (asked.tokenizer is None and asked.tokenizer_revision in (None, asked.revision)):
        return str(path)
    return str(hub.find_tokenizer(asked, load))


def _read_json(file: Path, missing: Callable[[], str] | None = None) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(missing() if missing else f"{file} is missing. Is the download complete?") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}). Is the download complete?") from None
    if not isinstance(entries, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(entries).__name__}.")
    return entries


# ---------------------------------------------------------------- loading, parallelism, scheduler, cache, device


def _resolve_load(asked: LoadConfig, path: Path) -> LoadConfig:
    own = "gguf" if path.is_file() else "safetensors"
    if asked.packed_weights_dir is not None and (own == "gguf" or asked.load_format == "dummy"):
        raise ConfigError("packed_weights_dir works only with safetensors checkpoints. Leave it unset.")
    if asked.load_format not in ("auto", "dummy", own):
        raise ConfigError(
            f"load_format={asked.load_format!r} does not fit: {path} is a {own} checkpoint. Leave it at auto."
        )
    return replace(asked, load_format=own) if asked.load_format == "auto" else asked


def _resolve_parallel(asked: ParallelConfig, platform: platforms.Platform) -> ParallelConfig:
    several, backend = asked.tensor_parallel_size > 1, asked.distributed_executor_backend
    if several and backend == "uni":
        raise ConfigError(
            f"distributed_executor_backend='uni' is one process, but tensor_parallel_size={asked.tensor_parallel_size} "
            f"needs {asked.tensor_parallel_size}. Leave the first at auto."
        )
    counts = platform.kind == "cpu" if asked.expert_load_metrics is None else asked.expert_load_metrics
    settled = backend or ("mp" if several else "uni")
    return replace(asked, distributed_executor_backend=settled, expert_load_metrics=counts)


def _without_chunks(asked: SchedulerConfig, model: ModelConfig) -> SchedulerConfig:
    """Turn chunked prefill off for an encoder, which computes a prompt in one step."""
    if not model.is_encoder:
        return asked
    if asked.long_prefill_token_threshold:
        raise ConfigError(
            "long_prefill_token_threshold splits prompts over steps, but this model computes a prompt in one step. "
            "Leave it at 0."
        )
    return replace(asked, enable_chunked_prefill=False)


def _without_prefixes(asked: CacheConfig, model: ModelConfig) -> CacheConfig:
    """Turn prefix caching off for an encoder, which has no KV cache."""
    if not model.is_encoder:
        return asked
    for name in ("swap_space", "kv_offloading_size", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if getattr(asked, name):
            raise ConfigError(
                f"{name}={getattr(asked, name)} has no effect: this model has no KV cache. Leave it unset."
            )
    return replace(asked, enable_prefix_caching=False)


def _resolve_scheduler(asked: SchedulerConfig, max_model_len: int, platform: platforms.Platform) -> SchedulerConfig:
    large = platform.kind != "cpu" and (platform.memory_bytes() or 0) >= LARGE_GPU
    seqs, tokens = asked.max_num_seqs, asked.max_num_batched_tokens
    if seqs is None:
        seqs = min(1024 if large else 256, tokens or 1024)
        _log_choice("max_num_seqs", seqs, f"the default on {platform.device}, at most max_num_batched_tokens")
    if tokens is None:
        tokens = max(seqs, 2048 if platform.kind == "cpu" else LARGE_STEP if large else 8192)
        if not asked.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
        _log_choice("max_num_batched_tokens", tokens, f"the default on {platform.device}, at least max_num_seqs")
    if not asked.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_model_len={max_model_len}, but without chunked prefill "
            f"a prompt must fit into one step. Raise the first, lower the second, or turn enable_chunked_prefill on."
        )
    ahead = platform.kind != "cpu" if asked.async_scheduling is None else asked.async_scheduling
    settled = replace(asked, max_num_seqs=seqs, max_num_batched_tokens=tokens, async_scheduling=ahead)
    return settled.with_queue_limits(0, 0)  # a server has set its own before


def _resolve_cache(
    asked: CacheConfig, dtype: str, backend: str, package: Package | None, platform: platforms.Platform
) -> CacheConfig:
    block_size, kv_dtype = _block_size(asked.block_size, package, platform), asked.kv_cache_dtype
    if kv_dtype not in ("auto", dtype, "int8", *EIGHT_BIT_KV):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r} must be the model's {dtype} or an 8-bit type. "
            f"Set it to auto, int8 or {', '.join(EIGHT_BIT_KV)}, or set dtype={kv_dtype!r}."
        )
    names = {"int8": "int8", **EIGHT_BIT_KV}
    cache = replace(asked, block_size=block_size, kv_dtype=names.get(kv_dtype, dtype))
    if cache.is_eight_bit:
        _check_eight_bit(cache, backend, platform)
    return cache


def _block_size(asked: int | None, package: Package | None, platform: platforms.Platform) -> int:
    if package is not None and package.block_size is not None:
        only = package.block_size
        if asked not in (None, only):
            raise ConfigError(
                f"block_size={asked} does not fit: attention_backend='flash_attn' is {package.title} here, which needs "
                f"blocks of {only} tokens. Set block_size={only}, or leave it at auto."
            )
        _log_choice("block_size", only, f"{package.title} needs it")
        return only
    if asked is None:
        asked = platform.default_block_size
        _log_choice("block_size", asked, f"the default on {platform.device}")
    return asked


def _check_eight_bit(cache: CacheConfig, backend: str, platform: platforms.Platform) -> None:
    if backend not in EIGHT_BIT_BACKENDS:
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r}: attention_backend={backend!r} does not support an 8-bit cache. "
            f"Set attention_backend to one of {', '.join(EIGHT_BIT_BACKENDS)}, or kv_cache_dtype='auto'."
        )
    if backend == "triton" and cache.kv_dtype == "float8_e4m3fn" and not platform.has_fp8_e4m3:
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r} needs a GPU of compute capability 8.9 or more, which "
            f"{platform.device} is not. kv_cache_dtype='fp8_e5m2' needs as little memory."
        )


def _resolve_device(asked: DeviceConfig, dtype: str, kv_dtype: str, platform: platforms.Platform) -> DeviceConfig:
    backend = asked.attention_backend
    if backend == "auto":
        backend = _default_attention(dtype, platform)
        if backend == "cpu" and kv_dtype in EIGHT_BIT_KV:
            backend = "torch"  # the C++ library does not read 8-bit floats
    if backend == "cpu" and _default_attention(dtype, platform) != "cpu":
        raise ConfigError(
            f"attention_backend='cpu' is Kvasir's C++ library, which needs bfloat16 on a CPU; here dtype is {dtype} on "
            f"{platform.device}{'' if platform.kind != 'cpu' or dtype != 'bfloat16' else ', without the library'}. "
            f"Leave it at auto, or set dtype='bfloat16'."
        )
    if backend == "triton" and platform.kind == "cpu":
        raise ConfigError("attention_backend='triton' needs a GPU, but device is cpu. Leave it at auto.")
    if asked.device == "auto":
        _log_choice("device", platform.device, "the preferred one of those available")
    if asked.attention_backend == "auto":
        floats = " for 8-bit floats" if kv_dtype in EIGHT_BIT_KV else ""
        _log_choice("attention_backend", backend, f"the default on {platform.device}{floats}")
    return replace(asked, device=platform.device, attention_backend=backend)


def _default_attention(dtype: str, platform: platforms.Platform) -> str:
    """The attention backend that `auto` means: on a CPU the C++ library for bfloat16, where it is built."""
    if platform.kind == "cpu" and dtype == "bfloat16":
        from kvasir.kernels.cpu import library  # the package imports torch, which `prepare_cpu` must come before

        if library.library() is not None:
            return "cpu"
    return platform.default_attention


def _resolve_package(backend: str, model: ModelConfig, platform: platforms.Platform) -> Package | None:
    """The package that computes attention, checked to support this model; None if Kvasir's own kernels do."""
    if backend not in PACKAGES:
        return None
    package = attention_packages.require(backend, platform)
    if model.dtype not in attention_packages.DTYPES:
        raise ConfigError(
            f"attention_backend={backend!r} supports only 16-bit types, but dtype is {model.dtype}. Set dtype to "
            f"{' or '.join(attention_packages.DTYPES)}, or leave attention_backend at auto."
        )
    if what := _unsupported_by_packages(model):
        raise ConfigError(
            f"attention_backend={backend!r}: the model has {what}, which {package.title} does not compute here. Leave "
            f"attention_backend at auto."
        )
    if unfit := sorted(_head_dims(model) - package.head_dims):
        raise ConfigError(
            f"attention_backend={backend!r}: the model's head size is {unfit[0]}, but {package.title} supports "
            f"{package.head_dims_in_words} on {platform.device}. Leave attention_backend at auto."
        )
    logger.info("Attention is computed by %s", package.title)
    return package


def _unsupported_by_packages(model: ModelConfig) -> str | None:
    """Name what in the model's attention other packages do not compute; None if they compute all of it, as far as is
    known."""
    from kvasir.models import architectures

    if model.model_impl != "kvasir":
        return None
    return architectures.find(model.hf).read_spec(model.hf).unsupported_by_packages


def _head_dims(model: ModelConfig) -> frozenset[int]:
    """The head sizes of the model; empty if only the code of the model knows them."""
    from kvasir.models import architectures

    if model.model_impl == "kvasir":
        return architectures.find(model.hf).read_spec(model.hf).head_dims
    head_dim = model.hf.get("head_dim")
    return frozenset((head_dim,)) if isinstance(head_dim, int) else frozenset()


def _resolve_threads(asked: DeviceConfig, workers: int, platform: platforms.Platform) -> DeviceConfig:
    if platform.kind != "cpu":
        if asked.cpu_threads is not None or asked.cpu_bind is not None:
            raise ConfigError(f"cpu_threads and cpu_bind are for device='cpu', but the device is {platform.device}.")
        return asked
    cpus = len(parse_cpus(asked.cpu_bind)) if asked.cpu_bind is not None else usable_cpus()
    if asked.cpu_threads is not None:
        if asked.cpu_bind is not None and asked.cpu_threads * workers > cpus:
            several = f" for each of {workers} workers" if workers > 1 else ""
            raise ConfigError(f"cpu_threads={asked.cpu_threads}{several} is more than the {cpus} CPUs of cpu_bind.")
        return asked
    threads = max(1, cpus // workers)
    _log_choice("cpu_threads", threads, f"{cpus} CPUs for {workers} workers" if workers > 1 else "one per usable CPU")
    return replace(asked, cpu_threads=threads)


def _check_cpu_library_settings(asked: EngineConfig, model: ModelConfig, device: DeviceConfig) -> None:
    """Only the CPU library supports quantized weights and an int8 cache."""
    settings = {
        "quantization": None if asked.model.quantization in CHECKPOINT_FORMATS else asked.model.quantization,
        "head_quantization": asked.model.head_quantization,
        "kv_cache_dtype": "int8" if asked.cache.kv_cache_dtype == "int8" else None,
        "packed_weights_dir": asked.load.packed_weights_dir,
    }
    for name, value in settings.items():
        if value in (None, "none"):
            continue
        if model.model_impl == "transformers":
            raise ConfigError(_not_through_transformers(name, value, asked.model.model_impl, model.hf))
        if device.attention_backend != "cpu" and not (name.endswith("quantization") and device.device == "cuda"):
            raise ConfigError(
                f"{name}={value!r} needs a CPU, bfloat16 and Kvasir's C++ library (attention_backend='cpu'), but the "
                f"device is {device.device} and attention_backend {device.attention_backend}. Leave {name} unset."
            )


def _check_batch_invariant(config: EngineConfig, model: ModelConfig, device: DeviceConfig) -> None:
    """Refuse settings whose rounding depends on the size of the batch, and those that no test compares bit by bit."""
    if model.model_impl == "transformers" or device.attention_backend != "cpu":
        where = "through transformers" if model.model_impl == "transformers" else f"on {device.device}"
        raise ConfigError(
            f"batch_invariant=True: only Kvasir's C++ library for CPUs (device='cpu', dtype='bfloat16', "
            f"attention_backend='cpu') computes a request's logits with the same bits in every batch; this model runs "
            f"{where} with attention_backend={device.attention_backend!r}, whose rounding depends on the batch. Use "
            f"the library, or leave batch_invariant out."
        )
    checkpoint = _checkpoint_quantization(model) if config.load.load_format != "gguf" else None
    for name, is_off in (
        ("tensor_parallel_size", config.parallel.tensor_parallel_size == 1),
        ("speculative_config", model.speculative_config is None),
        ("enable_lora", not config.adapters.enable_lora),
        ("enable_prompt_embeds", not model.enable_prompt_embeds),
        ("runner='pooling'", not model.poolers),
        (f"a checkpoint quantized with {checkpoint}", checkpoint is None),
    ):
        if not is_off:
            raise ConfigError(
                f"batch_invariant=True does not go together with {name}: its results may depend on the batch. Leave "
                f"one of the two out."
            )


_EXACT_LENGTHS = ("torch", "flashinfer")  # attention backends that read a chunk's length on the host


def _check_drafts_fit(config: EngineConfig, model: ModelConfig, device: DeviceConfig) -> None:
    """Refuse settings that cannot be combined with speculative decoding."""
    if model.speculative_config is None:
        return
    backend = device.attention_backend
    if backend in _EXACT_LENGTHS and device.device != "cpu":
        raise ConfigError(
            f"speculative_config does not work with attention_backend={backend!r} on {device.device}: it must know the "
            f"length of every sequence when a step is planned. Leave attention_backend at auto."
        )
    if model.draft is None:
        return
    for name, value in (
        ("swap_space", config.cache.swap_space),
        ("kv_offloading_size", config.cache.kv_offloading_size),
    ):
        if value:
            raise ConfigError(f"{name} does not move what a draft model or head keeps; set {name}=0.")
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "speculative_config: a draft model or head runs on one device, but tensor_parallel_size is "
            f"{config.parallel.tensor_parallel_size}; set it to 1, or use method='suffix'."
        )


def _not_through_transformers(name: str, value: str, asked_impl: str, hf: dict[str, Any]) -> str:
    needs = f"{name}={value!r} needs Kvasir's own implementation of the model"
    if asked_impl == "transformers":
        return f"{needs}, but model_impl is 'transformers'. Leave one of the two unset."
    architecture = ", ".join(hf.get("architectures") or ["this model"])
    return f"{needs}, but {architecture} has none and runs through transformers. Leave {name} unset."


def _quantization(asked: str | None, model: ModelConfig, load: LoadConfig, device: DeviceConfig) -> str | None:
    """The format of weights; None if they are not quantized."""
    if asked == "gguf" and load.load_format != "gguf":
        raise ConfigError("quantization='gguf' is for GGUF files. Set int8 or int4, or leave it unset.")
    if asked is None and load.load_format == "gguf" and (device.attention_backend == "cpu" or device.device == "cuda"):
        _log_choice("quantization", "gguf", "the format of the file")
        return "gguf"
    own = _checkpoint_quantization(model)
    if own is not None and load.load_format != "gguf":
        if load.packed_weights_dir is not None:
            raise ConfigError("packed_weights_dir is for plain checkpoints, and this one is quantized. Leave it unset.")
        if asked in AT_LOAD and asked != own:
            raise ConfigError(f"The checkpoint is already quantized ({own}). Leave quantization={asked!r} unset.")
        if asked not in (None, own):
            raise ConfigError(f"quantization={asked!r} was asked for, but the checkpoint is {own}. Leave it unset.")
        _log_choice("quantization", own, "the format of the checkpoint")
        return own if own in (*CHECKPOINT_FORMATS, *AT_LOAD) else None  # the worker refuses what nobody knows
    if asked in CHECKPOINT_FORMATS:
        raise ConfigError(f"quantization={asked!r} is for checkpoints in that format, and this one is not quantized.")
    return None if asked == "none" else asked


def _checkpoint_quantization(model: ModelConfig) -> str | None:
    """The name of the format that a checkpoint says it has. The worker reads the rest of its config."""
    config = quantization_of(model.hf, Path(model.path))
    return None if config is None else str(config["quant_method"])


def _log_choice(name: str, value: object, why: str) -> None:
    logger.info("%s=%s (%s)", name, value, why)
