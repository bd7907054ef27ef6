"""Times the sampling kernels alone: what filters cost beside a plain draw. Run on a GPU:

    PYTHONPATH=. python benchmarks/h200/sampling_kernels.py [--vocab 151936] [--dtype bfloat16]

Medians over replays of a CUDA graph of several calls, in microseconds a call. "flat" lines are those of random weights,
"peaked" ones look like a language model's: a few likely tokens and a long tail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # run it from a checkout without installing

from kvasir.kernels.triton.draw import draw
from kvasir.kernels.triton.filter_threshold import filter_threshold

FILTERS = {  # top-k, top-p, min-p
    "top-p 0.95": (0, 0.95, 0.0),
    "top-k 50": (50, 1.0, 0.0),
    "min-p 0.05": (0, 1.0, 0.05),
    "all": (50, 0.95, 0.05),
}
CALLS = 20  # per graph


def microseconds(call: Callable[[], object], replays: int = 15) -> float:
    """Of one call, from replays of a graph of CALLS of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return median(times)


def lines_of(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(rows, vocab, device="cuda")
    if kind == "flat":
        return (logits * 0.6).to(dtype)
    logits = logits * 2.5
    likely = torch.randint(vocab, (rows, 20), device="cuda")
    return logits.scatter_add(1, likely, 8 * torch.rand(rows, 20, device="cuda") + 6).to(dtype)


def time_row(rows: int, kind: str, vocab: int, dtype: torch.dtype) -> list[float]:
    """Plain draw, then the threshold and the filtered draw together for each filter."""
    logits = lines_of(kind, rows, vocab, dtype)
    own = positions = torch.arange(rows, device="cuda")
    heat = torch.ones(rows, device="cuda")
    seeds, next_token = torch.zeros(2, rows, dtype=torch.int32, device="cuda")
    times = [microseconds(lambda: draw(logits, own, positions, heat, seeds, next_token))]
    for k, p, m in FILTERS.values():
        top_k = torch.full((rows,), k, dtype=torch.int32, device="cuda")
        top_p, min_p = torch.full((rows,), p, device="cuda"), torch.full((rows,), m, device="cuda")

        def both(min_p: torch.Tensor = min_p, top_k: torch.Tensor = top_k, top_p: torch.Tensor = top_p) -> None:
            threshold = filter_threshold(logits, own, heat, min_p, top_k, top_p)
            draw(logits, own, positions, heat, seeds, next_token, threshold)

        times.append(microseconds(both))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, {args.vocab} logits, {args.dtype}, us a call")
    print("| rows | lines | " + " | ".join(["draw", *(f"{name} + draw" for name in FILTERS)]) + " |")
    print("|---" * (3 + len(FILTERS)) + "|")
    for rows in args.rows:
        for kind in ("peaked", "flat"):
            times = time_row(rows, kind, args.vocab, getattr(torch, args.dtype))
            print(f"| {rows} | {kind} | " + " | ".join(f"{us:.1f}" for us in times) + " |", flush=True)


if __name__ == "__main__":
    main()
