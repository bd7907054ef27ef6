"""One device's share of the engine: loads the model, sizes and takes the KV cache, runs steps. See executor/base.py.

Import this module only where the worker runs: it brings torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from kvasir import kernels, startup
from kvasir.config.engine import EngineConfig
from kvasir.distributed.mesh import Mesh
from kvasir.errors import ConfigError, DeviceMemoryError
from kvasir.log import get_logger
from kvasir.messages import DeviceMemory, Extras, KVSpec, NewRow, RowSampling, SampleInputs, StepCosts, StepPlan
from kvasir.models.loader import LoadedModel, load
from kvasir.models.native import LayerByLayer, NativeDecoder
from kvasir.models.transformer import Transformer
from kvasir.platforms import select
from kvasir.worker.cpu_threads import one_torch_thread, use_threads
from kvasir.worker.host_memory import staging_bytes
from kvasir.worker.kv_memory import KVMemory
from kvasir.worker.measure_costs import measure_costs
from kvasir.worker.memory_plan import Profile, expected_graphs, kv_share, refuse_more_than_is_free
from kvasir.worker.model_runner import ModelRunner
from kvasir.worker.out_of_memory import is_out_of_memory
from kvasir.worker.staging import DeviceResult

logger = get_logger(__name__)
GIB = 1 << 30


class Worker:
    def __init__(self, config: EngineConfig, mesh: Mesh | None = None) -> None:
        self.config = config
        self.platform = select(config.device.device)
        self.device = torch.device(config.device.device)
        self.kv_dtype = getattr(torch, config.cache.kv_dtype)
        self._give_cpus_back = use_threads(config, mesh or Mesh()) if self.device.type == "cpu" else None
        self.platform.release_memory()  # what is cached in pieces could not become a KV cache in one piece
        started = time.perf_counter()
        self.overlaps = self.device.type != "cpu"
        named = self.device.type == "cuda" and self.device.index is not None
        # Triton launches, and events are recorded, on the thread's current device, whatever the tensors' is.
        self._here: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.cuda.device, self.device) if named else nullcontext
        )
        with startup.phase(startup.WEIGHTS), self._here():
            self.model: LoadedModel | None = load(config, self.device, mesh)
        in_library = isinstance(self.model, NativeDecoder | LayerByLayer)
        self._step_threads = one_torch_thread if in_library else nullcontext
        self.runner: ModelRunner | None = None
        self._rehearsed = False
        self._num_ranks = 1 if mesh is None else mesh.size
        self._weight_bytes = _weight_bytes(self.model)
        self._profile: Profile | None = None  # until it is measured, which it is on GPUs
        logger.info(
            "loaded %s (%s, %s) in %.1f s",
            config.model.path, config.model.dtype, config.device.device, time.perf_counter() - started,
        )  # fmt: skip

    def kv_spec(self) -> KVSpec:
        assert self.model is not None, "the worker is closed"
        return self.model.kv_spec(self.config.cache.block_size, self.kv_dtype)

    def available_kv_bytes(self) -> int:
        """What the cache may take: as told, or what is left after weights and the largest step."""
        cache = self.config.cache
        with self._here():
            self._prepare()
            told = cache.kv_cache_memory_bytes
            if told is not None:
                self._refuse_a_cache_of(told, "kv_cache_memory_bytes", told)
                return told
            if self._profile is None:
                return self.platform.default_kv_bytes()
            total = self.platform.memory_bytes()
            assert total is not None, "memory was measured on a device that does not tell its own"
            available = kv_share(total, cache.gpu_memory_utilization, self._profile, self._expected_graphs())
            return available - (staging_bytes(available, self.kv_spec().block_bytes) if cache.has_host_tier else 0)

    def _prepare(self) -> None:
        """What comes before the KV cache is taken, whoever says its size. Does nothing a second time."""
        self._rehearse()
        if self._profile is None and self.platform.kind in ("cuda", "xpu"):
            self._profile = self._measure()

    def _refuse_a_cache_of(self, size: int, setting: str, value: int) -> None:
        staging = staging_bytes(size, self.kv_spec().block_bytes) if self.config.cache.has_host_tier else 0
        step = 0 if self._profile is None else self._profile.largest_step
        refuse_more_than_is_free(size, setting, value, self.platform.memory_free(), step + staging)

    def _expected_graphs(self) -> int:
        if self._profile is None or not self._uses_graphs():
            return 0
        return expected_graphs(self._profile.largest_step, int(self._largest_step().num_tokens.sum()))

    def _measure(self) -> Profile:
        """Run the largest step once and see how high memory went."""
        platform = self.platform
        platform.reset_memory_peak()
        with startup.phase(startup.PROFILE):
            self._run_largest_step()
            platform.synchronize()
        peak = platform.memory_peak()
        gc.collect()
        platform.release_memory()
        total, free = platform.memory_bytes(), platform.memory_free()
        assert total is not None and free is not None, f"{platform.device} does not tell its memory"
        others = total - free - platform.memory_used()  # the driver's context, and other processes
        return Profile(peak, max(0, peak - self._weight_bytes), others)

    def _rehearse(self) -> None:
        """Compile the kernels of the largest step and of a first request's, all at once; not for others' models, whose
        kernels may not be fit for it."""
        if self._rehearsed or not (kernels.are_compiled(self.device) and isinstance(self.model, Transformer)):
            return
        self._rehearsed = True
        with startup.phase(startup.KERNELS), kernels.rehearsal():
            runner = self._run_largest_step()
            if runner.graphs is not None:
                runner.graphs.rehearse(self._largest_step())
        del runner
        gc.collect()
        self.platform.release_memory()

    def _run_largest_step(self) -> ModelRunner:
        """Not as a graph, even if it is small enough for one: in a rehearsal that would be captured without the kernels
        that were put off, and where memory is measured, what graphs take is no part of a step."""
        step = self._largest_step()
        what = f"The largest step, of {int(step.num_tokens.sum())} tokens for {len(step.rows)} requests,"
        with self._refusing_what_does_not_fit(what, "max_num_batched_tokens or max_num_seqs"):
            runner = self._make_runner(num_blocks=1)
            runner.execute(step, as_graph=False)
            runner.sample().result()
        return runner

    def _largest_step(self) -> StepPlan:
        """All rows sample with every stage on, and the rest of the token budget is prompt."""
        scheduler, model_len = self.config.scheduler, self.config.model.max_model_len
        num_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        spare = scheduler.max_num_batched_tokens - num_rows
        lengths = np.ones(num_rows, np.int32)
        for row in range(num_rows - 1, -1, -1):
            lengths[row] += min(spare, model_len - 1)
            spare -= int(lengths[row]) - 1
        extras = Extras(1, presence_penalty=1.0, top_ema_p=0.9, top_ema_d=1)  # the stages that take most memory
        sampling = RowSampling(temperature=1.0, top_p=0.9, top_k=10, min_p=0.1, extras=extras)
        return StepPlan(
            rows=np.arange(num_rows, dtype=np.int32),
            num_tokens=lengths,
            samples=np.ones(num_rows, np.bool_),
            token_ids=np.zeros(int(lengths.sum()), np.int32),
            bounds=lengths,
            num_decodes=int((lengths == 1).sum()),
            new_rows=[NewRow(row, 0, sampling, np.zeros(1, np.int32)) for row in range(num_rows)],
            table_index=np.zeros(0, np.int32),
            table_block=np.zeros(0, np.int32),
            copies=np.zeros((0, 2), np.int32),
        )

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        override = self.config.cache.num_gpu_blocks_override
        with self._here():
            self._prepare()
            if override is not None:
                size = num_blocks * self.kv_spec().block_bytes
                self._refuse_a_cache_of(size, "num_gpu_blocks_override", override)
            self.runner = self._make_runner(num_blocks, num_host_blocks)
            # Not where other ranks capture the same: none could do without a graph alone.
            if self.runner.graphs is not None and self._profile is not None and self._num_ranks == 1:
                self.runner.graphs.pool.memory.kept_free = self._profile.largest_step
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
            0 if self.runner.graphs is None else self.runner.graphs.pool.memory.taken,
            self._expected_graphs(),
        )

    def _uses_graphs(self) -> bool:
        return (
            not self.config.device.enforce_eager
            and isinstance(self.model, Transformer)  # nobody knows whether others' code can be captured
            and self.model.backend.capturable
        )

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
    def _refusing_what_does_not_fit(self, what: str, settings: str) -> Iterator[None]:
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
        """A step that does not fit can be tried again, smaller; not where other ranks wait in the middle of it."""
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


def _weight_bytes(model: torch.nn.Module) -> int:
    """Parameters, buffers and packed matrices, each place in memory once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    packed = [getattr(module, "matrix", None) for module in model.modules()]
    tensors += [matrix.memory for matrix in packed if matrix is not None]
    # A tensor in oneDNN's own layout has no address.
    places = {id(tensor) if tensor.is_mkldnn else tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.element_size() * tensor.numel() for tensor in places.values())
