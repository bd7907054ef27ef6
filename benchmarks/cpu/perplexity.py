"""Measures the cost of quantizing: a model's perplexity on a fixed text, for each format of weights and cache.

    python benchmarks/cpu/perplexity.py MODEL [--text LICENSE] [--tokens 4096] [--ways bf16 int4]

The text is cut into pieces of 512 tokens; every token but a piece's first counts. The second figure is the largest
difference of one token's log-probability from the first way's.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from kvasir import LLM, SamplingParams

LENGTH = 512
WAYS: dict[str, dict[str, Any]] = {
    "plain torch, bf16": {"attention_backend": "torch", "quantization": "none"},
    "bf16": {"quantization": "none"},
    "bf16, 8-bit cache": {"quantization": "none", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, 8-bit cache": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "fp8_block": {"quantization": "fp8_block"},
    "as the GGUF file has them": {"quantization": "gguf"},
}


def log_probabilities(llm: LLM, text: str, limit: int) -> list[float]:
    ids = llm.get_tokenizer().encode(text)[:limit]
    pieces = [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH) if len(ids) - at > 1]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    for piece, output in zip(pieces, llm.generate([{"prompt_token_ids": p} for p in pieces], params), strict=True):
        assert output.prompt_logprobs is not None
        for token, scores in zip(piece[1:], output.prompt_logprobs[1:], strict=True):
            assert scores is not None
            found.append(scores[token].logprob)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent.parent / "LICENSE")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    is_gguf = arguments.model.endswith(".gguf")
    first: list[float] | None = None
    for name in arguments.ways:
        settings = WAYS[name]
        if settings["quantization"] == "gguf" and not is_gguf:
            continue
        with LLM(
            arguments.model, dtype="bfloat16", max_model_len=LENGTH + 8, use_tqdm_on_load=False, **settings
        ) as llm:
            found = log_probabilities(llm, text, arguments.tokens)
        first = first or found
        perplexity = math.exp(-sum(found) / len(found))
        largest = max(abs(new - old) for new, old in zip(found, first, strict=True))
        print(f"{name:26s} {perplexity:8.3f} {largest:6.2f}", flush=True)


if __name__ == "__main__":
    main()
