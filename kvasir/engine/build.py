"""Builds the core: makes the executor, sizes the KV cache, makes the scheduler. Core process."""

from __future__ import annotations

from kvasir.config import startup
from kvasir.config.engine import EngineConfig
from kvasir.config.speculative import read_speculative
from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.cache.tier import CostSwapPolicy, FixedSwapPolicy, HostTier, NoTier, SwapPolicy, Tier
from kvasir.engine.core import EngineCore
from kvasir.engine.draft_lengths import DraftLengths
from kvasir.engine.guides import BUDGET_GUIDE, BudgetGuides
from kvasir.engine.policies import Context, Policy, make_policy
from kvasir.engine.queue import QueueLimits
from kvasir.engine.scheduler import Limits, Scheduler
from kvasir.engine.step_budget import StepBudget
from kvasir.errors import ConfigError
from kvasir.executor import Executor, load_worker
from kvasir.executor.multiproc import MultiprocExecutor
from kvasir.log import get_logger
from kvasir.messages import KVSpec

logger = get_logger(__name__)
GIB = 1 << 30


def build_core(config: EngineConfig, executor: Executor | None = None) -> EngineCore:
    policy = _policy(config)  # before the weights are loaded, so that a wrong setting is reported at once
    executor = executor or make_executor(config)
    try:
        with startup.phase(startup.KV_CACHE):
            num_blocks = count_blocks(config, executor)
            swap_blocks, offload_blocks = host_blocks(config, executor.kv_spec())
            executor.allocate_kv(num_blocks, host_memory_blocks(swap_blocks, offload_blocks))
            tier = make_tier(config, swap_blocks, offload_blocks, executor)
    except BaseException:
        executor.close()
        raise
    scheduler = make_scheduler(config, num_blocks, executor.kv_spec().windows, policy, tier)
    scheduler.step_budget = _step_budget(config, executor)
    lookahead = int(config.scheduler.async_scheduling)
    limits = QueueLimits(config.scheduler.max_queued_requests or 0, config.scheduler.max_queued_tokens or 0)
    core = EngineCore(scheduler, executor, lookahead, limits)
    drafting = read_speculative(config.model.speculative_config)
    if drafting is not None:
        core.observers.append(DraftLengths(scheduler, drafting.num_speculative_tokens, drafting.adaptive))
    return core


def _step_budget(config: EngineConfig, executor: Executor) -> StepBudget | None:
    """Measure steps and return their token budget; None if every step has up to max_num_batched_tokens."""
    target = config.scheduler.target_step_ms
    is_off = target == 0 or (target is None and config.device.device == "cpu")
    if is_off or not config.scheduler.enable_chunked_prefill:
        return None
    times = executor.measure_steps()
    if not times:
        return None
    budget = StepBudget(times, None if target is None else target / 1e3)
    logger.info(
        "Steps with prompts have %d tokens beside running requests, %d if many prompts wait (a step of single tokens "
        "takes %.1f ms; change with target_step_ms)", budget.small, budget.large, times[0][1] * 1e3,
    )  # fmt: skip
    return budget


def make_executor(config: EngineConfig) -> Executor:
    if config.parallel.distributed_executor_backend != "mp":
        return load_worker(config)
    with startup.phase(startup.WORKERS):
        return MultiprocExecutor(config)


def _policy(config: EngineConfig) -> Policy:
    settings = config.scheduler
    context = Context(
        aging_seconds=settings.priority_aging_seconds,
        aging_best=settings.priority_aging_best,
        default_deadline=settings.default_deadline,
        least_chance=settings.deadline_least_chance,
    )
    return make_policy(settings.scheduling_policy, context)


def make_scheduler(
    config: EngineConfig, num_blocks: int, windows: tuple[int | None, ...], policy: Policy, tier: Tier | None = None
) -> Scheduler:
    settings = config.scheduler
    max_model_len = config.model.max_model_len
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        watermark=settings.watermark,
        num_lookahead_tokens=_lookahead(config),
    )
    cache = KVCacheManager(
        num_blocks,
        config.cache.block_size,
        limits.max_num_seqs,
        max_model_len,
        config.cache.enable_prefix_caching,
        windows,
        tier,
    )
    adapters = config.adapters
    num_resources = adapters.max_loras if adapters.enable_lora else 0
    scheduler = Scheduler(limits, cache, policy, max_model_len, num_resources)
    scheduler.guides.kinds[BUDGET_GUIDE] = BudgetGuides(scheduler.guides)
    return scheduler


def _lookahead(config: EngineConfig) -> int:
    drafting = read_speculative(config.model.speculative_config)
    return 0 if drafting is None or config.model.draft is None else drafting.num_speculative_tokens


def count_blocks(config: EngineConfig, executor: Executor) -> int:
    """Number of KV cache blocks, with the null block. They must hold one request of max_model_len tokens."""
    spec = executor.kv_spec()
    if not spec.windows:
        executor.available_kv_bytes()  # what is prepared and measured on the way is needed without a cache, too
        logger.info("The model has no KV cache: every prompt is computed in one step")
        return 2  # the null block, and one that a pool must have
    longest = -(-config.model.max_model_len // spec.block_size) * len(spec.windows)
    limit = longest * config.scheduler.max_num_seqs + 1
    override = config.cache.num_gpu_blocks_override
    if override is not None:
        available = override * spec.block_bytes
        num_blocks = override
    else:
        available = executor.available_kv_bytes()
        num_blocks = min(available // spec.block_bytes, limit)
    if num_blocks < longest + 1:
        raise ConfigError(_too_small(config, spec, available, num_blocks))
    tokens = (num_blocks - 1) // len(spec.windows) * spec.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB; it holds %d tokens, or %.1f requests of max_model_len=%d",
        num_blocks, spec.block_size, num_blocks * spec.block_bytes / GIB, tokens,
        tokens / config.model.max_model_len, config.model.max_model_len,
    )  # fmt: skip
    return num_blocks


def _too_small(config: EngineConfig, spec: KVSpec, available: int, num_blocks: int) -> str:
    groups = len(spec.windows)
    needed = (-(-config.model.max_model_len // spec.block_size) * groups + 1) * spec.block_bytes
    fits = max(0, num_blocks - 1) // groups * spec.block_size
    lower = f"set max_model_len to {fits} or less, or " if fits else ""
    if config.cache.num_gpu_blocks_override is not None:
        raise_it = "raise num_gpu_blocks_override"
    elif config.cache.kv_cache_memory_bytes is not None:
        raise_it = "raise kv_cache_memory_bytes"
    elif config.device.device == "cpu":
        raise_it = "set kv_cache_memory_bytes to at least that much"
    else:
        raise_it = "raise gpu_memory_utilization, or lower max_num_seqs or max_num_batched_tokens"
    return (
        f"max_model_len={config.model.max_model_len} needs {_size(needed)} of KV cache, "
        f"but {_size(max(available, 0))} is available; {lower}{raise_it}"
    )


def _size(num_bytes: int) -> str:
    """A size in the largest unit that gives at least 1."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


# ---------------------------------------------------------------- the KV cache tier in host memory


def host_blocks(config: EngineConfig, spec: KVSpec) -> tuple[int, int]:
    """Number of blocks in host memory for swapping and for evicted prefixes. Each device holds its part of a block."""
    cache = config.cache
    share = cache.kv_offloading_size / config.parallel.tensor_parallel_size
    return (
        _count("swap_space", cache.swap_space, cache.swap_space, spec),
        _count("kv_offloading_size", cache.kv_offloading_size, share, spec),
    )


def _count(name: str, asked: float, per_device: float, spec: KVSpec) -> int:
    count = int(per_device * GIB) // spec.block_bytes if asked else 0
    if asked and not count:
        raise ConfigError(
            f"{name}={asked:g} GiB is less than one KV cache block of {spec.block_bytes / GIB:.4f} GiB; raise it, or "
            f"set it to 0."
        )
    return count


def host_memory_blocks(swap_blocks: int, offload_blocks: int) -> int:
    """Number of blocks that a worker allocates, with the null block of the tier."""
    return swap_blocks + offload_blocks + 1 if swap_blocks + offload_blocks else 0


def make_tier(config: EngineConfig, swap_blocks: int, offload_blocks: int, executor: Executor) -> Tier:
    if not swap_blocks + offload_blocks:
        return NoTier()
    logger.info("Host memory: %d KV cache blocks for swapping, %d for evicted prefixes", swap_blocks, offload_blocks)
    return HostTier(swap_blocks, offload_blocks, _swap_policy(config, swap_blocks, executor))


def _swap_policy(config: EngineConfig, swap_blocks: int, executor: Executor) -> SwapPolicy:
    mode = config.cache.preemption_mode
    if mode != "auto" or not swap_blocks:
        return FixedSwapPolicy(mode == "swap")
    costs = executor.measure_costs()
    logger.info(
        "Preemption: swapping a block takes %.0f us each way, recomputing its %d tokens %.0f us",
        costs.copy_block * 1e6, config.cache.block_size, costs.compute_token * config.cache.block_size * 1e6,
    )  # fmt: skip
    return CostSwapPolicy(costs)
