"""One device's share of the engine: loads the model, sizes and takes the KV cache, runs steps. See executor/base.py.

Imports torch, so only the worker process may import this module.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from kvasir import kernels
from kvasir.config import startup
from kvasir.config.engine import EngineConfig
from kvasir.distributed.mesh import Mesh
from kvasir.errors import ConfigError, DeviceMemoryError
from kvasir.log import get_logger
from kvasir.messages import DeviceMemory, KVSpec, SampleInputs, StepCosts, StepPlan
from kvasir.models.loader import load
from kvasir.platforms import select
from kvasir.worker.cpu_threads import one_torch_thread, use_threads
from kvasir.worker.kv_memory import KVMemory, staging_bytes
from kvasir.worker.memory_budget import Profile, expected_graphs, is_out_of_memory, kv_share, refuse_more_than_is_free
from kvasir.worker.model import Model
from kvasir.worker.model_runner import ModelRunner
from kvasir.worker.profiling import largest_step, measure_costs
from kvasir.worker.step_result import DeviceResult

logger = get_logger(__name__)
GIB = 1 << 30


class Worker:
    def __init__(self, config: EngineConfig, mesh: Mesh | None = None) -> None:
        self.config = config
        self.platform = select(config.device.device)
        self.device = torch.device(config.device.device)
        self.kv_dtype = getattr(torch, config.cache.kv_dtype)
        self._give_cpus_back = use_threads(config, mesh or Mesh()) if self.device.type == "cpu" else None
        self.platform.release_memory()  # torch caches memory in pieces; a KV cache needs one large piece
        started = time.perf_counter()
        self.overlaps = self.device.type != "cpu"
        named = self.device.type == "cuda" and self.device.index is not None
        # Triton launches and events use the thread's current device, whichever device the tensors are on.
        self._here: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.cuda.device, self.device) if named else nullcontext
        )
        with startup.phase(startup.WEIGHTS), self._here():
            self.model: Model | None = load(config, self.device, mesh)
        self._step_threads = one_torch_thread if self.model.runs_in_cpu_library else nullcontext
        self.runner: ModelRunner | None = None
        self._precompiled = False
        self._num_ranks = 1 if mesh is None else mesh.size
        self._weight_bytes = self.model.weight_bytes()
        self._profile: Profile | None = None  # set by _prepare on GPUs
        logger.info(
            "loaded %s (%s, %s) in %.1f s",
            config.model.path, config.model.dtype, config.device.device, time.perf_counter() - started,
        )  # fmt: skip

    def kv_spec(self) -> KVSpec:
        assert self.model is not None, "the worker is closed"
        return self.model.kv_spec(self.config.cache.block_size, self.kv_dtype)

    def available_kv_bytes(self) -> int:
        """Bytes for the KV cache: those of the settings, or what is left after weights and the largest step."""
        cache = self.config.cache
        with self._here():
            self._prepare()
            wanted = cache.kv_cache_memory_bytes
            if wanted is not None:
                self._check_cache_size(wanted, "kv_cache_memory_bytes", wanted)
                return wanted
            if self._profile is None:
                return self.platform.default_kv_bytes()
            total = self.platform.memory_bytes()
            assert total is not None, "memory was measured, so the platform reports its size"
            available = kv_share(total, cache.gpu_memory_utilization, self._profile, self._expected_graphs())
            return available - (staging_bytes(available, self.kv_spec().block_bytes) if cache.has_host_tier else 0)

    def _prepare(self) -> None:
        """Compile kernels and measure memory, which must happen before the KV cache is taken. Runs once."""
        self._precompile()
        if self._profile is None and self.platform.kind in ("cuda", "xpu"):
            self._profile = self._measure()

    def _check_cache_size(self, size: int, setting: str, value: int) -> None:
        """Raise a ConfigError if a cache of this size leaves no room for the largest step."""
        staging = staging_bytes(size, self.kv_spec().block_bytes) if self.config.cache.has_host_tier else 0
        step = 0 if self._profile is None else self._profile.largest_step
        refuse_more_than_is_free(size, setting, value, self.platform.memory_free(), step + staging)

    def _expected_graphs(self) -> int:
        if self._profile is None or not self._uses_graphs():
            return 0
        return expected_graphs(self._profile.largest_step, int(self._largest_step().num_tokens.sum()))

    def _measure(self) -> Profile:
        """Run the largest step once and read the peak of memory."""
        platform = self.platform
        platform.reset_memory_peak()
        with startup.phase(startup.PROFILE):
            self._run_largest_step()
            platform.synchronize()
        peak = platform.memory_peak()
        gc.collect()
        platform.release_memory()
        total, free = platform.memory_bytes(), platform.memory_free()
        assert total is not None and free is not None, f"{platform.device} does not report its memory"
        others = total - free - platform.memory_used()  # the driver's context, and other processes
        return Profile(peak, max(0, peak - self._weight_bytes), others)

    def _precompile(self) -> None:
        """Compile the kernels of the largest step and of a first request, all at once."""
        if self._precompiled or not kernels.are_compiled(self.device):
            return
        self._precompiled = True
        if self.model is None or self.model.compile_copy() is None:
            return
        with startup.phase(startup.KERNELS), kernels.precompile():
            runner = self._run_largest_step()
            if runner.graphs is not None:
                runner.graphs.precompile(self._largest_step())
        del runner
        gc.collect()
        self.platform.release_memory()

    def _run_largest_step(self) -> ModelRunner:
        """Runs kernel by kernel, even if the step is small enough for a graph: while kernels are precompiled, a graph
        would be captured without those that are missing, and a measured step must not include what graphs keep."""
        step = self._largest_step()
        what = f"The largest step, of {int(step.num_tokens.sum())} tokens for {len(step.rows)} requests,"
        with self._must_fit(what, "max_num_batched_tokens or max_num_seqs"):
            runner = self._make_runner(num_blocks=1)
            runner.execute(step, as_graph=False)
            runner.sample().result()
        return runner

    def _largest_step(self) -> StepPlan:
        scheduler = self.config.scheduler
        return largest_step(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.config.model.max_model_len)

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        override = self.config.cache.num_gpu_blocks_override
        with self._here():
            self._prepare()
            if override is not None:
                size = num_blocks * self.kv_spec().block_bytes
                self._check_cache_size(size, "num_gpu_blocks_override", override)
            self.runner = self._make_runner(num_blocks, num_host_blocks)
            # With several ranks no rank may go without a graph that the others capture.
            if self.runner.graphs is not None and self._profile is not None and self._num_ranks == 1:
                self.runner.graphs.cache.pool.memory.kept_free = self._profile.largest_step
        if self.device.type != "cpu":
            logger.info("memory of %s, %s", self.device, self.memory().describe())

    def measure_costs(self) -> StepCosts:
        assert self.runner is not None, "allocate_kv comes first"
        with self._here():
            return measure_costs(self.runner, self.config.scheduler.max_num_batched_tokens)

    def memory(self) -> DeviceMemory:
        assert self.runner is not None, "allocate_kv comes first"
        return DeviceMemory(
            self.platform.memory_bytes(),
            self._weight_bytes,
            self.runner.kv_memory.pool.nbytes,
            None if self._profile is None else self._profile.largest_step,
            None if self._profile is None else self._profile.outside,
            0 if self.runner.graphs is None else self.runner.graphs.cache.pool.memory.taken,
            self._expected_graphs(),
        )

    def _uses_graphs(self) -> bool:
        return not self.config.device.enforce_eager and self.model is not None and self.model.capturable

    def _make_runner(self, num_blocks: int, num_host_blocks: int = 0) -> ModelRunner:
        assert self.model is not None, "the worker is closed"
        memory = KVMemory(self.kv_spec(), num_blocks, self.device)
        page_shape = self.model.page_shape(memory.spec.block_size, self.kv_dtype)
        self.model.bind_kv(memory.views(page_shape, self.kv_dtype))
        return ModelRunner(
            self.model,
            memory,
            self.config.scheduler.max_num_seqs,
            self.config.model.max_model_len,
            self.device,
            use_graphs=self._uses_graphs(),
            logprobs_mode=self.config.model.logprobs_mode,
            num_host_blocks=num_host_blocks,
            num_ranks=self._num_ranks,
        )

    def execute(self, plan: StepPlan) -> None:
        assert self.runner is not None, "allocate_kv comes before the first step"
        with self._here(), self._memory_errors(), self._step_threads():
            self.runner.execute(plan)

    def sample(self, inputs: SampleInputs | None = None) -> DeviceResult:
        assert self.runner is not None, "allocate_kv comes before the first step"
        with self._here(), self._memory_errors(), self._step_threads():
            return self.runner.sample(inputs)

    @contextmanager
    def _must_fit(self, what: str, settings: str) -> Iterator[None]:
        """Turn an out-of-memory error into a ConfigError that names the settings to lower."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.platform.release_memory()
            free = self.platform.memory_free()
            there = "" if free is None else f", with {free / GIB:.1f} GiB free on {self.device}"
            raise ConfigError(
                f"{what} does not fit beside {self._weight_bytes / GIB:.1f} GiB of weights{there}: lower {settings}."
            ) from error

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Report a step that ran out of memory as DeviceMemoryError, so that the core can retry a smaller one. Not with
        several ranks, where others wait in the middle of the step."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error) or self._num_ranks > 1:
                raise
            self.platform.release_memory()
            raise DeviceMemoryError(str(error)) from error

    def close(self) -> None:
        if self.runner is not None:
            self.runner.host_memory.close()
        self.runner = self.model = None
        if self._give_cpus_back is not None:
            self._give_cpus_back()
            self._give_cpus_back = None
        gc.collect()
        self.platform.release_memory()
