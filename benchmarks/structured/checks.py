"""Long checks of structured output, with more random cases than the tests have.

    python benchmarks/structured/checks.py ids --count 10000     # the same ids with jumps as by masks alone
    python benchmarks/structured/checks.py fuzz --count 10000    # an answer for every grammar, and in which time

`ids` makes small random models and gives each a few hundred random schemas, with seeds, penalties and several
completions. Blocks are few, so requests are preempted; the budget of a step is small, so prompts and jumps are cut into
chunks. Every request runs with jumps and by masks alone. `fuzz` compiles what the tests of arbitrary grammars draw.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from kvasir import LLM, SamplingParams, StructuredOutputsParams
from kvasir.engine.grammar_compile import compile_grammar
from kvasir.errors import RequestError
from kvasir.frontend.text.grammar import build_grammar
from tests.grammars import EOS, schemas, small_tokenizer, small_vocabulary, token_id
from tests.unit.frontend.test_structured import asked

PER_MODEL = 250  # requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("ids", "fuzz"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after this time")
    options = parser.parse_args()
    report = (ids if options.check == "ids" else fuzz)(options.count, time.monotonic() + options.seconds)
    print("RESULT " + json.dumps({"check": options.check, **report, "load": round(os.getloadavg()[0], 1)}))


def drawn(strategy: Any, count: int) -> list[Any]:
    found: list[Any] = []
    quiet = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))

    @quiet
    @given(strategy)
    def take(one: Any) -> None:
        found.append(one)

    take()
    return found


def fuzz(count: int, end: float) -> dict[str, Any]:
    seconds: list[float] = []
    answers = Counter[str]()
    slowest: Any = None
    for params in drawn(asked, count):
        if time.monotonic() > end:
            break
        start = time.perf_counter()
        try:
            grammar = build_grammar(StructuredOutputsParams(**params))
            for text in [grammar.text] if grammar.text else [text for _, text in grammar.tags]:
                compile_grammar(small_vocabulary(), text)
            answers["compiled"] += 1
        except RequestError:
            answers["refused"] += 1
        seconds.append(time.perf_counter() - start)
        slowest = params if seconds[-1] == max(seconds) else slowest
    ordered = sorted(seconds)
    times = {
        f"p{100 * share:g}_ms": round(1e3 * ordered[int(share * (len(ordered) - 1))], 2) for share in (0.5, 0.99, 1)
    }
    return {"grammars": len(seconds), **answers, **times, "slowest": str(slowest)[:100]}


def ids(count: int, end: float) -> dict[str, Any]:
    done = Counter[str]()
    asked_schemas = drawn(schemas, count)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        for first in range(0, len(asked_schemas), PER_MODEL):
            if time.monotonic() > end:
                break
            compare(directory, asked_schemas[first : first + PER_MODEL], random.Random(first), done)
    return dict(done)


def compare(model: str, some: list[Any], random: random.Random, done: Counter[str]) -> None:
    """Run requests for these schemas on one model, with jumps and without."""
    params = [sampling(schema, random) for schema in some]
    prompts = [{"prompt_token_ids": [random.randrange(3, 300) for _ in range(random.randrange(1, 60))]} for _ in some]
    settings: dict[str, Any] = {
        "dtype": "float32", "load_format": "dummy", "max_model_len": 256, "seed": random.randrange(1000),
        "block_size": 16, "num_gpu_blocks_override": random.randrange(20, 60), "max_num_seqs": random.randrange(2, 17),
        "max_num_batched_tokens": random.randrange(24, 64), "async_scheduling": random.random() < 0.5,
        "enable_prefix_caching": random.random() < 0.5,
    }  # fmt: skip
    with LLM(model, **settings) as llm:
        outputs = []
        for jumps in (True, False):
            llm.llm_engine.input_processor.structured.may_jump = jumps
            outputs.append(llm.generate(prompts, params, use_tqdm=False))
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    done["preemptions"] += int(metrics["kvasir:num_preemptions"])
    done["jumps"] += int(metrics["kvasir:guided_jumps"])
    for schema, one, other in zip(some, *outputs, strict=True):
        done["requests"] += 1
        for a, b in zip(one.outputs, other.outputs, strict=True):
            done["answers"] += 1
            done["same"] += list(a.token_ids) == list(b.token_ids) and a.finish_reason == b.finish_reason
            if a.finish_reason == "stop" and "\ufffd" not in a.text:
                jsonschema.validate(json.loads(a.text), schema)
                done["valid"] += 1


def sampling(schema: Any, random: random.Random) -> SamplingParams:
    style = random.choice(["spaced", "spaced", "compact", "flexible"])
    temperature = random.choice([0, 0.7, 1])
    return SamplingParams(
        temperature=temperature, seed=random.randrange(1 << 30), max_tokens=random.randrange(1, 120),
        top_p=random.choice([1, 0.9]), top_k=random.choice([0, 0, 20]),
        n=random.choice([1, 1, 2]) if temperature else 1,
        presence_penalty=random.choice([0, 0, 1]), repetition_penalty=random.choice([1, 1, 1.2]),
        structured_outputs=StructuredOutputsParams(json=schema, whitespace=style),
    )  # fmt: skip


def write_model(directory: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": token_id(EOS),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    small_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


if __name__ == "__main__":
    main()
