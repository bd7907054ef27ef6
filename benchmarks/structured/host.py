"""Structured output: what the host does in a step of many constrained rows, without a model.

    python benchmarks/structured/host.py TOKENIZER_DIRECTORY --requests 64,256 --threads 14

The device is a fake that takes `--step-ms` and samples random allowed tokens. Each mode (`free`, `masks`, `jumps`) runs
a batch of `records` (see run.py). What counts is CPU time, which other work on the machine hardly disturbs:

    serial      of the core's thread per row and step, without the fake's own; it must fit a step beside all else
    guides      the part of it that the mode adds to `free`
    parallel    of the threads that compute masks, per row and step; `--threads` of them share it

and as a small model of a step on a machine with that many cores: serial + parallel / threads, beside `--step-ms`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
from run import RECORDS

from kvasir.engine.build import build_core
from kvasir.engine.grammar_guide import GRAMMAR_GUIDE, GrammarGuides, guide_argument
from kvasir.executor.fake import DelayExecutor, FakeFuture, fake_config
from kvasir.frontend.requests.structured import grammar_tokenizer
from kvasir.frontend.text.grammar import build_grammar
from kvasir.messages import EngineRequest, SampleInputs
from kvasir.sampling_params import StructuredOutputsParams


class RandomDevice(DelayExecutor):
    """Samples any allowed token. Keeps the CPU time that this takes."""

    def __init__(self, block_size: int, delay: float, vocab_size: int) -> None:
        super().__init__(block_size, delay)
        self.rng = np.random.default_rng(0)
        self.vocab_size = vocab_size
        self.cpu = 0.0
        self.num_steps = self.num_rows = 0

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        start = time.thread_time()
        future = super().sample(inputs)
        tokens = future.value.token_ids
        tokens[:, 0] = self.rng.integers(0, self.vocab_size, len(tokens))
        if inputs is not None:
            for line, mask in zip(inputs.mask_lines.tolist(), inputs.masks, strict=True):
                word = int(self.rng.choice(np.flatnonzero(mask)))
                bits = np.flatnonzero(np.unpackbits(mask[word : word + 1].view(np.uint8), bitorder="little"))
                tokens[line, 0] = 32 * word + int(self.rng.choice(bits))
            counts = future.value.counts
            counts[inputs.dropped_lines] = 0
        self.num_steps += 1
        self.num_rows += len(tokens)
        self.cpu += time.thread_time() - start
        return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[64, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2, help="that compute masks")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the fake device")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests that are constrained")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["free", "masks", "jumps"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = fake_config(
        vocab_size=options.vocab_size, max_model_len=1024, tokenizer=options.tokenizer,
        max_num_seqs=max(options.requests), max_num_batched_tokens=8192, enable_prefix_caching=False,
    )  # fmt: skip
    config = replace(config, model=replace(config.model, tokenizer=options.tokenizer))
    guides = GrammarGuides(lambda: grammar_tokenizer(config.model), options.vocab_size, options.threads)
    grammar = build_grammar(StructuredOutputsParams(json=RECORDS)).text
    for requests in options.requests:
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes}
        for turn in range(options.rounds + 1):
            for mode, runs in found.items():
                run = measure(config, guides, grammar, mode, requests, options)
                if turn:
                    runs.append(run)
        report(found, requests, options)


def measure(
    config: Any, guides: GrammarGuides, grammar: str, mode: str, requests: int, options: Any
) -> dict[str, float]:
    device = RandomDevice(config.cache.block_size, options.step_ms / 1e3, options.vocab_size)
    core = build_core(config, device)
    core.scheduler.guides.kinds[GRAMMAR_GUIDE] = guides
    guide = None if mode == "free" else (GRAMMAR_GUIDE, guide_argument(grammar, jumps=mode == "jumps"))
    for key in range(requests):
        own = guide if key < options.share * requests else None
        core.add(EngineRequest(key, np.arange(key, key + 12, dtype=np.int32), options.tokens, guide=own))
    while core.pending.requests or device.num_steps < 3:
        core.run_step()
    skipped, device.num_rows, device.num_steps, device.cpu = device.num_rows, 0, 0, 0.0
    stats = core.scheduler.guides.stats
    before = stats.mask_seconds, stats.guided_steps
    wall, own_cpu, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    while core.has_work():
        core.run_step()
    wall, own_cpu, cpu = time.perf_counter() - wall, time.thread_time() - own_cpu, time.process_time() - cpu
    assert skipped, "some steps are left out, in which grammars may be compiled"
    rows = device.num_rows
    return {
        "serial_us": 1e6 * (own_cpu - device.cpu) / rows,
        "parallel_us": 1e6 * (cpu - own_cpu) / rows,
        "step_ms": 1e3 * wall / device.num_steps,
        "guides_ms": 1e3 * (stats.mask_seconds - before[0]) / max(1, stats.guided_steps - before[1]),
        "rows": rows / device.num_steps,
        "tokens_per_row_step": requests * options.tokens / rows,
    }


def report(found: dict[str, list[dict[str, float]]], requests: int, options: Any) -> None:
    free = None
    for mode, runs in found.items():
        best = {name: round(min(run[name] for run in runs), 2) for name in runs[0]}  # load only adds
        free = best["serial_us"] if mode == "free" else free
        line: dict[str, Any] = {"requests": requests, "mode": mode, **best}
        if free is not None:
            line["guides_us"] = round(best["serial_us"] - free, 2)
        threads = options.threads
        line["model_ms"] = round(best["rows"] * (best["serial_us"] + best["parallel_us"] / threads) / 1e3, 2)
        print("RESULT " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
