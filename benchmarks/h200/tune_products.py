"""Measures which blocks small products want on this GPU, and writes kvasir/kernels/triton/products.json.

    python benchmarks/h200/tune_products.py [--models qwen3-0.6b,llama-3.1-8b] [--only gemv,tile,parts] [--out FILE]
    python benchmarks/h200/tune_products.py --models path/to/model,Qwen/Qwen3-4B     a config.json, here or on the hub
    python benchmarks/h200/tune_products.py --shapes norm:6144x2560,add:2560x4096    kind, outputs, inputs

Each candidate is timed as a CUDA graph of many launches over copies of the matrix that do not fit the L2 cache, beside
cuBLAS; tiles are kept only where they gain two percent. Other devices' entries of the file stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from product_shapes import KNOWN, Product, parse, products_of  # noqa: E402

from kvasir.kernels.triton import add_rms_norm, gemv, linear_parts  # noqa: E402
from kvasir.kernels.triton import linear as products  # noqa: E402
from kvasir.kernels.triton.launch import precompile  # noqa: E402
from kvasir.kernels.triton.linear import COUNTS, tile_linear  # noqa: E402

# Rows of the matrix per program, columns per step, warps.
GEMV = [(1, 512, 1), (1, 1024, 2), (1, 1024, 4), (1, 2048, 4), (2, 512, 2), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4)]
GEMV += [(4, 512, 2), (4, 512, 4), (4, 1024, 4), (1, 256, 1), (2, 256, 1), (4, 256, 1), (2, 512, 1), (1, 1024, 8)]
GEMV += [(2, 2048, 8), (4, 2048, 8)]
# Rows of the matrix per tile, columns per step, warps, stages.
TILE = [(64, 64, 4, 5), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 8, 4), (128, 64, 4, 4), (128, 64, 8, 4)]
TILE += [(128, 128, 8, 3), (128, 64, 8, 5)]
PARTS = [(*blocks, split) for blocks in ((64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 5)) for split in (2, 4, 8)]
AT_ONCE = 200 << 20  # bytes of copies: several times the L2 cache
Run = Callable[[torch.Tensor], object]


def main() -> None:
    arguments = _parse()
    data = json.loads(products.DATA.read_text(encoding="utf-8")) if products.DATA.exists() else {}
    table: dict[str, list[int]] = data.setdefault(torch.cuda.get_device_name(), {})
    counts = [1] * ("gemv" in arguments.only) + list(COUNTS) * ("tile" in arguments.only)
    for product in wanted(arguments):
        measured = [tune(product.kind, product.rows, product.inner, counts, arguments.quick)]
        measured += (
            [tune_parts(product.rows, product.inner)] if product.leaves_parts and "parts" in arguments.only else []
        )
        for key, blocks, line in chain(*measured):
            print(line, flush=True)
            table.pop(key, None)
            if blocks is not None:
                table[key] = blocks
    lines = [
        f"  {json.dumps(device)}: {{\n"
        + ",\n".join(f"    {json.dumps(key)}: {json.dumps(blocks)}" for key, blocks in sorted(entries.items()))
        + "\n  }"
        for device, entries in sorted(data.items())
    ]
    arguments.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def wanted(arguments: argparse.Namespace) -> list[Product]:
    models = list(KNOWN) if arguments.models is None and not arguments.shapes else _listed(arguments.models)
    shapes = [parse(written) for written in _listed(arguments.shapes)]
    return list(dict.fromkeys([*chain(*map(products_of, models)), *shapes]))


def _listed(written: str | None) -> list[str]:
    return [part for part in (written or "").split(",") if part]


def tune(
    kind: str, rows: int, inner: int, counts: Sequence[int], quick: bool
) -> Iterator[tuple[str, list[int] | None, str]]:
    """Keys of products.json with the best blocks, or none where cuBLAS is better."""
    weights = _copies(rows, inner)
    for count in counts:
        if inner % (512 if count == 1 else 64):
            continue  # no kernel of ours takes it: see gemv.is_fit; TILE begins with 64 columns
        x = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(count, rows, device="cuda", dtype=torch.bfloat16)
        cublas = time_of(lambda w, x=x, y=y: torch.mm(x, w.t(), out=y), weights)
        if count == 1:
            key, candidates, run = products.gemv_key(kind, rows, inner), GEMV, gemv_run(kind, x, rows)
        else:
            key, candidates, run = products.tile_key(rows, inner, count), TILE, tile_run(x)
        usable = [blocks for blocks in candidates if inner % blocks[1] == 0]
        times = times_of(run, usable[::3] if quick else usable, weights)
        best = min(times, key=lambda blocks: times[blocks])
        gains = count == 1 or times[best] < 0.98 * cublas
        speed = rows * inner * 2 / times[best] / 1e6
        line = f"{key:34s} {times[best]:7.1f} us {speed:5.2f} TB/s {list(best)}, cuBLAS {cublas:7.1f} us"
        yield key, list(best) if gains else None, line + ("" if gains else " (kept)")


def tune_parts(rows: int, inner: int) -> Iterator[tuple[str, list[int] | None, str]]:
    """With the norm that follows, since it has to sum the parts."""
    weights = _copies(rows, inner)
    gain = torch.ones(rows, device="cuda", dtype=torch.bfloat16)
    for count in COUNTS:
        x = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)
        residual, y = torch.zeros(2, count, rows, device="cuda", dtype=torch.bfloat16)

        def whole(w: torch.Tensor, x: torch.Tensor = x, y: torch.Tensor = y, r: torch.Tensor = residual) -> None:
            add_rms_norm(torch.mm(x, w.t(), out=y), r, gain, 1e-6)

        def in_parts(blocks: list[int], x: torch.Tensor = x, r: torch.Tensor = residual) -> Run:
            return lambda w: add_rms_norm(linear_parts(x, w, blocks), r, gain, 1e-6)

        usable = [blocks for blocks in PARTS if inner % (blocks[1] * blocks[4]) == 0]
        if not usable:
            continue
        cublas = time_of(whole, weights)
        times = times_of(in_parts, usable, weights)
        best = min(times, key=lambda blocks: times[blocks])
        gains = times[best] < 0.98 * cublas
        key = products.parts_key(rows, inner, count)
        line = f"{key:34s} {times[best]:7.1f} us with norm {list(best)}, cuBLAS {cublas:7.1f} us"
        yield key, list(best) if gains else None, line + ("" if gains else " (kept)")


def _copies(rows: int, inner: int) -> list[torch.Tensor]:
    count = max(2, AT_ONCE // (rows * inner * 2))
    return [torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]


def gemv_run(kind: str, x: torch.Tensor, rows: int) -> Callable[[list[int]], Run]:
    gain, stream = torch.ones_like(x[0]), torch.zeros(1, rows, device="cuda", dtype=x.dtype)
    norm = {"gain": gain, "eps": 1e-6}
    how = {"plain": {}, "norm": norm, "add": {"add": stream}, "gated": {**norm, "gated": True}}[kind]
    return lambda blocks: lambda w: gemv(x, w, blocks=blocks, **how)


def tile_run(x: torch.Tensor) -> Callable[[list[int]], Run]:
    return lambda blocks: lambda w: tile_linear(x, w, None, blocks)


def times_of(
    run: Callable[[list[int]], Run], candidates: list[tuple[int, ...]], weights: list[torch.Tensor]
) -> dict[tuple[int, ...], float]:
    times = {}
    with suppress(OutOfResources), precompile():
        for blocks in candidates:
            run(list(blocks))(weights[0])
    for blocks in candidates:
        with suppress(OutOfResources):  # more shared memory than there is: not a candidate
            times[blocks] = time_of(run(list(blocks)), weights)
    return times


def time_of(run: Run, weights: list[torch.Tensor]) -> float:
    """Microseconds of one launch."""
    launches = max(len(weights), 10)
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(weights[i % len(weights)])
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[2]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ",".join(KNOWN)
    parser.add_argument("--models", help=f"names, directories with a config.json, names on the hub (default: {known})")
    parser.add_argument("--shapes", help="more products, kind:OUTPUTSxINPUTS: one row with a norm before it, added to "
                        "the residual, gated, or plain")  # fmt: skip
    parser.add_argument("--out", type=Path, default=products.DATA)
    parser.add_argument(
        "--only", default="gemv,tile,parts", help="one row; several; several, their sums left to a norm"
    )
    parser.add_argument("--quick", action="store_true", help="a third of the candidates")
    return parser.parse_args()


if __name__ == "__main__":
    main()
