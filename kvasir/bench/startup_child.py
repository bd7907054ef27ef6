"""The process that `kvasir bench startup` measures: it loads a model, generates one token and reports the phases.

It runs as `python -c PROGRAM`. The time before `main` is the phase "interpreter".
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from kvasir.config import startup
from kvasir.errors import KvasirError

PROGRAM = """
import sys, time
entered = time.time()
from kvasir.bench.startup_child import main
main(entered, *sys.argv[1:])
"""
INTERPRETER = "interpreter"
PROMPT_TOKENS = 16
NEXT_TOKENS = 16


def main(entered: float, spawned: str, settings: str, result: str) -> None:
    """`spawned` is the time at which the parent started this process, in seconds since the epoch."""
    try:
        record = _measure(entered, float(spawned), json.loads(settings))
    except KvasirError as error:
        record = {"error": str(error)}
    Path(result).write_text(json.dumps(record), encoding="utf-8")
    sys.exit("error" in record)


def _measure(entered: float, spawned: float, settings: dict[str, Any]) -> dict[str, Any]:
    startup.seconds[INTERPRETER] = entered - spawned
    startup.seconds[startup.IMPORTS] = time.time() - entered  # of this module
    with startup.phase(startup.IMPORTS):
        from kvasir.config.args import EngineArgs
        from kvasir.entrypoints.llm import LLM
    with LLM.from_engine_args(EngineArgs(**settings)) as llm:
        config = llm.llm_engine.config
        with startup.phase(startup.FIRST_TOKEN):
            _generate(llm, 1, config.model.vocab_size)
        whole = time.time() - spawned
        began = time.perf_counter()
        _generate(llm, NEXT_TOKENS, config.model.vocab_size)
        following = time.perf_counter() - began
        from kvasir.bench import report

        return {
            "conditions": report.conditions(config),
            "load_format": config.load.load_format,
            "total": whole,
            "phases": dict(startup.seconds),
            "next_tokens": following,
        }


def _generate(llm: Any, count: int, vocab_size: int) -> None:
    from kvasir.frontend.requests.prompts import TokensPrompt
    from kvasir.sampling_params import SamplingParams

    prompt = TokensPrompt(prompt_token_ids=[token % vocab_size for token in range(1, PROMPT_TOKENS + 1)])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.generate(prompt, params, use_tqdm=False)
