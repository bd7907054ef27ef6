"""Computes the hardware floor of each workload: unavoidable bytes and operations over the chip's measured rates.

    python benchmarks/h200/floors.py [--commit 11609ea7dc] [--read 4.54] [--products 740] [--write]

A floor is the least time of an ideal engine in bf16. All prompts are computed at once, then all requests decode
together to their last token. A part of a step (one product, one attention) takes as long as its bytes or its operations
take, whichever is longer, and parts follow each other. Counted are weights, keys and values that are read, and the
operations of products and attention. Not counted, so that floors are too low rather than too high: activations, writes,
norms, rotary, sampling, launches and the host. --write puts the table into benchmarks/README.md. Plain Python: runs
anywhere.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import record

# Measured on this chip with torch 2.11 and triton 3.6, by themselves (h200_ceilings.md, beside the peers' files).
READ = 4.54e12  # bytes a second: a plain Triton kernel that reads
PRODUCTS = (
    740e12  # operations a second: the fastest product of the 8B model's shapes by cuBLAS, 2048 rows through `down`
)
COMMIT = "3b18d09"  # whose figures the table stands beside
PAGE = record.ROOT / "benchmarks" / "README.md"
MARKS = ("<!-- floors: benchmarks/h200/floors.py --write -->", "<!-- end of floors -->")
BYTES = 2  # of a bf16 number


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @property
    def kv_bytes(self) -> int:
        """Of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def products(self) -> list[tuple[int, int]]:
        """Outputs and inputs of a layer's products: keys and values, queries, o, gate and up, down."""
        return [(2 * self.kv_heads * self.head_dim, self.hidden), *self.products_of_last]

    @property
    def products_of_last(self) -> list[tuple[int, int]]:
        """The last layer's for tokens whose logits are wanted: all others owe it their keys and values alone."""
        attended = self.heads * self.head_dim
        return [(attended, self.hidden), (self.hidden, attended), (2 * self.mlp, self.hidden), (self.hidden, self.mlp)]


SHAPES = {
    "qwen3-0.6b": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=3072, vocab=151936),
    "llama-3.1-8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256),
}


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    prompts: Sequence[int]  # lengths, without what they share
    answers: Sequence[int]
    shared: int = 0  # tokens that all prompts begin with

    @property
    def in_tokens(self) -> int:
        return sum(self.prompts) + self.shared * len(self.prompts)

    @property
    def out_tokens(self) -> int:
        return sum(self.answers)


def workloads() -> list[Workload]:
    """Sizes of the peers' workloads; the record has how many tokens each of them was, and a test compares."""
    small, large = SHAPES
    return [
        _nano_bench(small),
        Workload("q_decode_b1", small, [128], [256]),
        Workload("decode_b1", large, [128], [256]),
        Workload("decode_b64", large, [128] * 64, [256] * 64),
        Workload("batch_512x512x256", large, [512] * 512, [256] * 512),
        Workload("prefill_256x2048x16", large, [2048] * 256, [16] * 256),
        Workload("shared_256x2048+128x128", large, [128] * 256, [128] * 256, shared=2048),
        Workload("unshared_256x2176x128", large, [2176] * 256, [128] * 256),
    ]


def _nano_bench(model: str) -> Workload:
    """nano-vllm's draws in its order: tokens are drawn between the lengths."""
    rng, prompts = random.Random(0), []
    for _ in range(256):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10000)
    return Workload("nano_bench", model, prompts, [rng.randint(100, 1024) for _ in range(256)])


@dataclass(frozen=True)
class Need:
    """What a part of a step cannot do without."""

    weights: float = 0.0  # bytes
    cache: float = 0.0  # bytes
    operations: float = 0.0


@dataclass(frozen=True)
class Chip:
    read: float = READ
    products: float = PRODUCTS

    def seconds(self, need: Need) -> float:
        return max((need.weights + need.cache) / self.read, need.operations / self.products)


def products(shape: Shape, tokens: int, wanted: int) -> Iterator[Need]:
    """Of a step of so many tokens, of which `wanted` have logits."""
    for layer in range(shape.layers):
        last = layer == shape.layers - 1
        for place, (outputs, inner) in enumerate(shape.products):
            yield _product(outputs, inner, wanted if last and place > 0 else tokens)
    yield _product(shape.vocab, shape.hidden, wanted)


def _product(outputs: int, inner: int, rows: int) -> Need:
    return Need(weights=outputs * inner * BYTES, operations=2.0 * outputs * inner * rows)


def attention(shape: Shape, read: int, pairs: int, last_pairs: int) -> Need:
    """`read` cached tokens once in all layers; pairs of a query and a key, and those of them the last layer needs."""
    a_pair = 4.0 * shape.heads * shape.head_dim  # a product for the score, one for the sum
    return Need(cache=read * shape.kv_bytes, operations=a_pair * (pairs * (shape.layers - 1) + last_pairs))


def prompts_of(work: Workload) -> Iterator[Need]:
    shape, count = SHAPES[work.model], len(work.prompts)
    tokens = work.shared + sum(work.prompts)  # what is shared is computed once
    yield from products(shape, tokens, count)
    pairs = work.shared * (work.shared + 1) // 2 + sum(n * work.shared + n * (n + 1) // 2 for n in work.prompts)
    yield attention(shape, tokens, pairs, work.in_tokens)


def steps_of(work: Workload) -> Iterator[tuple[list[Need], list[Need]]]:
    """Products and attention of each step after the prompts, which give the first token."""
    shape = SHAPES[work.model]
    for step in range(1, max(work.answers)):
        own = [n + step for n, out in zip(work.prompts, work.answers, strict=True) if out > step]
        seen = [attention(shape, sum(own), sum(own), sum(own))]
        if work.shared:  # read once for all rows: here operations take longer than bytes
            seen.append(attention(shape, work.shared, work.shared * len(own), work.shared * len(own)))
        yield list(products(shape, len(own), len(own))), seen


@dataclass(frozen=True)
class Floor:
    work: Workload
    need: Need
    prompts: float  # seconds
    products: float  # seconds of all steps after the prompts
    attention: float

    @property
    def seconds(self) -> float:
        return self.prompts + self.products + self.attention

    @property
    def figure(self) -> float:
        """In the unit that the record uses for the workload."""
        key, _ = record.figure(self.work.name)
        if key == "ms_per_step":
            return 1e3 * (self.products + self.attention) / (max(self.work.answers) - 1)
        return (self.work.out_tokens + (self.work.in_tokens if key == "total_tok_s" else 0)) / self.seconds


def floor(work: Workload, chip: Chip) -> Floor:
    prompts, steps = list(prompts_of(work)), list(steps_of(work))
    in_products = [need for step, _ in steps for need in step]
    in_attention = [need for _, step in steps for need in step]
    times = [sum(map(chip.seconds, needs)) for needs in (prompts, in_products, in_attention)]
    return Floor(work, _total([*prompts, *in_products, *in_attention]), *times)


def _total(needs: Sequence[Need]) -> Need:
    return Need(
        weights=sum(need.weights for need in needs),
        cache=sum(need.cache for need in needs),
        operations=sum(need.operations for need in needs),
    )


# ---------------------------------------------------------------- the table


def table(chip: Chip, commit: str = COMMIT) -> str:
    lines = [
        "| workload | weights, GB | KV, GB | TFLOP | prompts, s | then products, s | attention, s "
        f"| floor | measured ({commit}) | of the floor's speed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = {line.get("workload"): line for line in record.load() if line["commit"] == commit}
    for work in workloads():
        least = floor(work, chip)
        key, unit = record.figure(work.name)
        ours = measured.get(work.name, {}).get(key)
        share = None if ours is None else least.figure / ours if key == "ms_per_step" else ours / least.figure
        need, seconds = least.need, (least.prompts, least.products, least.attention)
        cells = [work.name, *map(_short, (need.weights / 1e9, need.cache / 1e9, need.operations / 1e12))]
        cells += [_short(x) for x in seconds] + [f"{_short(least.figure)} {unit}"]
        cells += ["-", "-"] if ours is None or share is None else [_short(ours), f"{share:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(value: float) -> str:
    """Three digits, or whole numbers."""
    digits = next((digits for digits in range(4) if value >= 100 / 10**digits), 4)
    return f"{value:,.{digits}f}"


def put(page: str, text: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{PAGE.name} has no {MARKS[0]} ... {MARKS[1]}")
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT, help="whose line of results.jsonl stands beside")
    parser.add_argument("--read", type=float, default=READ / 1e12, metavar="TB/s")
    parser.add_argument("--products", type=float, default=PRODUCTS / 1e12, metavar="TFLOP/s")
    parser.add_argument("--write", action="store_true", help="put it into benchmarks/README.md, too")
    arguments = parser.parse_args()
    text = table(Chip(arguments.read * 1e12, arguments.products * 1e12), arguments.commit)
    print(text)
    if arguments.write:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
