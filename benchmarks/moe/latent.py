"""Checks and times all kernels for single tokens over a latent cache on a GPU:

    PYTHONPATH=. python benchmarks/moe/latent.py [--seconds 85] [--only NAME,NAME] [--more]

Each way of computing runs in a process of its own, so that one that does not compile, is wrong or never ends is named
and the others go on. All compile and check at the same time, against float64: random lengths from 0 to 9000, tables
shuffled, NaN wherever no token lies. Then they are timed one after the other, also those that are wrong, which are
marked. `read` only loads the tiles and computes nothing: the others cannot be faster. --more times 32 and 64 heads too.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # run it from a checkout without installing

DEVICE, LATENT, ROTARY, BLOCK, SCALE = "cuda", 512, 64, 64, 0.1
TOLERANCE = 1e-2  # of a head's result: bfloat16 rounds the weights and the result
SHAPES = [  # heads, sequences, tokens of each
    *[(16, 64, 8192), (16, 1, 8192), (16, 256, 1024), (128, 64, 8192)],
    *[(16, 1, 256), (16, 64, 256), (16, 1, 1024), (128, 1, 256)],
]
MORE = [(32, 64, 8192), (64, 64, 8192), (128, 1, 8192), (128, 256, 1024)]

Call = Callable[["Case", torch.Tensor], None]


@dataclass(frozen=True)
class Variant:
    name: str
    group: str  # those of a group share a process
    heads: tuple[int, ...]  # that it is checked with; shapes with more than the last are not timed
    make: Callable[[], Call]
    computes: bool = True


def plain(tokens: int, stages: int, warps: int, count: int = 0, least: int = 0) -> Callable[[], Call]:
    def make() -> Call:
        from kvasir.kernels.triton.latent import DecodeTiling, latent_decode
        from kvasir.kernels.triton.paged_decode import Split

        tiling, split = DecodeTiling(tokens, stages, warps), Split(count, least) if count else None

        def call(case: Case, out: torch.Tensor) -> None:
            latent_decode(
                *case.inputs, out, case.workspace, SCALE, case.unit, split=split, longest=case.longest, tiling=tiling
            )

        return call

    return make


def hopper(way: str, heads: int, least: int = 2, whole: bool = False) -> Callable[[], Call]:
    def make() -> Call:
        from kvasir.kernels.triton.hopper_latent import Plan, Way, hopper_latent
        from kvasir.kernels.triton.paged_decode import LOG2E

        plan = Plan(Way[way], heads, least, whole)

        def call(case: Case, out: torch.Tensor) -> None:
            hopper_latent(*case.inputs, out, case.workspace, SCALE * LOG2E, 1.0, None, plan)

        return call

    return make


def chosen() -> Call:
    from kvasir.kernels.triton.latent import latent_decode

    def call(case: Case, out: torch.Tensor) -> None:
        latent_decode(*case.inputs, out, case.workspace, SCALE, case.unit, longest=case.longest)

    return call


def read() -> Call:
    from latent_read import read_tiles

    def call(case: Case, out: torch.Tensor) -> None:
        read_tiles(*case.inputs)

    return call


ALL = (8, 16, 20, 32, 64, 128)
VARIANTS = [
    Variant("read", "read", (16,), read, computes=False),
    Variant("exchanged 16", "exchanged", (8, 16, 128), hopper("EXCHANGED", 16)),
    Variant("exchanged 16, least 1", "exchanged", (16,), hopper("EXCHANGED", 16, 1)),
    Variant("exchanged 16, least 4", "exchanged", (16,), hopper("EXCHANGED", 16, 4)),
    Variant("exchanged 16, whole", "exchanged", (16,), hopper("EXCHANGED", 16, whole=True)),
    Variant("exchanged 32", "exchanged 32", (16, 20, 32, 64, 128), hopper("EXCHANGED", 32)),
    Variant("halves", "halves", (16, 20, 64, 128), hopper("HALVES", 64)),
    Variant("halves, whole", "halves", (128,), hopper("HALVES", 64, whole=True)),
    Variant("together", "together", (16, 20, 64, 128), hopper("TOGETHER", 64)),
    Variant("plain 32/4/4 (as before)", "plain", (16, 32), plain(32, 4, 4)),
    Variant("plain 32/4/8 (as before)", "plain", (64, 128), plain(32, 4, 8)),
    Variant("plain 32/5/4", "plain", (16,), plain(32, 5, 4)),
    Variant("plain 32/6/8", "plain", (16,), plain(32, 6, 8)),
    Variant("plain 64/3/8", "plain 64", (16,), plain(64, 3, 8)),
    Variant("plain 64/2/8", "plain 64", (16,), plain(64, 2, 8)),
    Variant("plain 32/4/4, 8 parts", "plain 64", (16,), plain(32, 4, 4, 8, 512)),
    Variant("chosen", "chosen", ALL, lambda: chosen()),
]


# ---------------------------------------------------------------- cases


class Case:
    """Sequences in a paged cache. Slots that hold no token are NaN."""

    def __init__(self, lengths: list[int], heads: int, dtype: torch.dtype = torch.bfloat16, unit: float = 1.0) -> None:
        from kvasir.kernels.triton.paged_decode import Workspace

        self.lengths, self.heads, self.unit, self.workspace = lengths, heads, unit, Workspace()
        blocks = [-(-n // BLOCK) for n in lengths]
        pages = sum(blocks) + 3
        generator = torch.Generator(DEVICE).manual_seed(len(lengths) * 1000 + heads)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, generator=generator, dtype=torch.bfloat16)

        order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).to(torch.int32)
        tables = torch.full((len(lengths) + 2, max(1, *blocks) + 1), pages - 1, dtype=torch.int32)
        rows = torch.randperm(len(lengths) + 2, generator=torch.Generator().manual_seed(pages))[: len(lengths)]
        cache, at = random(pages, BLOCK, LATENT + ROTARY), 0
        used = torch.zeros(pages, BLOCK, dtype=torch.bool)
        for row, length, count in zip(rows.tolist(), lengths, blocks, strict=True):
            own = order[at : at + count]
            tables[row, :count], at = own, at + count
            for place, block in enumerate(own.tolist()):
                used[block, : length - place * BLOCK] = True
        cache[~used.to(DEVICE)] = torch.nan
        self.cache = cache if dtype == torch.bfloat16 else (cache.float() / unit).to(dtype)
        self.tables, self.rows = tables.to(DEVICE), rows.to(DEVICE)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.query = random(heads, len(lengths), LATENT).transpose(0, 1)  # as the product before leaves it
        self.rotated = random(len(lengths), heads, 128 + ROTARY)[..., 128:]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.rotated, self.cache, self.tables, self.rows, self.lens

    def exact(self) -> torch.Tensor:
        """In float64; zeros for sequences without tokens."""
        out = torch.zeros(len(self.lengths), self.heads, LATENT, dtype=torch.float64, device=DEVICE)
        for i, (row, length) in enumerate(zip(self.rows.tolist(), self.lengths, strict=True)):
            if length:
                pages = self.tables[row, : -(-length // BLOCK)].long()
                seen = self.cache[pages].to(torch.bfloat16 if self.unit == 1.0 else torch.float32).flatten(0, 1)
                k = seen[:length].double() * self.unit
                q = torch.cat((self.query[i], self.rotated[i]), dim=-1).double()
                out[i] = (q @ k.T * SCALE).softmax(-1) @ k[:, :LATENT]
        return out


def cases(heads: int) -> dict[str, Case]:
    generator = torch.Generator().manual_seed(heads)
    some = torch.randint(0, 1500, (30,), generator=generator).tolist()
    short = torch.randint(0, 150, (530,), generator=generator).tolist()
    return {
        "mixed": Case([1, 0, 63, 64, 65, 127, 128, 129, 0, *some, 9000], heads),
        "long": Case([9000, 1, 8191], heads),
        "one": Case([4097], heads),
        "tiny": Case([1], heads),
        "many": Case(short, heads),
    }


def check(call: Call, case: Case, exact: torch.Tensor) -> float:
    """The largest error of a head's result. A sequence without tokens must be left as it is."""
    worst = 0.0
    for _ in range(2):  # the second time, memory holds what the first left
        out = torch.full((len(case.lengths), case.heads, LATENT), 7.0, dtype=torch.bfloat16, device=DEVICE)
        call(case, out)
        torch.cuda.synchronize()
        there = case.lens > 0
        if not bool((out[~there] == 7.0).all()):
            return float("inf")
        errors = (out[there].double() - exact[there]).norm(dim=-1) / exact[there].norm(dim=-1)
        worst = max(worst, float(errors.nan_to_num(torch.inf).max()))
    return worst


def microseconds(call: Callable[[], object], calls: int = 10, replays: int = 15) -> float:
    """Of one call, from replays of a graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return median(times)


# ---------------------------------------------------------------- one process for each group


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def run_group(group: str, shapes: list[tuple[int, int, int]]) -> None:
    """Check, wait for a line, time."""
    variants = [variant for variant in VARIANTS if variant.group == group]
    calls: dict[str, Call] = {}
    references: dict[tuple[int, str], tuple[Case, torch.Tensor]] = {}
    for variant in variants:
        try:
            calls[variant.name] = variant.make()
            for heads in variant.heads if variant.computes else ():
                if (heads, "mixed") not in references:
                    references |= {(heads, name): (case, case.exact()) for name, case in cases(heads).items()}
                for name in ("tiny", "one", "long", "mixed", "many"):
                    error = check(calls[variant.name], *references[heads, name])
                    say(variant=variant.name, heads=heads, case=name, error=error)
        except Exception as problem:
            last = traceback.format_exc().strip().splitlines()[-12:]
            say(variant=variant.name, problem=f"{type(problem).__name__}: {str(problem)[:300]}", trace=last)
            calls.pop(variant.name, None)
    if group == "chosen":
        for heads in (16, 128):
            case = Case([700, 1, 3000], heads, torch.float8_e4m3fn, 0.02)
            say(variant="chosen", heads=heads, case="8-bit cache", error=check(calls["chosen"], case, case.exact()))
    references.clear()
    torch.cuda.empty_cache()
    say(ready=True)
    sys.stdin.readline()
    for heads, sequences, length in shapes:
        those = [v for v in variants if v.name in calls and (heads in v.heads or not v.computes)]
        if those:
            case = Case([length] * sequences, heads)
            out = torch.empty(sequences, heads, LATENT, dtype=torch.bfloat16, device=DEVICE)
            for variant in those:
                try:
                    us = microseconds(lambda call=calls[variant.name], case=case, out=out: call(case, out))
                except Exception as problem:
                    say(variant=variant.name, problem=f"{type(problem).__name__}: {str(problem)[:300]}")
                    continue
                read_bytes = sequences * length * (LATENT + ROTARY) * 2
                flops = 2 * sequences * length * heads * (2 * LATENT + ROTARY)
                say(
                    variant=variant.name, shape=f"{heads} heads, {sequences} x {length}", us=us,
                    tb_per_s=read_bytes / us / 1e6, tflop_per_s=flops / us / 1e6 if variant.computes else 0.0,
                )  # fmt: skip
            del case, out
    say(ready=True)


class Child:
    """A group's process, and what it said."""

    def __init__(self, group: str, more: bool) -> None:
        self.group, self.lines = group, queue.Queue[dict[str, Any]]()
        command = [sys.executable, __file__, "--group", group, *(["--more"] if more else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.errors: list[str] = []
        for target in (self._read, self._read_errors):
            threading.Thread(target=target, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                self.errors.append(line)
        self.lines.put({"ended": self.process.wait()})

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def listen(self, until: float) -> tuple[list[dict[str, Any]], str | None]:
        """What it says until it is ready, and why it is not, if it is not."""
        said: list[dict[str, Any]] = []
        while True:
            try:
                line = self.lines.get(timeout=max(0.05, until - time.perf_counter()))
            except queue.Empty:
                self.process.kill()
                return said, "did not end in time and was killed"
            if "ready" in line:
                return said, None
            if "ended" in line:
                return said, f"ended with {line['ended']}: " + " | ".join("".join(self.errors).splitlines()[-6:])
            said.append(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--only", default="", help="groups, with commas between them")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    shapes = SHAPES + MORE if asked.more else SHAPES
    if asked.group:
        run_group(asked.group, shapes)
        return 0
    deadline = time.perf_counter() + asked.seconds
    groups = list(dict.fromkeys(variant.group for variant in VARIANTS))
    groups = [group for group in groups if not asked.only or group in asked.only.split(",")]
    children = [Child(group, asked.more) for group in groups]
    wrong: set[str] = set()
    able: list[Child] = []
    print("errors, the largest of a head's result; lengths: tiny 1, one 4097, long 9000 1 8191, mixed 0-9000, many 530")
    checked_by = deadline - asked.seconds * 0.3
    for child in children:
        said, why = child.listen(checked_by)
        found: dict[tuple[str, int], list[str]] = {}
        for line in said:
            if "problem" in line:
                print(f"  FAILED {line['variant']}: {line['problem']}\n    " + "\n    ".join(line["trace"]))
                wrong.add(line["variant"])
            else:
                bad = not line["error"] < TOLERANCE
                text = f"{line['case']} {line['error']:.1e}" + (" WRONG" if bad else "")
                found.setdefault((line["variant"], line["heads"]), []).append(text)
                if bad:
                    wrong.add(line["variant"])
        for (name, heads), texts in found.items():
            print(f"  {name:26} {heads:4} heads: {', '.join(texts)}")
        if why is None:
            able.append(child)
        else:
            print(f"  FAILED group {child.group} {why}")
    print(f"checked after {time.perf_counter() - deadline + asked.seconds:.0f} s", flush=True)
    columns = [f"{heads} heads, {sequences} x {length}" for heads, sequences, length in shapes]
    table: dict[str, dict[str, str]] = {}
    for child in able:
        assert child.process.stdin is not None
        try:
            child.process.stdin.write("\n")
            child.process.stdin.flush()
        except OSError:
            pass  # it has ended, which `listen` says
        said, why = child.listen(min(deadline, time.perf_counter() + 15))
        for line in said:
            if "problem" in line:
                print(f"  FAILED {line['variant']}: {line['problem']}")
            else:
                flops = f" {line['tflop_per_s']:4.0f} TF" if line["tflop_per_s"] else ""
                text = f"{line['us']:7.1f} us {line['tb_per_s']:4.2f} TB/s{flops}"
                table.setdefault(line["variant"], {})[line["shape"]] = text
        if why is not None:
            print(f"  FAILED group {child.group} while it was timed: {why}")
    for start in range(0, len(columns), 4):
        some = columns[start : start + 4]
        print(f"\n{'':28}" + "".join(f"{column:>30}" for column in some))
        for name, row in table.items():
            if any(column in row for column in some):
                mark = "!" if name in wrong else " "
                print(f"{mark}{name:27}" + "".join(f"{row.get(column, ''):>30}" for column in some))
    print("\n! its results are wrong" if wrong & table.keys() else "")
    print("all right" if not wrong and len(able) == len(children) else f"WRONG: {sorted(wrong)}")
    for child in children:
        child.process.kill()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
