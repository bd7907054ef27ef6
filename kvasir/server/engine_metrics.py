"""Prometheus metrics that are read on demand: the engines' figures, the device's, and settings as labels. API process.

The device's utilization and memory come from NVML on NVIDIA GPUs and from /proc on the CPU, without torch: NVML is
called through its C library. Other devices have no such figures.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvasir.config.engine import EngineConfig
from kvasir.engine.stats import EngineStats
from kvasir.frontend.requests import metrics
from kvasir.frontend.requests.metrics import PREFIX
from kvasir.log import get_logger

logger = get_logger(__name__)


@dataclass(slots=True, frozen=True)
class DeviceUse:
    name: str
    utilization: float  # 0 to 1
    memory_used: int  # bytes
    memory_total: int


Probe = Callable[[], list[DeviceUse]]


def probe_for(device: str) -> Probe:
    """Return the probe of the device that the engine runs on; `device` is its resolved setting."""
    if device.startswith("cuda"):
        try:
            return NvmlProbe(visible_devices(device, os.environ.get("CUDA_VISIBLE_DEVICES")))
        except OSError as error:
            logger.warning("the metrics have no GPU figures: %s", error)
    elif device == "cpu" and Path("/proc/stat").exists():
        return CpuProbe()
    return list


def visible_devices(device: str, variable: str | None) -> list[str] | None:
    """Return numbers or UUIDs of the GPUs that the engine may use; None if it may use all."""
    names = None if variable is None else [name.strip() for name in variable.split(",") if name.strip()]
    _, _, number = device.partition(":")
    if not number:
        return names
    return [number] if names is None else names[int(number) : int(number) + 1]


class CpuProbe:
    """Probe of the whole machine: share of CPU time since the last call, memory that is not available."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._times()

    def __call__(self) -> list[DeviceUse]:
        busy, total = self._times()
        before_busy, before_total = self._last
        self._last = busy, total
        share = (busy - before_busy) / max(1, total - before_total)
        memory = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            memory[name] = int(value.split()[0]) * 1024
        used = memory["MemTotal"] - memory["MemAvailable"]
        return [DeviceUse("cpu", min(1.0, max(0.0, share)), used, memory["MemTotal"])]

    def _times(self) -> tuple[int, int]:
        fields = [int(field) for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]  # idle, and waiting for a disk
        return sum(fields) - idle, sum(fields)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlProbe:
    """Probe of NVIDIA GPUs. Raises OSError if the library is missing or does not start."""

    def __init__(self, devices: list[str] | None) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._nvml.nvmlInit_v2())
        self._handles = [(name, self._handle(name)) for name in (self._all() if devices is None else devices)]

    def __call__(self) -> list[DeviceUse]:
        return [self._probe(name, handle) for name, handle in self._handles]

    def _all(self) -> list[str]:
        count = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return [str(number) for number in range(count.value)]

    def _handle(self, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            self._check(self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle)))
        else:
            self._check(self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
        return handle

    def _probe(self, name: str, handle: ctypes.c_void_p) -> DeviceUse:
        use, memory = _Utilization(), _Memory()
        self._check(self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)))
        self._check(self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
        return DeviceUse(name, use.gpu / 100, memory.used, memory.total)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise OSError(f"NVML answered with error {code}")


# Help texts of the metrics that `metrics.read_metrics` returns.
HELP = {
    "num_requests_running": "Requests that are running.",
    "num_requests_waiting": "Requests in the queue.",
    "num_prompt_tokens_waiting": "Prompt tokens of requests in the queue.",
    "kv_cache_usage_perc": "Share of KV blocks in use; 1 means all.",
    "kv_cache_blocks": "KV blocks in total.",
    "kv_cache_blocks_used": "KV blocks held by requests.",
    "kv_cache_blocks_cached": "KV blocks in the prefix cache.",
    "host_cache_blocks": "KV blocks in host memory in total.",
    "host_cache_blocks_used": "Host blocks held for preempted requests.",
    "host_cache_blocks_cached": "Host blocks in the prefix cache.",
    "adapter_slots": "Places for adapters on the device.",
    "adapter_slots_used": "Places whose adapters requests use or wait for.",
    "adapter_loads": "Adapters brought to the device.",
    "adapter_evictions": "Adapters that gave their place to another.",
    "adapter_hits": "Requests whose adapter was on the device, or on its way there.",
    "cuda_graphs": "Captured CUDA graphs.",
    "cuda_graph_memory_bytes": "Device memory held by CUDA graphs.",
    "engine_steps": "Steps of the engine.",
    "generation_tokens": "Generated tokens, counted at every step; with those that no answer has: of completions that "
    "best_of or a beam search drops, and after a stop string.",
    "iteration_tokens_total": "Prompt tokens computed and tokens generated per step.",
    "num_requests_waiting_by_reason": "Requests in the queue by reason: capacity, or deferred, which no request is.",
    "engine_sleep_state": "1 for the state that the engine is in: always awake, as it has no sleep mode.",
    "kv_block_lifetime_seconds": "Seconds from the allocation of a cached KV block to its eviction.",
    "kv_block_idle_before_evict_seconds": "Seconds from the last use of a cached KV block to its eviction.",
    "kv_block_reuse_gap_seconds": "Seconds from the last use of a cached KV block to the next.",
    "num_preemptions": "Preemptions of requests.",
    "partial_prefills": "Times that a step prefilled only a part of a prompt.",
    "requests_refused": "Requests refused because the queue was full.",
    "admissions_held_back": "Steps in which the watermark kept a request in the queue.",
    "timeouts_waiting": "Requests that timed out in the queue.",
    "timeouts_running": "Requests that timed out while running.",
    "timeouts_foreseen": "Timed-out requests that were ended early because they could not meet their deadline.",
    "dropped_tokens": "Tokens sampled for requests that had already ended.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "kv_block_evictions": "Cached KV blocks evicted from the prefix cache.",
    "kv_block_copies": "Shared KV blocks copied before a write.",
    "kv_block_shares": "KV blocks shared by the completions of a request.",
    "kv_blocks_freed_by_window": "KV blocks freed because they left every layer's sliding window.",
    "num_preemptions_swapped": "Preemptions that swapped KV blocks to host memory.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "kv_blocks_swapped_out": "KV blocks of preempted requests swapped to host memory.",
    "kv_blocks_swapped_in": "KV blocks of preempted requests swapped back from host memory.",
    "kv_blocks_offloaded": "Evicted KV blocks copied to host memory.",
    "kv_blocks_restored": "Evicted KV blocks copied back from host memory.",
    "host_cache_evictions": "Cached host blocks evicted.",
    "host_cache_hits": "Prompt tokens found in host memory.",
    "guided_tokens": "Output tokens of requests with structured outputs.",
    "guided_passes": "Forward passes of such requests that computed a next token; by guided_tokens: passes per token.",
    "guided_steps": "Steps whose sampling waited for masks.",
    "guided_lenient": "Requests whose JSON schema has keywords that were skipped, because they cannot be enforced.",
    "guided_jumps": "Times that forced tokens were appended without a pass for each.",
    "guided_tokens_jumped": "Tokens appended so.",
    "guided_mask_seconds": "Seconds that steps spent on grammars: taking tokens in, jumps and masks.",
    "spec_decode_num_drafts": "Times that a request verified drafts in a step.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted drafts by their position in the draft; 0 is the first.",
    "spec_decode_rows_without_drafts": "Times that a request sampled a token and had no draft to verify.",
    "spec_decode_rows_paused": "Times that nothing was drafted for a request because it would not have paid.",
    "expert_tokens": "Tokens sent to a range of neighbouring experts of a layer; see expert_load_metrics.",
    "late_compilations": "Kernels compiled or loaded while requests waited. Should stay at zero.",
    "late_captures": "CUDA graphs captured while requests waited. Should stay at zero.",
    "queue_size": "Requests in the queue, under the name that autoscalers use.",
}

_REPLACED_BY_HISTOGRAM = f"{PREFIX}iteration_tokens"  # its total is the histogram's sum, and the names would clash


def engine_metrics(stats: Sequence[EngineStats], model_name: str) -> list[Metric]:
    """Metrics of all engines, labelled with each engine's number."""
    found: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}
    for engine, each in enumerate(stats):
        for metric in [*metrics.read_metrics(each, {}), metrics.Gauge(f"{PREFIX}queue_size", each.num_waiting)]:
            if metric.name == _REPLACED_BY_HISTOGRAM:
                continue
            family = found.get(metric.name)
            if family is None:
                words = HELP[metric.name.removeprefix(PREFIX)]
                names = ["model_name", "engine", *metric.labels]
                family = found[metric.name] = _kind(metric)(metric.name, words, labels=names)
            labels = [model_name, str(engine), *metric.labels.values()]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(metric, metrics.Histogram)
                family.add_metric(labels, list(metric.buckets.items()), metric.sum)
            else:
                family.add_metric(labels, metric.value)
    return list(found.values())


def _kind(metric: metrics.Metric) -> type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
    if isinstance(metric, metrics.Histogram):
        return HistogramMetricFamily
    return GaugeMetricFamily if isinstance(metric, metrics.Gauge) else CounterMetricFamily


def device_metrics(devices: Iterable[DeviceUse], model_name: str) -> list[Metric]:
    labels = ["model_name", "device"]
    busy = GaugeMetricFamily(
        f"{PREFIX}device_utilization", "Share of time in which the device is busy; 1 means always.", labels=labels
    )
    used = GaugeMetricFamily(f"{PREFIX}device_memory_used_bytes", "Device memory in use.", labels=labels)
    total = GaugeMetricFamily(f"{PREFIX}device_memory_total_bytes", "Device memory in total.", labels=labels)
    for each in devices:
        busy.add_metric([model_name, each.name], each.utilization)
        used.add_metric([model_name, each.name], each.memory_used)
        total.add_metric([model_name, each.name], each.memory_total)
    return [busy, used, total]


# Labels of vLLM's cache_config_info that are settings of features which this engine does not have.
_ABSENT = {
    "is_attention_free": False,
    "kv_cache_dtype_skip_layers": [],
    "kv_sharing_fast_prefill": False,
    "mamba_block_size": None,
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": None,
    "mamba_ssm_cache_dtype": "auto",
}


def cache_metric(config: EngineConfig, stats: Sequence[EngineStats]) -> Metric:
    """Make a metric of value 1 for each engine whose labels are the settings and the size of its KV cache."""
    every = []
    for engine, each in enumerate(stats):
        num_tokens = each.num_blocks * config.cache.block_size
        labels = {
            **asdict(config.cache),
            **_ABSENT,
            "cache_dtype": config.cache.kv_cache_dtype,
            "kv_cache_max_concurrency": num_tokens / config.model.max_model_len,
            "kv_cache_size_tokens": num_tokens,
            "kv_offloading_backend": "native",
            "num_cpu_blocks": each.host_blocks,
            "num_gpu_blocks": each.num_blocks,
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": each.sliding_window,
            "engine": engine,
        }
        every.append({name: str(value) for name, value in labels.items()})
    found = GaugeMetricFamily(
        f"{PREFIX}cache_config_info",
        "Settings and size of the KV cache as labels: vLLM's and ours.",
        labels=list(every[0]),
    )
    for labelled in every:
        found.add_metric(list(labelled.values()), 1)
    return found
