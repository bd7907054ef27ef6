"""One device's share of the engine: loads the model, sizes and takes the KV cache, runs steps. An `Executor`.

Imports torch, so only the worker process may import this module.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvasir import kernels
from kvasir.config import startup
from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.config.speculative import read_speculative
from kvasir.errors import ConfigError, DeviceMemoryError
from kvasir.kernels.cpu import library
from kvasir.layers.mesh import Mesh
from kvasir.log import get_logger
from kvasir.lora.device import Adapters
from kvasir.messages import AdapterTargets, DeviceMemory, KVSpec, Resource, SampleInputs, StepCosts, StepPlan
from kvasir.models.draft_checkpoints import load_draft_head
from kvasir.models.loader import load
from kvasir.models.native import LibraryModel
from kvasir.models.transformer import Transformer
from kvasir.platforms import select
from kvasir.platforms.limits import parse_cpus, share
from kvasir.sampling.features import RowFeature
from kvasir.worker.expert_load import expert_load_of
from kvasir.worker.memory import (
    KVMemory,
    Profile,
    expected_graphs,
    is_out_of_memory,
    kv_share,
    refuse_more_than_is_free,
    staging_bytes,
)
from kvasir.worker.model_runner import DeviceResult, Model, ModelRunner
from kvasir.worker.profiling import largest_step, measure_costs, measure_steps, pooling_steps, steps_to_compile
from kvasir.worker.prompt_embeddings import PromptEmbeddings, overlay_of
from kvasir.worker.speculative import draft_model, heads, lookup  # noqa: F401 - they register themselves
from kvasir.worker.speculative.drafter import DRAFTERS, Drafter, DrafterSettings, PassDrafter

logger = get_logger(__name__)
GIB = 1 << 30
HEADS_PER_SIZE = 4  # head graphs of each size: with and without filters, stages and the rest


def use_threads(config: EngineConfig, mesh: Mesh) -> Callable[[], None]:
    """Set the numbers of CPU threads of torch and of the CPU library, and the CPUs that they run on. Returns a function
    that restores the calling thread's CPUs.

    The library's threads are pinned. The calling thread, which computes too, is pinned only if cpu_bind is set. torch's
    threads sleep while the library's work, so both have as many as were asked for.
    """
    threads = config.device.cpu_threads
    assert threads is not None, "resolve settles it for the CPU"
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    cpus: list[int] | None = None
    restore: Callable[[], None] = _nothing
    if config.device.cpu_bind is not None:
        before = os.sched_getaffinity(0)
        cpus = share(parse_cpus(config.device.cpu_bind), mesh.rank, mesh.size)
        os.sched_setaffinity(0, cpus)
        restore = partial(os.sched_setaffinity, 0, before)
    elif mesh.size > 1 and hasattr(os, "sched_getaffinity"):
        cpus = share(sorted(os.sched_getaffinity(0)), mesh.rank, mesh.size)
    if library.library() is not None:  # it computes norms and samples with every attention backend
        library.configure(threads, cpus)
    return restore


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Give torch one thread during steps that the library computes. torch has little to do in them, and its other
    threads would spin for a while afterwards and slow down the library's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _nothing() -> None:
    return None


class Worker:
    def __init__(self, config: EngineConfig, mesh: Mesh | None = None) -> None:
        self.config, self._mesh = config, mesh
        self.platform = select(config.device.device)
        self.device = torch.device(config.device.device)
        self.kv_dtype = getattr(torch, config.cache.kv_dtype)
        self._give_cpus_back = use_threads(config, mesh or Mesh()) if self.device.type == "cpu" else None
        self.platform.release_memory()  # torch caches memory in pieces; a KV cache needs one large piece
        self._held_by_others = self.platform.memory_used()  # by other engines of this process
        kernels.expect_compilations()
        started = time.perf_counter()
        self.overlaps = self.device.type != "cpu"
        named = self.device.type == "cuda" and self.device.index is not None
        # Triton launches and events use the thread's current device, whichever device the tensors are on.
        self._here: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.cuda.device, self.device) if named else nullcontext
        )
        with startup.phase(startup.WEIGHTS), self._here():
            self.model: Model | None = load(config, self.device, mesh)
            self.drafter = self._make_drafter(mesh)
        self._expert_load = None
        if config.parallel.expert_load_metrics:
            whole = self.model.model if isinstance(self.model, LibraryModel) else self.model
            self._expert_load = expert_load_of(whole, self.device) if isinstance(whole, Transformer) else None
        self._step_threads = one_torch_thread if self.model.runs_in_cpu_library else nullcontext
        self.runner: ModelRunner | None = None
        self.adapters = self._make_adapters() if config.adapters.enable_lora else None
        self._precompiled = False
        self._num_ranks = 1 if mesh is None else mesh.size
        self._weight_bytes = self.model.weight_bytes()
        if self.drafter is not None:
            self._weight_bytes += self.drafter.weight_bytes()
        self._profile: Profile | None = None  # set by _prepare on GPUs
        logger.info(
            "loaded %s (%s, %s) in %.1f s",
            config.model.path, config.model.dtype, config.device.device, time.perf_counter() - started,
        )  # fmt: skip

    def _make_adapters(self) -> Adapters:
        model = self.model.model if isinstance(self.model, LibraryModel) else self.model
        assert isinstance(model, Transformer), "resolve refuses adapters for other models"
        ranks = 1 if self._mesh is None else self._mesh.size
        return Adapters(model, self.config, self.device, ranks)

    def adapter_targets(self) -> AdapterTargets | None:
        return None if self.adapters is None else self.adapters.targets

    def load(self, slot: int, resource: Resource) -> None:
        assert self.adapters is not None, "only an engine with adapters loads resources"
        with self._here():
            self.adapters.store.load(slot, resource)

    def finished_loads(self, seconds: float = 0.0) -> list[tuple[int, str | None]]:
        assert self.adapters is not None, "only an engine with adapters loads resources"
        return self.adapters.store.finished(seconds)

    def kv_spec(self) -> KVSpec:
        assert self.model is not None, "the worker is closed"
        spec = self.model.kv_spec(self.config.cache.block_size, self.kv_dtype)
        drafter = self.drafter
        return spec if drafter is None else replace(spec, draft_bytes=drafter.block_bytes)

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
        if self._profile is None or self.model is None or not self._uses_graphs():
            return 0
        from kvasir.worker.graph_keys import make_graph_keys

        scheduler, num_tokens = self.config.scheduler, int(self._largest_step().num_tokens.sum())
        sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.config.model.max_model_len
        has_cache = bool(self.kv_spec().windows)
        keys = make_graph_keys(has_cache, *sizes, self._num_drafts, self.adapters is not None)
        count = len(list(keys.forwards())) + HEADS_PER_SIZE * len(keys.head_sizes)
        if isinstance(self.drafter, PassDrafter):
            count += self.drafter.num_graphs * len(keys.sizes)
        largest, vocab = self._profile.largest_step, self.model.vocab_size
        return expected_graphs(count, max(keys.head_sizes, default=0), vocab, largest, num_tokens, keys.max_size)

    @property
    def _num_drafts(self) -> int:
        """Most drafts of a row in a step."""
        return 0 if self.drafter is None else self.drafter.num_drafts

    def _measure(self) -> Profile:
        """Run the largest step once and read the peak of memory."""
        platform = self.platform
        platform.reset_memory_peak()
        with startup.phase(startup.PROFILE):
            self._run_largest_step()
            platform.synchronize()
        peak = platform.memory_peak() - self._held_by_others
        gc.collect()
        platform.release_memory()
        total, free = platform.memory_bytes(), platform.memory_free()
        assert total is not None and free is not None, f"{platform.device} does not report its memory"
        # the driver's context, other processes, and other engines of this one
        others = total - free - (platform.memory_used() - self._held_by_others)
        return Profile(peak, max(0, peak - self._weight_bytes), others)

    def _precompile(self) -> None:
        """Compile every kernel that serving can launch, all at once."""
        if self._precompiled or not kernels.are_compiled(self.device):
            return
        self._precompiled = True
        few_layers = None if self.model is None else self.model.compile_copy()
        if few_layers is None:
            return
        with startup.phase(startup.KERNELS):
            if kernels.compile_listed(self._kernel_list()):
                return
        # The search ends before the context of `precompile` does, which compiles what was found.
        with startup.phase(startup.KERNELS), kernels.precompile(), startup.phase(startup.VARIANTS):
            runner = self._make_runner(num_blocks=1)
            runner.model = few_layers
            scheduler = self.config.scheduler
            sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.config.model.max_model_len
            tasks, has_graphs = self._tasks(), runner.graphs is not None
            steps = pooling_steps(*sizes, tasks) if tasks else steps_to_compile(*sizes, has_graphs=has_graphs)
            for step in steps:
                for changed in (False, True) if runner.may_change else (False,):
                    runner.execute(step, as_graph=False, as_changed=changed)
                    runner.sample().result()
            if runner.graphs is not None:
                runner.graphs.precompile(few_layers)
        del runner
        gc.collect()
        self.platform.release_memory()

    def _kernel_list(self) -> str:
        """Name all that the launched kernels depend on beside the code and the device."""
        config, model = self.config, self.model
        assert model is not None, "the worker is closed"
        sizes = (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.model.max_model_len)
        cache = (config.cache.block_size, config.cache.kv_dtype, config.cache.has_host_tier)
        shape = (config.model.dtype, config.model.logprobs_mode, self._num_ranks, self._uses_graphs())
        adapters = (config.adapters.enable_lora, config.adapters.max_loras, config.adapters.max_lora_rank)
        weights = (config.model.quantization, config.model.head_quantization)
        return f"{model.compile_key()} {weights} {sizes} {cache} {shape} {adapters} {self._drafter_key()}"

    def _drafter_key(self) -> str:
        return "" if self.drafter is None else f"{self.config.model.speculative_config} {self.drafter.compile_key()}"

    def _run_largest_step(self) -> ModelRunner:
        """Run the largest step kernel by kernel, even if it is small enough for a graph: there are none yet."""
        step = self._largest_step()
        what = f"The largest step, of {int(step.num_tokens.sum())} tokens for {len(step.rows)} requests,"
        with self._must_fit(what, "max_num_batched_tokens or max_num_seqs"):
            runner = self._make_runner(num_blocks=1)
            runner.execute(step, as_graph=False)
            runner.sample().result()
        return runner

    def _largest_step(self) -> StepPlan:
        scheduler = self.config.scheduler
        sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.config.model.max_model_len
        return largest_step(*sizes, next(iter(self._tasks()), None), self._num_drafts)

    def _tasks(self) -> tuple[str, ...]:
        """The tasks of a pooling model; none if it generates text."""
        return () if self.model is None else tuple(self.model.poolers)

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
                self.runner.graphs.pool.kept_free = self._profile.largest_step
            self._warm_up(self.runner)
        if self.device.type != "cpu":
            logger.info("memory of %s, %s", self.device, self.memory().describe())

    def _warm_up(self, runner: ModelRunner) -> None:
        """Capture all graphs. From here on nothing is compiled or captured."""
        if runner.graphs is not None:
            with startup.phase(startup.GRAPHS):
                runner.graphs.capture()
                self.platform.synchronize()
        if self._precompiled:
            kernels.keep_list(self._kernel_list())
        kernels.watch_compilations(self.device)

    def measure_costs(self) -> StepCosts:
        assert self.runner is not None, "allocate_kv comes first"
        with self._here():
            costs = measure_costs(self.runner, self.config.scheduler.max_num_batched_tokens)
        kernels.watch_compilations(self.device)  # swapping has kernels, too
        return costs

    def measure_steps(self) -> list[tuple[int, float]]:
        assert self.runner is not None, "allocate_kv comes first"
        with self._here(), startup.phase(startup.STEPS):
            if self.runner.graphs is not None and (times := self.runner.graphs.measure()):
                return times
            return measure_steps(self.runner, self.config.scheduler.max_num_batched_tokens)

    def memory(self) -> DeviceMemory:
        assert self.runner is not None, "allocate_kv comes first"
        return DeviceMemory(
            self.platform.memory_bytes(),
            self._weight_bytes,
            self.runner.kv_memory.pool.nbytes,
            None if self._profile is None else self._profile.largest_step,
            None if self._profile is None else self._profile.outside,
            0 if self.runner.graphs is None else self.runner.graphs.pool.taken,
            self._expected_graphs(),
        )

    def _uses_graphs(self) -> bool:
        drafter = self.drafter
        drafts_fit = drafter is None or drafter.capturable
        return not self.config.device.enforce_eager and self.model is not None and self.model.capturable and drafts_fit

    def _make_runner(self, num_blocks: int, num_host_blocks: int = 0) -> ModelRunner:
        assert self.model is not None, "the worker is closed"
        memory = KVMemory(self.kv_spec(), num_blocks, self.device)
        if memory.spec.windows:
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
            max_tokens=self.config.scheduler.max_num_batched_tokens,
            drafter=self.drafter,
            further=self._further_features(),
            expert_load=self._expert_load,
        )

    def _further_features(self) -> list[RowFeature]:
        """Features that change the model's forward pass."""
        found: list[RowFeature] = []
        if self.adapters is not None:
            found.append(self.adapters.feature(self.config.scheduler.max_num_seqs + 1))
        if self.config.model.enable_prompt_embeds:
            model = self.model.model if isinstance(self.model, LibraryModel) else self.model
            overlay = overlay_of(model, self.config.model.hf)
            found.append(PromptEmbeddings(overlay, getattr(torch, self.config.model.dtype), self.device))
        return found

    def _make_drafter(self, mesh: Mesh | None) -> Drafter | None:
        """Make the drafter that the settings ask for. One serves all runners of this worker."""
        config, settings = read_speculative(self.config.model.speculative_config), self.config
        if config is None:
            return None
        assert self.model is not None, "drafters are made for a model"
        model, draft = self.model, settings.model.draft
        load_draft: Callable[[], Any] | None = None
        if draft is not None:
            load_draft = partial(self._load_head if config.is_head else self._load_draft, draft, mesh)
        return DRAFTERS.find(config.method)(
            DrafterSettings(
                config,
                settings.scheduler.max_num_seqs + 1,
                settings.model.max_model_len,
                self.device,
                settings.cache.block_size,
                self.kv_dtype,
                model.kv_spec(settings.cache.block_size, self.kv_dtype).windows,
                load_draft,
                model.record,
            )
        )

    def _load_draft(self, draft: ModelConfig, mesh: Mesh | None) -> Model:
        is_gguf = Path(draft.path).is_file()
        load_format = "dummy" if self.config.load.load_format == "dummy" else "gguf" if is_gguf else "safetensors"
        quantization = self.config.model.quantization
        if self.config.device.attention_backend == "cpu" and (is_gguf or quantization == "gguf"):
            quantization = "gguf" if is_gguf else None
        asked = replace(
            self.config,
            model=replace(draft, quantization=quantization),
            load=replace(self.config.load, load_format=load_format),
        )
        return load(asked, self.device, mesh)

    def _load_head(self, draft: ModelConfig, mesh: Mesh | None) -> Any:
        assert isinstance(self.model, Transformer | LibraryModel), "resolve refuses heads for other models"
        drafting = read_speculative(self.config.model.speculative_config)
        assert drafting is not None, "a head is loaded to draft"
        return load_draft_head(replace(self.config, model=draft), drafting.method, self.device, self.model)

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
        if self.adapters is not None:
            self.adapters.store.close()
        self.adapters = None
        if self.runner is not None:
            self.runner.host_memory.close()
        self.runner = self.model = self.drafter = None
        if self._give_cpus_back is not None:
            self._give_cpus_back()
            self._give_cpus_back = None
        gc.collect()
        self.platform.release_memory()
