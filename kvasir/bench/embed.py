"""`kvasir bench embed`: texts and tokens per second of a pooling model with all texts at once; one text's latency."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvasir.bench import report
from kvasir.bench.workloads import Span, uniform
from kvasir.config.args import EngineArgs
from kvasir.entrypoints.llm import LLM
from kvasir.errors import ConfigError
from kvasir.frontend.requests.prompts import TokensPrompt

DEFAULT_TEXT = Span(16, 128)
SINGLE_RUNS = 20


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    num_prompts: int = 512
    input_len: Span = DEFAULT_TEXT
    repeat: int = 3


def run(args: EngineArgs, options: EmbedOptions) -> dict[str, Any]:
    """Run the benchmark and return its record."""
    with LLM.from_engine_args(args) as llm:
        config = llm.llm_engine.config
        if not config.model.poolers:
            raise ConfigError("kvasir bench embed needs a pooling model; use bench throughput, or --runner pooling.")
        longest = config.model.max_model_len
        if options.input_len.high > longest:
            raise ConfigError(f"--input-len {options.input_len} is more than the model's {longest} tokens.")
        record = {"benchmark": "embed", **report.conditions(config), "seed": config.model.seed}
        made = uniform(options.num_prompts, options.input_len, Span(1, 1), config.model.vocab_size, config.model.seed)
        texts = [TokensPrompt(prompt_token_ids=each.prompt_token_ids) for each in made]
        num_tokens = sum(len(each.prompt_token_ids) for each in made)
        llm.encode(texts[: max(1, len(texts) // 8)], use_tqdm=False)
        seconds = [_timed(llm, texts) for _ in range(options.repeat)]
        single = [_timed(llm, texts[:1]) for _ in range(SINGLE_RUNS)]
    taken = median(seconds)
    return record | {
        "num_prompts": len(texts),
        "input_len": str(options.input_len),
        "prompt_tokens": num_tokens,
        "repeat": options.repeat,
        "seconds": taken,
        "texts_per_second": len(texts) / taken,
        "tokens_per_second": num_tokens / taken,
        "one_text_ms": 1e3 * median(single),
        "one_text_tokens": len(made[0].prompt_token_ids),
    }


def _timed(llm: LLM, texts: list[TokensPrompt]) -> float:
    started = time.perf_counter()
    llm.encode(texts, use_tqdm=False)
    return time.perf_counter() - started


def render(record: Mapping[str, Any]) -> str:
    row = [f"{record['texts_per_second']:.1f}", f"{record['tokens_per_second']:.0f}", f"{record['one_text_ms']:.2f}"]
    single = f"one text of {record['one_text_tokens']} tokens, ms"
    lines = [
        report.conditions_line(record),
        f"{record['num_prompts']} texts of {record['input_len']} tokens, median of {record['repeat']}",
        report.table(["texts/s", "tokens/s", single], [row]),
    ]
    return "\n".join(lines)
