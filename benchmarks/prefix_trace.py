"""Measures prefix cache hits on a real trace: with device blocks alone, and with a tier in host memory.

    python benchmarks/prefix_trace.py TRACE.jsonl... [--device-gib 100] [--host-gib 0 100 200 ...] [--json FILE]

Replays a Mooncake trace (a line per request: timestamp, input_length, output_length and hash_ids, which identify blocks
of 512 prompt tokens by their content and everything before it) through the real cache manager and host tier, in order
of arrival and with a fixed number of requests holding their blocks at once. No model runs: hits do not depend on one.
Sizes are in GiB of a model's KV cache. Generated text takes room while its request runs and is never found later,
because the trace does not identify it. Needs numpy only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # run it from a checkout without installing

from kvasir.bench.report import commit, hardware, table
from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.cache.tier import FixedSwapPolicy, HostTier

BLOCK = 512  # tokens per hash id
KIB_PER_TOKEN = 128  # Llama-3.1-8B in bf16: 32 layers x 8 heads x 128 x 2 x 2 bytes
GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    num_tokens: int
    num_generated: int
    names: list[bytes]  # of full blocks


@dataclass(frozen=True)
class Figure:
    trace: str
    device_gib: float
    host_gib: float
    hit_rate: float  # of prompt tokens
    ideal: float  # with a cache that forgets nothing
    from_host: float  # of prompt tokens, found only there
    offloaded_gib: float
    restored_gib: float
    seconds: float


def read(path: Path) -> list[Entry]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [
        Entry(
            line["input_length"],
            line["output_length"],
            [number.to_bytes(32, "big") for number in line["hash_ids"][: line["input_length"] // BLOCK]],
        )
        for line in sorted(lines, key=lambda line: line["timestamp"])
    ]


def ideal(entries: Sequence[Entry]) -> float:
    """The share of prompt tokens that some earlier request had, in full blocks; a prompt's last token is computed."""
    seen: set[bytes] = set()
    hits = 0
    for entry in entries:
        usable = entry.names[: (entry.num_tokens - 1) // BLOCK]
        hits += BLOCK * next((i for i, name in enumerate(usable) if name not in seen), len(usable))
        seen.update(entry.names)
    return hits / sum(entry.num_tokens for entry in entries)


class Replay:
    """Requests go through the cache one after the other; the last few hold their blocks."""

    def __init__(self, entries: Sequence[Entry], device_blocks: int, host_blocks: int, running: int) -> None:
        longest = max(entry.num_tokens + entry.num_generated for entry in entries)
        tier = HostTier(0, host_blocks, FixedSwapPolicy(False)) if host_blocks else None
        self.cache = KVCacheManager(device_blocks, BLOCK, running, longest, True, tier=tier)
        self._nothing = np.zeros(longest, np.int32)  # names stand for tokens, so only their number counts
        self._free = list(range(running))
        self._running: deque[tuple[int, int]] = deque()  # row, prompt tokens
        for entry in entries:
            self._run(entry)

    def _run(self, entry: Entry) -> None:
        cache, total = self.cache, entry.num_tokens + entry.num_generated
        tokens = self._nothing[: entry.num_tokens]
        while True:
            prefix = cache.find_prefix(tokens, entry.names, b"")
            needed = cache.blocks_for(total) - cache.blocks_for(prefix.num_tokens)
            if self._free and needed <= cache.num_free_without(prefix):
                break
            self._end_oldest()
        row = self._free.pop()
        cache.open(row, prefix, entry.names, b"", entry.num_tokens)
        ready = cache.prepare(np.array([row]), np.array([prefix.num_tokens]), np.array([total - prefix.num_tokens]))
        assert ready, "blocks were counted as free and are not"
        cache.commit(row, tokens)
        cache.take_changes()
        cache.tier.take_copies()  # a step
        self._running.append((row, entry.num_tokens))

    def _end_oldest(self) -> None:
        row, num_tokens = self._running.popleft()
        self.cache.close(row, self._nothing[:num_tokens])
        self._free.append(row)


def measure(path: Path, device_gib: float, host_gib: float, running: int, kib_per_token: float) -> Figure:
    entries = read(path)
    blocks_per_gib = GIB / (BLOCK * kib_per_token * 1024)
    started = time.perf_counter()
    cache = Replay(entries, int(device_gib * blocks_per_gib) + 1, int(host_gib * blocks_per_gib), running).cache
    return Figure(
        path.stem,
        device_gib,
        host_gib,
        cache.stats.prefix_cache_hits / cache.stats.prefix_cache_queries,
        ideal(entries),
        cache.stats.host_cache_hits / cache.stats.prefix_cache_queries,
        cache.tier.stats.offloaded_blocks / blocks_per_gib,
        cache.tier.stats.restored_blocks / blocks_per_gib,
        time.perf_counter() - started,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE.jsonl")
    parser.add_argument("--device-gib", type=float, default=100)
    parser.add_argument("--host-gib", type=float, nargs="+", default=[0, 100, 200, 400, 800, 1600])
    parser.add_argument("--running", type=int, default=16, help="requests that hold blocks at once (default: 16)")
    parser.add_argument("--kib-per-token", type=float, default=KIB_PER_TOKEN, help="default: 128, Llama-3.1-8B in bf16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    figures = [
        measure(path, asked.device_gib, host, asked.running, asked.kib_per_token)
        for path in asked.traces
        for host in asked.host_gib
    ]
    print(
        f"{asked.running} requests at once, {asked.kib_per_token:g} KiB per token; commit {commit() or 'no checkout'}\n"
    )
    rows = [
        [
            f.trace, f"{f.device_gib:g}", f"{f.host_gib:g}", f"{f.hit_rate:.1%}", f"{f.hit_rate / f.ideal:.0%}",
            f"{f.from_host:.1%}", f"{f.offloaded_gib:.0f}", f"{f.restored_gib:.0f}",
        ]
        for f in figures
    ]  # fmt: skip
    head = ["trace", "device GiB", "host GiB", "hit rate", "of the ideal", "from host", "GiB out", "GiB in"]
    print(table(head, rows))
    for path in asked.traces:
        print(f"\n{path.stem}: {len(read(path))} requests, ideal {ideal(read(path)):.1%}")
    if asked.json:
        record = {"hardware": hardware("cpu"), "commit": commit(), "figures": [asdict(f) for f in figures]}
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
