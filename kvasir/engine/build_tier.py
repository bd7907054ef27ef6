"""Sizes the tier in host memory and settles how preemption chooses. Core process."""

from __future__ import annotations

from kvasir.config import EngineConfig
from kvasir.engine.cache.costs import Always, CostModel, SwapChoice
from kvasir.engine.cache.host_tier import HostTier
from kvasir.engine.cache.tier import NoTier, Tier
from kvasir.errors import ConfigError
from kvasir.executor.base import Executor
from kvasir.log import get_logger
from kvasir.messages import KVSpec

logger = get_logger(__name__)
GIB = 1 << 30


def host_blocks(config: EngineConfig, spec: KVSpec) -> tuple[int, int]:
    """Blocks for swapping, and for evicted prefixes. Every device has its share of each block."""
    cache = config.cache
    share = cache.kv_offloading_size / config.parallel.tensor_parallel_size
    return (
        _count("swap_space", cache.swap_space, cache.swap_space, spec),
        _count("kv_offloading_size", cache.kv_offloading_size, share, spec),
    )


def _count(name: str, asked: float, per_device: float, spec: KVSpec) -> int:
    count = int(per_device * GIB) // spec.block_bytes
    if asked and not count:
        raise ConfigError(
            f"{name}={asked:g} GiB is less than one KV block of {spec.block_bytes / GIB:.4f} GiB; raise it, or leave "
            f"it at 0."
        )
    return count


def host_memory_blocks(swap_blocks: int, offload_blocks: int) -> int:
    """What the worker must hold: the tier's own null block is one of them."""
    return swap_blocks + offload_blocks + 1 if swap_blocks + offload_blocks else 0


def make_tier(config: EngineConfig, swap_blocks: int, offload_blocks: int, executor: Executor) -> Tier:
    if not swap_blocks + offload_blocks:
        return NoTier()
    logger.info("host memory: %d KV blocks for swapping, %d for evicted prefixes", swap_blocks, offload_blocks)
    return HostTier(swap_blocks, offload_blocks, _choice(config, swap_blocks, executor))


def _choice(config: EngineConfig, swap_blocks: int, executor: Executor) -> SwapChoice:
    mode = config.cache.preemption_mode
    if mode != "auto" or not swap_blocks:
        return Always(mode == "swap")
    costs = executor.measure_costs()
    logger.info(
        "preemption: moving a block takes %.0f us each way, computing its %d tokens %.0f us",
        costs.copy_block * 1e6, config.cache.block_size, costs.compute_token * config.cache.block_size * 1e6,
    )  # fmt: skip
    return CostModel(costs)
