"""Settles every `auto`, once: EngineArgs in, an EngineConfig with nothing left open out, the reasons in the log.

The process that builds the engine. Reads a model's JSON files, never its weights; asks the platform what the device is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir import platforms, startup
from kvasir.config import env
from kvasir.config.args import DTYPE_NAMES, EngineArgs
from kvasir.config.engine import (
    EIGHT_BIT_KV,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from kvasir.errors import ConfigError, ModelError
from kvasir.log import get_logger
from kvasir.models import hub
from kvasir.platforms import attention_packages
from kvasir.platforms.attention_packages import PACKAGES, Package
from kvasir.platforms.cpu_features import prepare_cpu
from kvasir.platforms.limits import parse_cpus, usable_cpus
from kvasir.quantization.gguf_file import read_gguf

logger = get_logger(__name__)

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
)
LARGE_GPU = 70 * 2**30  # bytes
LARGE_STEP = 128 * 132  # tokens: as many tiles of 128 rows as an H100 or H200 has multiprocessors, so none idles
NO_GENERATION_CONFIG = ("kvasir", "vllm")
END_OF_TEXT = "eos_token_id"
READS_EIGHT_BIT = ("torch", "triton")  # attention backends


def resolve(asked: EngineArgs | EngineConfig) -> EngineConfig:
    """The settled configuration. One that is settled already comes back as it is."""
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
    model = _settle_model(config.model, path, platform)
    model = replace(model, tokenizer=_tokenizer(config.model, config.load, path))
    load = _settle_load(config.load, path)
    device = _settle_device(config.device, model.dtype, config.cache.kv_cache_dtype, platform)
    device = _settle_threads(device, config.parallel.tensor_parallel_size, platform)
    package = _settle_package(device.attention_backend, model, platform)
    _refuse_what_needs_the_library(config, model, device)
    return EngineConfig(
        model=replace(model, quantization=_quantization(model.quantization, load, device)),
        load=load,
        cache=_settle_cache(config.cache, model.dtype, device.attention_backend, package, platform),
        scheduler=_settle_scheduler(config.scheduler, model.max_model_len, platform),
        parallel=_settle_parallel(config.parallel),
        device=device,
    )


# ---------------------------------------------------------------- the model


def _settle_model(asked: ModelConfig, path: Path, platform: platforms.Platform) -> ModelConfig:
    from kvasir.models import registry

    hf = read_hf_config(path, asked.hf_overrides)
    implementation = registry.settle_implementation(hf, asked.model_impl)
    return replace(
        asked,
        path=str(path),
        hf=hf,
        vocab_size=_vocab_size(hf, path),
        dtype=_dtype(asked, hf, platform),
        max_model_len=_max_model_len(asked.max_model_len, hf, path),
        generation=_generation(asked, path),
        chat_template=_chat_template(asked.chat_template),
        model_impl=implementation,
        runner="generate",
        convert="none",
    )


def read_hf_config(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """config.json with the overrides merged in: the text model's part, RoPE written as `rope_parameters`."""
    hf = (
        _read_gguf_config(path)
        if path.is_file()
        else _read_json(path / "config.json", f"The model directory {path} holds no config.json.")
    )
    hf = _merge(_with_rope_parameters(hf), _with_rope_parameters(overrides))
    if isinstance(hf.get("text_config"), dict):
        outer = {key: hf[key] for key in ("architectures", "dtype", "torch_dtype") if key in hf}
        hf = _with_rope_parameters(outer | hf["text_config"])
    return hf


def _read_gguf_config(path: Path) -> dict[str, Any]:
    from kvasir.models import gguf

    return gguf.read_config(read_gguf(path))


def _with_rope_parameters(entries: dict[str, Any]) -> dict[str, Any]:
    """Older configs write rope_theta and rope_scaling, newer ones rope_parameters, which holds both."""
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
        rope.setdefault("rope_type", scaling.get("type", "default"))
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
            f"vocab_size={size!r} in {path / 'config.json'} is not a positive number; is this a text model?"
        )
    return size


def _dtype(model: ModelConfig, hf: dict[str, Any], platform: platforms.Platform) -> str:
    if model.dtype != "auto":
        return DTYPE_NAMES.get(model.dtype, model.dtype)
    if model.quantization in ("int8", "int4"):
        _say("dtype", "bfloat16", f"what quantization={model.quantization} computes with")
        return "bfloat16"
    checkpoint = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = platform.default_dtype(checkpoint)
    _say("dtype", dtype, f"the checkpoint is {checkpoint}, the device {platform.device}")
    return dtype


def _max_model_len(asked: int | None, hf: dict[str, Any], path: Path) -> int:
    limit = _longest(hf)
    if asked is None:
        if limit is None:
            raise ModelError(f"{path / 'config.json'} does not say how long a sequence may be. Set max_model_len.")
        _say("max_model_len", limit, "what the model was made for")
        return limit
    if limit is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is more than the {limit} tokens the model was made for. Lower it, or, if you know "
            f'that the model can do more, set hf_overrides to {{"max_position_embeddings": {asked}}}.'
        )
    return asked


def _longest(hf: dict[str, Any]) -> int | None:
    """The longest sequence by config.json. A sliding window is no limit, nor is the length before llama3 scaling."""
    lengths = [hf[key] for key in LENGTH_KEYS if isinstance(hf.get(key), int)]
    if not lengths:
        return None
    rope = hf.get("rope_parameters") or {}
    factor = rope.get("factor") or 1.0
    kind = rope.get("rope_type", "default")
    if str(hf.get("model_type")).startswith("gemma3"):
        return int(min(lengths))  # there it is the length after scaling
    if kind in ("linear", "dynamic"):
        return int(min(lengths) * factor)
    if kind == "yarn" and "original_max_position_embeddings" in rope:
        return int(rope["original_max_position_embeddings"] * factor)
    return int(min(lengths))


def _generation(asked: ModelConfig, path: Path) -> dict[str, Any]:
    """The generation config. Which tokens end a text belongs to the model: that much is read in any case."""
    own = asked.generation_config in ("auto", *NO_GENERATION_CONFIG)
    if own and path.is_file():
        return _gguf_end_of_text(path) | asked.override_generation_config
    file = (path if own else Path(asked.generation_config)) / "generation_config.json"
    if not own and not file.is_file():
        raise ConfigError(
            f"generation_config={asked.generation_config!r}: there is no {file}. Possible: auto, kvasir, a directory."
        )
    entries = _read_json(file) if file.is_file() else {}
    if asked.generation_config in NO_GENERATION_CONFIG:
        entries = {key: value for key, value in entries.items() if key == END_OF_TEXT}
    return entries | asked.override_generation_config


def _gguf_end_of_text(path: Path) -> dict[str, Any]:
    metadata = read_gguf(path).metadata
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {END_OF_TEXT: list(dict.fromkeys(number for number in ends if number is not None))}


def _chat_template(asked: str | None) -> str | None:
    """The template's text; what has no braces must be a file's name."""
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


def _read_json(file: Path, missing: str = "") -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(missing or f"{file} is missing.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}). Is the download complete?") from None
    if not isinstance(entries, dict):
        raise ModelError(f"{file} holds {type(entries).__name__}, not an object with entries.")
    return entries


# ---------------------------------------------------------------- the rest


def _settle_load(asked: LoadConfig, path: Path) -> LoadConfig:
    own = "gguf" if path.is_file() else "safetensors"
    if asked.packed_weights_dir is not None and (own == "gguf" or asked.load_format == "dummy"):
        raise ConfigError("packed_weights_dir is for safetensors checkpoints; leave it unset.")
    if asked.load_format not in ("auto", "dummy", own):
        raise ConfigError(f"load_format={asked.load_format!r}: {path} is {own}. Leave it at auto.")
    return replace(asked, load_format=own) if asked.load_format == "auto" else asked


def _settle_parallel(asked: ParallelConfig) -> ParallelConfig:
    several, backend = asked.tensor_parallel_size > 1, asked.distributed_executor_backend
    if several and backend == "uni":
        raise ConfigError(
            f"distributed_executor_backend='uni' is one process, and tensor_parallel_size={asked.tensor_parallel_size} "
            f"needs as many; leave the first at auto."
        )
    return replace(asked, distributed_executor_backend=backend or ("mp" if several else "uni"))


def _settle_scheduler(asked: SchedulerConfig, max_model_len: int, platform: platforms.Platform) -> SchedulerConfig:
    large = platform.kind != "cpu" and (platform.memory_bytes() or 0) >= LARGE_GPU
    seqs, tokens = asked.max_num_seqs, asked.max_num_batched_tokens
    if seqs is None:
        seqs = min(1024 if large else 256, tokens or 1024)
        _say("max_num_seqs", seqs, f"the default on {platform.device}, at most max_num_batched_tokens")
    if tokens is None:
        tokens = max(seqs, 2048 if platform.kind == "cpu" else LARGE_STEP if large else 8192)
        if not asked.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
        _say("max_num_batched_tokens", tokens, f"the default on {platform.device}, at least max_num_seqs")
    if not asked.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_model_len={max_model_len}, and without chunked prefill "
            f"a prompt must fit into one step. Raise the first, lower the second, or leave enable_chunked_prefill on."
        )
    ahead = platform.kind != "cpu" if asked.async_scheduling is None else asked.async_scheduling
    return replace(asked, max_num_seqs=seqs, max_num_batched_tokens=tokens, async_scheduling=ahead)


def _settle_cache(
    asked: CacheConfig, dtype: str, backend: str, package: Package | None, platform: platforms.Platform
) -> CacheConfig:
    block_size, kv_dtype = _block_size(asked.block_size, package, platform), asked.kv_cache_dtype
    if kv_dtype not in ("auto", dtype, "int8", *EIGHT_BIT_KV):
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r} is not the model's {dtype}, and the cache holds that or 8 bits; "
            f"choose auto, int8, {', '.join(EIGHT_BIT_KV)}, or dtype={kv_dtype!r}."
        )
    names = {"int8": "int8", **EIGHT_BIT_KV}
    settled = replace(asked, block_size=block_size, kv_dtype=names.get(kv_dtype, dtype))
    if settled.is_eight_bit:
        _check_eight_bit(settled, backend, platform)
    return settled


def _block_size(asked: int | None, package: Package | None, platform: platforms.Platform) -> int:
    if package is not None and package.block_size is not None:
        only = package.block_size
        if asked not in (None, only):
            raise ConfigError(
                f"block_size={asked}: attention_backend='flash_attn' is {package.title} here, which takes blocks of "
                f"{only} tokens; set block_size={only}, or leave it at auto."
            )
        _say("block_size", only, f"the one that {package.title} takes")
        return only
    if asked is None:
        asked = platform.default_block_size
        _say("block_size", asked, f"the default on {platform.device}")
    return asked


def _check_eight_bit(cache: CacheConfig, backend: str, platform: platforms.Platform) -> None:
    if backend not in READS_EIGHT_BIT:
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r}: attention_backend={backend!r} reads no 8-bit cache; "
            f"set attention_backend to one of {', '.join(READS_EIGHT_BIT)}, or kv_cache_dtype='auto'."
        )
    if backend == "triton" and cache.kv_dtype == "float8_e4m3fn" and not platform.has_fp8_e4m3:
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r} needs a GPU that converts it (compute capability 8.9), "
            f"which {platform.device} does not; kv_cache_dtype='fp8_e5m2' is as small."
        )


def _settle_device(asked: DeviceConfig, dtype: str, kv_dtype: str, platform: platforms.Platform) -> DeviceConfig:
    backend = asked.attention_backend
    if backend == "auto":
        backend = _default_attention(dtype, platform)
        if backend == "cpu" and kv_dtype in EIGHT_BIT_KV:
            backend = "torch"  # which reads 8-bit floats; the library does not
    if backend == "cpu" and _default_attention(dtype, platform) != "cpu":
        raise ConfigError(
            f"attention_backend='cpu' is our C++ library on the CPU for bfloat16; here are {dtype} on "
            f"{platform.device}{'' if platform.kind != 'cpu' or dtype != 'bfloat16' else ' and no library'}. "
            f"Leave it at auto, or set dtype='bfloat16'."
        )
    if backend == "triton" and platform.kind == "cpu":
        raise ConfigError("attention_backend='triton' needs a GPU, and device is cpu; leave it at auto, or set torch.")
    if asked.device == "auto":
        _say("device", platform.device, "the best there is")
    if asked.attention_backend == "auto":
        floats = ", which reads 8-bit floats" if kv_dtype in EIGHT_BIT_KV else ""
        _say("attention_backend", backend, f"the default on {platform.device}{floats}")
    return replace(asked, device=platform.device, attention_backend=backend)


def _default_attention(dtype: str, platform: platforms.Platform) -> str:
    """The attention backend that `auto` means: on a CPU the C++ library for bfloat16, where it is built."""
    if platform.kind == "cpu" and dtype == "bfloat16":
        from kvasir.kernels.cpu import library  # the package imports torch, which `prepare_cpu` must come before

        if library.library() is not None:
            return "cpu"
    return platform.default_attention


def _settle_package(backend: str, model: ModelConfig, platform: platforms.Platform) -> Package | None:
    """The package that computes attention, after seeing that it can for this model; None where that is our code."""
    if backend not in PACKAGES:
        return None
    package = attention_packages.require(backend, platform)
    if model.dtype not in attention_packages.DTYPES:
        raise ConfigError(
            f"attention_backend={backend!r} computes in 16 bits, and dtype is {model.dtype}; set dtype to "
            f"{' or '.join(attention_packages.DTYPES)}, or leave attention_backend at auto."
        )
    if unfit := sorted(_head_dims(model) - package.head_dims):
        raise ConfigError(
            f"attention_backend={backend!r}: the model's heads have {unfit[0]} numbers, and {package.title} takes "
            f"{package.head_dims_in_words} on {platform.device}; leave attention_backend at auto."
        )
    logger.info("attention by %s", package.title)
    return package


def _head_dims(model: ModelConfig) -> frozenset[int]:
    """The sizes of the model's heads; empty where only the model's own code knows them."""
    from kvasir.models import registry

    if model.model_impl == "kvasir":
        return registry.find(model.hf).read_spec(model.hf).head_dims
    head_dim = model.hf.get("head_dim")
    return frozenset((head_dim,)) if isinstance(head_dim, int) else frozenset()


def _settle_threads(asked: DeviceConfig, workers: int, platform: platforms.Platform) -> DeviceConfig:
    if platform.kind != "cpu":
        if asked.cpu_threads is not None or asked.cpu_bind is not None:
            raise ConfigError(f"cpu_threads and cpu_bind are for device='cpu'; the device is {platform.device}.")
        return asked
    cpus = len(parse_cpus(asked.cpu_bind)) if asked.cpu_bind is not None else usable_cpus()
    if asked.cpu_threads is not None:
        if asked.cpu_bind is not None and asked.cpu_threads * workers > cpus:
            several = f" for each of {workers} workers" if workers > 1 else ""
            raise ConfigError(f"cpu_threads={asked.cpu_threads}{several} are more than the {cpus} CPUs of cpu_bind.")
        return asked
    threads = max(1, cpus // workers)
    _say("cpu_threads", threads, f"{cpus} CPUs for {workers} workers" if workers > 1 else "the CPUs it may use")
    return replace(asked, cpu_threads=threads)


def _refuse_what_needs_the_library(asked: EngineConfig, model: ModelConfig, device: DeviceConfig) -> None:
    """Quantized weights and caches are the CPU library's."""
    wishes = {
        "quantization": asked.model.quantization,
        "kv_cache_dtype": "int8" if asked.cache.kv_cache_dtype == "int8" else None,
        "packed_weights_dir": asked.load.packed_weights_dir,
    }
    for name, value in wishes.items():
        if value in (None, "none"):
            continue
        if model.model_impl == "transformers":
            raise ConfigError(_not_through_transformers(name, value, asked.model.model_impl, model.hf))
        if device.attention_backend != "cpu":
            raise ConfigError(
                f"{name}={value!r} runs on the CPU, in bfloat16, with our C++ library (attention_backend='cpu'); here "
                f"the device is {device.device} and the backend {device.attention_backend}. Leave {name} unset."
            )


def _not_through_transformers(name: str, value: str, asked_impl: str, hf: dict[str, Any]) -> str:
    needs = f"{name}={value!r} needs a model that Kvasir runs itself"
    if asked_impl == "transformers":
        return f"{needs}, and model_impl='transformers' has transformers run it; leave one of the two unset."
    architecture = ", ".join(hf.get("architectures") or ["this model"])
    return f"{needs}, and {architecture} has no spec here, so it runs through transformers; leave {name} unset."


def _quantization(asked: str | None, load: LoadConfig, device: DeviceConfig) -> str | None:
    """None where weights are as they are."""
    if asked == "gguf" and load.load_format != "gguf":
        raise ConfigError("quantization='gguf' is for GGUF files; choose int8 or int4, or leave it unset.")
    if asked is None and load.load_format == "gguf" and device.attention_backend == "cpu":
        _say("quantization", "gguf", "as the file has its weights")
        return "gguf"
    return None if asked == "none" else asked


def _say(name: str, value: object, why: str) -> None:
    logger.info("%s=%s (%s)", name, value, why)
