"""Speculative decoding on real prompts: tokens a step, acceptance and speed of each drafter, against the same engine
without one. Every comparison is made in one run, in turns, so that a busy machine slows both sides alike.

    python benchmarks/speculation/measure.py --prompts DIR [--model M] [--batch 1 8] [--methods ngram suffix]

DIR has humaneval.jsonl and mt_bench.jsonl (lists of `turns`). On a GPU the same command measures the GPU. With
`--synthetic RATE` drafts are accepted by chance, which measures speed on random weights. `--shape 8b` needs no files:
it runs the shapes of Llama-3.1-8B and its EAGLE-3 head with random weights and prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvasir import LLM, SamplingParams

Clock = Callable[[], float]
Prompts = list[Any]  # texts, or lists of token ids
GIB = 1 << 30
# Sizes of a Llama and of its EAGLE-3 head, and the KV cache of each of the two engines that run side by side.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "8b": (
        {
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072},
            **{"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16"},
        },
        {"draft_vocab_size": 32000},
        36 * GIB,
    ),
    "tiny": (
        {
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096},
            **{"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32"},
        },
        {"draft_vocab_size": 128},
        GIB // 8,
    ),
}
EDIT = (
    "Here is a Python function:\n\n```python\n{code}```\n\nRename the function to `{name}` and return the complete "
    "function, with its docstring, unchanged otherwise."
)
SUMMARY = "{text}\n\nRepeat the most important sentences of this text word by word."


def turns(file: Path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]


def workloads(directory: Path, count: int) -> dict[str, list[str]]:
    edits, plain = [], []
    for line in (directory / "humaneval.jsonl").read_text().splitlines():
        entry = json.loads(line)
        code = entry["turns"][0].split("\n", 1)[1].lstrip() + entry["reference"][0]
        if "def " in code:
            edits.append(EDIT.format(code=code, name="solution"))
        plain.append(entry["turns"][0])
    return {
        "code edits": edits[:count],
        "code": plain[:count],
        "chat": turns(directory / "mt_bench.jsonl")[:count],
    }


def write_shape(name: str, directory: Path) -> tuple[str, str]:
    """Directories of the model and of the head, which hold no weights."""
    model, head, _ = SHAPES[name]
    written = {
        "model": {**model, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "head": {**model, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    }
    written["head"] |= head
    for part, config in written.items():
        (directory / part).mkdir()
        (directory / part / "config.json").write_text(json.dumps(config))
    return str(directory / "model"), str(directory / "head")


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(10, vocab_size, length).tolist() for _ in range(count)]


def counters(llm: LLM) -> dict[str, float]:
    names = ("drafts", "draft_tokens", "accepted_tokens", "rows_without_drafts", "rows_paused")
    found = {m.name.removeprefix("kvasir:"): m.value for m in llm.get_metrics()}
    return {name: found.get(f"spec_decode_num_{name}", found.get(f"spec_decode_{name}", 0.0)) for name in names}


class Side:
    """An engine with or without a drafter, and what it has done."""

    def __init__(
        self, name: str, model: str, config: dict[str, Any] | None, settings: dict[str, Any], clock: Clock
    ) -> None:
        self.name, self.clock = name, clock
        self.llm = LLM(model, speculative_config=config, enable_prefix_caching=False, **settings)
        if clock is not time.perf_counter:  # the engine chooses draft lengths by the same clock
            core: Any = self.llm.llm_engine.client.core  # type: ignore[attr-defined]
            core.scheduler.context.clock = clock
        self.seconds, self.tokens, self.batch = 0.0, 0, 1
        self.texts: list[list[int]] = []
        self.before: dict[str, float] = {}

    def start(self) -> None:
        self.seconds, self.tokens, self.texts, self.before = 0.0, 0, [], counters(self.llm)

    def run(self, prompts: Prompts, params: SamplingParams) -> None:
        if isinstance(prompts[0], list):
            asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
            began = self.clock()
            outputs = self.llm.generate(asked, params, use_tqdm=False)
        else:
            messages: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
            began = self.clock()
            outputs = self.llm.chat(messages, params, use_tqdm=False)
        self.seconds += self.clock() - began
        self.batch = len(prompts)
        self.tokens += sum(len(each.outputs[0].token_ids) for each in outputs)
        self.texts += [list(each.outputs[0].token_ids) for each in outputs]

    def figures(self, base: Side) -> dict[str, float]:
        used = {name: value - self.before[name] for name, value in counters(self.llm).items()}
        steps = used["drafts"] + used["rows_without_drafts"]
        same = sum(own == other for own, other in zip(self.texts, base.texts, strict=True))
        return {
            "tokens_per_step": self.tokens / steps if steps else 1.0,
            "accepted": used["accepted_tokens"] / used["draft_tokens"] if used["draft_tokens"] else 0.0,
            "paused": used["rows_paused"] / steps if steps else 0.0,
            "tokens_per_second": self.tokens / self.seconds,
            "ms_per_token": 1e3 * self.seconds * self.batch / self.tokens,  # of each request
            "speedup": (self.tokens / self.seconds) / (base.tokens / base.seconds),
            "same_texts": same / len(self.texts),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--shape", choices=list(SHAPES), default=None, help="random weights of this shape, EAGLE-3")
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens of random prompts")
    parser.add_argument("--model", default=None, help="if unset, the starter model")
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--count", type=int, default=8, help="prompts of each workload")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", action="store_true", help="always draft as many tokens as --drafts")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds: for one thread on a busy machine")
    parser.add_argument("--synthetic", type=float, default=None)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of further engine settings")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if (args.prompts is None) == (args.shape is None):
        parser.error("give either --prompts or --shape")
    settings = {"max_model_len": 2048, "max_num_seqs": max(args.batch), **args.settings}
    if args.shape is not None:
        directory = TemporaryDirectory()
        args.model, args.draft_model = write_shape(args.shape, Path(directory.name))
        args.methods = ["eagle3"]
        shape = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": SHAPES[args.shape][2]}
        settings = {**shape, **settings}
    elif args.model is None:
        from kvasir.models.hub import find_starter_model

        args.model = str(find_starter_model())
    clock: Clock = time.process_time if args.cpu_time else time.perf_counter
    sides = [Side("none", args.model, None, settings, clock)]
    for method in args.methods:
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": args.drafts}
        config |= {"adaptive": not args.fixed}
        if method == "ngram":
            config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        if method in ("draft_model", "eagle3", "eagle", "medusa"):
            config |= {"model": args.draft_model}
        if args.synthetic is not None:
            config |= {"synthetic_acceptance_rate": args.synthetic}
        sides.append(Side(method, args.model, config, settings, clock))
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=1, ignore_eos=args.shape is not None
    )
    vocab_size = SHAPES[args.shape][0]["vocab_size"] if args.shape else 0
    for side in sides:
        side.run(random_prompts(1, 8, vocab_size) if args.shape else ["Say hello."], params)
    rows = []
    found: dict[str, Prompts] = (
        {"random": random_prompts(max(args.count, *args.batch, 1), args.prompt_length, vocab_size)}
        if args.shape
        else dict(workloads(args.prompts, args.count))
    )
    for workload, prompts in found.items():
        for batch in args.batch:
            for side in sides:
                side.start()
            asked = prompts[: max(args.count, batch)]
            for at in range(0, len(asked), batch):
                for side in sides if at // batch % 2 == 0 else sides[::-1]:
                    side.run(asked[at : at + batch], params)
            for side in sides:
                figures = side.figures(sides[0])
                rows.append({"workload": workload, "batch": batch, "method": side.name, **figures})
                text = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"{workload:>12} batch {batch:<3} {side.name:>12}  {text}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
