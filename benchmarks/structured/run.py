"""Structured output: tokens per second with and without jumps beside free text, and forward passes per token.

    python benchmarks/structured/run.py MODEL                        # a real model, on a CPU or a GPU
    python benchmarks/structured/run.py --shape qwen3-0.6b --tokenizer DIRECTORY --requests 1,64,256    # random weights
    python benchmarks/structured/run.py --shape qwen3-8b --tokenizer DIRECTORY --requests 64 --mixed 0.2

Three kinds of output: `arguments` of function calls and `instances` of richer schemas, which end by themselves, and
`records`, a long array that runs to its maximum. Each runs free (as many tokens as the constrained answers have),
constrained with jumps, and constrained without. The modes take turns; figures are medians over rounds. CPU time
is that of this process, which the load of other work disturbs less than the clock. `--mixed` measures the others' gaps
where only some of the requests are constrained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvasir import LLM, SamplingParams, StructuredOutputsParams
from kvasir.frontend.requests.structured import mask_threads
from kvasir.platforms.limits import allowed_cpus

sys.path.insert(0, str(Path(__file__).parent.parent))

TEXT = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


ARGUMENTS = [
    closed(location=TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    closed(from_account=NUMBER, to_account=NUMBER, amount_in_cents=NUMBER, currency={"enum": ["EUR", "USD", "DKK"]}),
    closed(query=TEXT, max_results=NUMBER, include_archived={"type": "boolean"}),
    closed(recipient=TEXT, subject=TEXT, is_urgent={"type": "boolean"}),
    closed(destination_city=TEXT, departure_date={"type": "string", "format": "date"}, number_of_passengers=NUMBER),
    closed(file_path=TEXT, start_line=NUMBER, end_line=NUMBER),
]
INSTANCES = [
    closed(
        name=TEXT,
        age=NUMBER,
        address=closed(street=TEXT, city=TEXT, postal_code={"type": "string", "pattern": "^[0-9]{5}$"}),
        tags={"type": "array", "items": {"enum": ["gold", "silver", "bronze"]}, "maxItems": 3},
    ),
    closed(
        title=TEXT,
        authors={"type": "array", "items": closed(first_name=TEXT, last_name=TEXT), "minItems": 1, "maxItems": 3},
        year={"type": "integer", "minimum": 1900, "maximum": 2030},
        abstract={"type": "string", "maxLength": 80},
    ),
    closed(
        sentiment={"enum": ["positive", "neutral", "negative"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
        reasons={"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 2, "maxItems": 4},
    ),
    closed(
        steps={
            "type": "array", "minItems": 2, "maxItems": 5,
            "items": closed(description={"type": "string", "maxLength": 48}, duration_in_minutes=NUMBER),
        },
    ),
]  # fmt: skip
# The schema with which vLLM was measured on an H200 (records of people).
RECORDS = {
    "type": "array",
    "minItems": 200,
    "items": closed(
        first_name={"type": "string", "maxLength": 12},
        last_name={"type": "string", "maxLength": 16},
        age={"type": "integer", "minimum": 0, "maximum": 120},
        city={"enum": ["Copenhagen", "Reykjavik", "Bergen", "Uppsala"]},
        tags={"type": "array", "maxItems": 3, "items": {"enum": ["gold", "silver", "bronze"]}},
    ),
}
KINDS: dict[str, list[dict[str, Any]]] = {"arguments": ARGUMENTS, "instances": INSTANCES, "records": [RECORDS]}
COUNTED = ("tokens", "passes", "jumps", "tokens_jumped", "mask_seconds", "steps")  # metrics kvasir:guided_*


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or random_model(options, Path(directory))
        settings: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": False, **options.settings}
        if options.shape:
            settings |= {"load_format": "dummy", "tokenizer": options.tokenizer}
        llm = LLM(model, max_num_seqs=max(options.requests), **settings)
        machine = {"cpus": allowed_cpus(), "mask_threads": mask_threads(llm.llm_engine.config)}
        print("RESULT " + json.dumps(machine), flush=True)
        for requests in options.requests:
            for kind in options.kinds:
                report = measure(llm, kind, requests, options.rounds, options.temperature)
                print("RESULT " + json.dumps(report), flush=True)
            if options.mixed:
                print("RESULT " + json.dumps(mixed(llm, requests, options.mixed, options.rounds)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model with a tokenizer")
    parser.add_argument("--shape", help="random weights of this shape instead (see benchmarks/make_model.py)")
    parser.add_argument("--tokenizer", help="the tokenizer for --shape")
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--mixed", type=float, help="share of constrained requests beside free ones")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of the engine, as JSON")
    options = parser.parse_args()
    if bool(options.model) == bool(options.shape):
        parser.error("give a model or --shape")
    if options.shape and not options.tokenizer:
        parser.error("--shape needs --tokenizer")
    return options


def random_model(options: argparse.Namespace, directory: Path) -> str:
    from make_model import SHAPES

    (directory / "config.json").write_text(json.dumps(SHAPES[options.shape]))
    return str(directory)


def prompts(requests: int, kind: str) -> list[str]:
    return [f"Request {i}. Write the {kind} as JSON, and nothing else:\n" for i in range(requests)]


def measure(llm: LLM, kind: str, requests: int, rounds: int, temperature: float) -> dict[str, Any]:
    schemas = KINDS[kind]
    total = max(requests, len(schemas))  # fewer at a time than there are schemas: one group after the other
    texts = prompts(total, kind)
    most = 256 if kind == "records" else 400

    def params(i: int, **given: Any) -> SamplingParams:
        return SamplingParams(
            **{"temperature": temperature, "seed": i, "max_tokens": most, "ignore_eos": True, **given}
        )

    held = [params(i, structured_outputs=StructuredOutputsParams(json=schemas[i % len(schemas)])) for i in range(total)]
    modes: dict[str, list[dict[str, Any]]] = {"free": [], "jumps": [], "masks": []}
    lengths: list[int] = []
    for turn in range(rounds + 1):  # the first compiles the grammars and counts for nothing
        for mode in ("jumps", "masks", "free"):
            llm.llm_engine.input_processor.structured.may_jump = mode == "jumps"
            asked = [params(i, max_tokens=n) for i, n in enumerate(lengths)] if mode == "free" else held
            before, start, cpu = counters(llm), time.perf_counter(), time.process_time()
            outputs = []
            for at in range(0, total, requests):
                outputs += llm.generate(texts[at : at + requests], asked[at : at + requests], use_tqdm=False)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            if mode == "jumps":
                lengths, first = [len(each) for each in tokens], tokens
            if mode == "masks":
                same = sum(a == b for a, b in zip(first, tokens, strict=True))
            count = sum(map(len, tokens))
            done = {name: value - before[name] for name, value in counters(llm).items()}
            if turn:
                modes[mode].append({**done, "tok_s": count / seconds, "cpu_ms": 1e3 * cpu / count, "count": count})
    found: dict[str, Any] = {"kind": kind, "requests": requests, "tokens": modes["jumps"][0]["count"]}
    for mode, runs in modes.items():
        found[f"{mode}_tok_s"] = round(statistics.median(run["tok_s"] for run in runs), 1)
        found[f"{mode}_cpu_ms_per_token"] = round(statistics.median(run["cpu_ms"] for run in runs), 2)
    jumped, masked = modes["jumps"][-1], modes["masks"][-1]
    found |= {
        "jumps_by_masks": round(found["jumps_tok_s"] / found["masks_tok_s"], 2),
        "masks_by_jumps_cpu": round(found["masks_cpu_ms_per_token"] / found["jumps_cpu_ms_per_token"], 2),
        "masks_by_free": round(found["masks_tok_s"] / found["free_tok_s"], 2),
        "jumps_by_free": round(found["jumps_tok_s"] / found["free_tok_s"], 2),
        "passes_per_token": round(jumped["passes"] / jumped["tokens"], 3),
        "tokens_per_jump": round(jumped["tokens_jumped"] / max(1, jumped["jumps"]), 2),
        "mask_ms_per_step": round(1e3 * masked["mask_seconds"] / max(1, masked["steps"]), 3),
        "same_ids": f"{same} of {total}",
    }
    return found


def counters(llm: LLM) -> dict[str, float]:
    found = {metric.name: metric.value for metric in llm.get_metrics()}
    return {name: found[f"kvasir:guided_{name}"] for name in COUNTED}


def mixed(llm: LLM, requests: int, share: float, rounds: int) -> dict[str, Any]:
    """Time per token of a batch of free requests, with and without some constrained ones in place of free ones."""
    llm.llm_engine.input_processor.structured.may_jump = True
    number = round(requests * share)
    times: dict[str, list[float]] = {"free": [], "mixed": []}
    for turn in range(rounds + 1):
        for mode, seconds in times.items():
            held = StructuredOutputsParams(json=RECORDS) if mode == "mixed" else None
            asked = [
                SamplingParams(
                    temperature=0.6, seed=i, max_tokens=256, ignore_eos=True,
                    structured_outputs=held if i < number else None,
                )
                for i in range(requests)
            ]  # fmt: skip
            start = time.perf_counter()
            llm.generate(prompts(requests, "records"), asked, use_tqdm=False)
            if turn:
                seconds.append((time.perf_counter() - start) / 256)
    free, with_some = (statistics.median(times[mode]) for mode in ("free", "mixed"))
    return {
        "kind": "mixed", "requests": requests, "constrained": number, "free_ms_per_token": round(1e3 * free, 3),
        "mixed_ms_per_token": round(1e3 * with_some, 3), "ratio": round(with_some / free, 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
