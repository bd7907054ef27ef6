"""What it costs on a CPU that a request's logits are the same bits in every batch.

    OMP_NUM_THREADS=1 python benchmarks/cpu/equal_bits.py [--rounds 8] [--starts 3] [--model FILE] [--kinds bf16 file]

Builds the CPU library as it is, and from copies of its sources that give equal bits up: `all keys` has attention
without segments; `sums` also has products that share a number's inputs over several sums where rows are few. Each
library runs in a process of its own with one thread and waits while the others are measured. `again` is a second
process with the library as it is: it shows what the measurement is worth. In a round all do the same work, every other
round in reverse order. A figure is the median of the rounds' ratios of CPU time, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quiet import Others

from kvasir.kernels.cpu import build
from kvasir.kernels.cpu.library import PATH

Changes = list[tuple[str, str, str]]  # file, text, what replaces it
Seconds = dict[str, float]  # by library

ALL_KEYS: Changes = [("kernels.h", "SEGMENT = 256;", "SEGMENT = 1 << 30;")]
SUMS: Changes = [
    (
        "product.inl",
        "inline void store_sums(float *out, const Sums &sums) {",  # of AVX2, where sums are no numbers
        "inline void operator+=(Sums &to, const Sums &more) {\n"
        "  for (int h = 0; h < 2; h++) to.half[h] += more.half[h];\n"
        "}\n"
        "inline void store_sums(float *out, const Sums &sums) {",
    ),
    (
        "product.inl",
        "  Sums acc[R][B];\n  clear(acc);\n  int p = 0;",
        "  constexpr int SUMS = R * B <= 2 ? 4 : R * B <= 4 ? 2 : 1;\n  Sums acc[SUMS][R][B];\n"
        "#pragma GCC unroll 4\n  for (int s = 0; s < SUMS; s++) clear(acc[s]);\n  int p = 0;",
    ),
    ("product.inl", "for (int end = p + AT_ONCE; p < end; p++) {", "for (int s = 0; s < AT_ONCE; s++, p++) {"),
    ("product.inl", "dot(acc[i][b], pair, panel[b])", "dot(acc[s % SUMS][i][b], pair, panel[b])"),
    (
        "product.inl",
        "store_sums(out + (i * B + b) * 16, acc[i][b]);",
        "{\n      for (int s = 1; s < SUMS; s++) acc[0][i][b] += acc[s][i][b];\n"
        "      store_sums(out + (i * B + b) * 16, acc[0][i][b]);\n    }",
    ),
]
LIBRARIES: dict[str, Changes] = {"equal": [], "all keys": ALL_KEYS, "sums": ALL_KEYS + SUMS}
KINDS: dict[str, dict[str, str]] = {"bf16": {"quantization": "none"}, "file": {}}  # `file`: the GGUF file's own numbers
SHAPES = [(1, 200, 96), (1, 2000, 40), (8, 200, 32)]  # requests, tokens of each prompt, tokens that each writes
SETTINGS: dict[str, Any] = {
    **{"device": "cpu", "dtype": "bfloat16", "cpu_threads": 1, "kv_cache_memory_bytes": 256 << 20},
    **{"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "enable_prefix_caching": False},
    **{"skip_tokenizer_init": True, "use_tqdm_on_load": False},
}


def changed_sources(changes: Changes, place: Path) -> None:
    shutil.copytree(build.SOURCES, place)
    for file, old, new in changes:
        text = (place / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"csrc/cpu/{file} has changed: this script looks for {old!r}")
        (place / file).write_text(text.replace(old, new))


def build_changed(changes: Changes, place: Path) -> Path:
    """Build a library from changed sources that says of itself that it was built from those of the checkout."""
    changed_sources(changes, place)
    kept, build.SOURCES = build.SOURCES, place
    try:
        return build.build(place / PATH.name)
    finally:
        build.SOURCES = kept


# ---------------------------------------------------------------- a process with one library


def measure(llm: Any, salt: int, count: int, length: int, tokens: int) -> list[float]:
    """CPU seconds of the prompts, and of a step that gives each request a token."""
    from kvasir import SamplingParams
    from kvasir.sampling_params import RequestOutputKind

    engine, rng = llm.llm_engine, random.Random(salt)
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    began = time.process_time()
    for i in range(count):
        ids = [rng.randrange(300, 40_000) for _ in range(length)]
        engine.add_request(f"{salt}-{i}", {"prompt_token_ids": ids}, params)
    begun = set[str]()
    while len(begun) < count:
        begun |= {output.request_id for output in engine.step()}
    first, steps = time.process_time(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return [first - began, (time.process_time() - first) / steps]


def serve(library: str, model: str, kind: str) -> None:
    """Answer every line of stdin, a salt and a shape, with the seconds."""
    from kvasir import LLM
    from kvasir.kernels.cpu import library as cpu

    cpu.PATH = Path(library)
    llm = LLM(model, **SETTINGS, **KINDS[kind])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(llm, *json.loads(line))), flush=True)


class Process:
    def __init__(self, library: Path, model: str, kind: str) -> None:
        command = [sys.executable, __file__, "--serve", str(library), "--model", model, "--kinds", kind]
        environment = os.environ | {"KVASIR_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.answers, self.questions = self.process.stdout, self.process.stdin
        self.answer()

    def answer(self) -> str:
        if not (line := self.answers.readline()):
            raise SystemExit(f"a process ended with {self.process.wait()}")
        return line

    def ask(self, *question: int) -> list[float]:
        print(json.dumps(question), file=self.questions, flush=True)
        found: list[float] = json.loads(self.answer())
        return found

    def close(self) -> None:
        self.questions.close()
        self.process.wait()


# ---------------------------------------------------------------- the rounds


def run(libraries: dict[str, Path], model: str, kind: str, rounds: int, found: dict[str, list[Seconds]]) -> None:
    """Start a process for each library and add every round's seconds to `found`, by what was measured."""
    processes: dict[str, Process] = {}
    try:
        for name, path in libraries.items():
            processes[name] = Process(path, model, kind)
        for salt in range(rounds + 1):  # the first warms up
            for shape in SHAPES:
                order = list(processes)[:: 1 if salt % 2 else -1]
                seconds = {name: processes[name].ask(salt, *shape) for name in order}
                for part, what in enumerate(("prefill", "decode") if salt else ()):
                    whose = f"{what} {shape[0]} x {shape[1]}"
                    found.setdefault(whose, []).append({name: each[part] for name, each in seconds.items()})
    finally:
        for process in processes.values():
            process.close()


def report(kind: str, found: dict[str, list[Seconds]]) -> None:
    for what, rounds in found.items():
        line = f"{kind} {what}: {statistics.median(each['equal'] for each in rounds) * 1e3:.2f} ms"
        for other in [name for name in rounds[0] if name != "equal"]:
            low, half, high = statistics.quantiles([each["equal"] / each[other] - 1 for each in rounds], n=4)
            line += f" | over {other}: {half:+.1%} ({low:+.1%} .. {high:+.1%})"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--starts", type=int, default=3, help="how often the processes are started anew")
    parser.add_argument("--model", help="a GGUF file; the starter model by default")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.model, args.kinds[0])
    from kvasir.models.hub import find_starter_model

    model = args.model or str(find_starter_model())
    with tempfile.TemporaryDirectory() as folder:
        libraries = {
            name: build_changed(changes, Path(folder) / str(i)) for i, (name, changes) in enumerate(LIBRARIES.items())
        }
        libraries["again"] = libraries["equal"]
        for kind in args.kinds:
            found: dict[str, list[Seconds]] = {}
            with Others(os.getpid()) as others:
                for _ in range(args.starts):
                    run(libraries, model, kind, args.rounds, found)
            report(kind, found)
            print(f"{args.starts * args.rounds} rounds; others used {others.share:.0%} of the CPUs; {os.getloadavg()}")


if __name__ == "__main__":
    main()
