"""How much longer 16 requests take on a CPU if they use 8 adapters, as a ratio measured in one run.

    python -m benchmarks.lora.cpu_ratio [MODEL]

Runs with and without adapters take turns, and the best of each counts, so that other work on the machine matters less.
CPU time depends still less on others; with several threads it includes their waiting, so set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.lora.adapters import make_adapters
from kvasir import LLM, LoRARequest, SamplingParams
from kvasir.models.hub import find_starter_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    more = {} if args.quantization is None else {"quantization": args.quantization}
    llm = LLM(
        str(args.model or find_starter_model()), device="cpu", enable_lora=True, max_loras=args.adapters,
        max_lora_rank=args.rank, max_model_len=512, enable_prefix_caching=False, **more,
    )  # fmt: skip
    targets = llm.llm_engine.client.call("resource_targets")
    with tempfile.TemporaryDirectory() as folder, llm:
        paths = make_adapters(targets, Path(folder), args.adapters, args.rank)
        requests = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
        chosen = {
            "none": [None] * args.requests,
            f"{args.adapters} adapters": [requests[i % len(requests)] for i in range(args.requests)],
        }
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(args.requests)]
        best: dict[str, tuple[float, float]] = {}
        for turn in range(args.rounds + 1):
            for name, adapters in chosen.items():
                began, used = time.perf_counter(), time.process_time()
                llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
                took = time.perf_counter() - began, time.process_time() - used
                if turn:  # the first turn loads the adapters
                    least = best.get(name, took)
                    best[name] = min(took[0], least[0]), min(took[1], least[1])
    base, adapted = best.values()
    for name, (took, used) in best.items():
        rate = args.requests * args.tokens / took
        print(
            f"{name:>12}: {took:.3f} s for {args.requests} requests of {args.tokens} tokens, {rate:.0f} tokens/s; "
            f"{used:.3f} s of CPU time"
        )
    print(f"ratio: {adapted[0] / base[0]:.3f}, of CPU time {adapted[1] / base[1]:.3f}")


if __name__ == "__main__":
    main()
