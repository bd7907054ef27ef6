"""Pooling models on a GPU, with random weights: prints a JSON object for each part.

    python benchmarks/h200/embed.py

- BERT-base: 4,096 texts of 16 to 400 tokens, all at once: tokens per second, and their share of the floor, which is the
  time of the matrix products at 790 TFLOP/s; and the latency of one text of 16 tokens.
- E5-Mistral (Mistral-7B): 512 texts of 128 to 512 tokens through the embedder, and the same prompts with one generated
  token each: the ratio of the two.
- The encoder's attention alone, against torch's attention on padded batches of the same texts.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvasir import LLM, SamplingParams, kernels

PEAK = 790e12
BERT = {
    **{"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 768},
    **{"num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu"},
    **{"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "dtype": "float32"},
}
MISTRAL = {
    **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
    **{"tie_word_embeddings": False, "dtype": "bfloat16"},
}


def best(run: Callable[[], Any], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def texts(count: int, low: int, high: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(1000, 30000) for _ in range(rng.randint(low, high))] for _ in range(count)]


def load(config: dict[str, Any], folder: str, **settings: Any) -> LLM:
    Path(folder, "config.json").write_text(json.dumps(config))
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **settings)


def bert() -> dict[str, Any]:
    given = texts(4096, 16, 400)
    num_tokens = sum(map(len, given))
    with tempfile.TemporaryDirectory() as folder, load(BERT, folder) as llm:
        llm.encode(given[:512], use_tqdm=False)
        seconds = best(lambda: llm.encode(given, use_tqdm=False))
        single = statistics.median(best(lambda: llm.encode([given[0][:16]], use_tqdm=False), 1) for _ in range(50))
        late = llm.llm_engine.client.stats().late_compilations
    floor = 2 * 12 * (4 * 768 * 768 + 2 * 768 * 3072) * num_tokens / PEAK
    return {
        "tokens": num_tokens,
        "tokens/s": num_tokens / seconds,
        "share of the floor": floor / seconds,
        "ms of one text": 1e3 * single,
        "late compilations": late,
    }


def mistral() -> dict[str, Any]:
    given = texts(512, 128, 512)
    num_tokens = sum(map(len, given))
    seconds = {}
    for runner in ("generate", "pooling"):
        with tempfile.TemporaryDirectory() as folder, load(MISTRAL, folder, runner=runner) as llm:
            one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

            def run(llm: LLM = llm, runner: str = runner, one: SamplingParams = one) -> None:
                llm.reset_prefix_cache()
                if runner == "pooling":
                    llm.encode(given, use_tqdm=False)
                else:
                    llm.generate(given, one, use_tqdm=False)  # type: ignore[arg-type]

            run()
            seconds[runner] = best(run)
    return {
        "tokens": num_tokens,
        "prefill tokens/s": num_tokens / seconds["generate"],
        "embedding tokens/s": num_tokens / seconds["pooling"],
        "ratio": seconds["generate"] / seconds["pooling"],
    }


def attention() -> dict[str, Any]:
    found = {}
    for name, low, high in (("short", 8, 32), ("mixed", 16, 400), ("long", 480, 512)):
        lengths = np.sort(np.random.default_rng(1).integers(low, high + 1, 64)).astype(np.int32)
        starts = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device="cuda")
        qkv = torch.randn(int(lengths.sum()), 36, 64, device="cuda", dtype=torch.bfloat16)
        parts = qkv.split(12, dim=1)
        padded = torch.randn(3, 64, 12, int(lengths.max()), 64, device="cuda", dtype=torch.bfloat16)
        ours = partial(kernels.encoder_attention, *parts, starts, lengths, 0.125)
        theirs = partial(F.scaled_dot_product_attention, *padded)
        found[name] = {"ours us": 1e6 * _on_device(ours), "torch, padded us": 1e6 * _on_device(theirs)}
    return found


def _on_device(run: Callable[[], Any]) -> float:
    for _ in range(5):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(50):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 50 / 1e3


if __name__ == "__main__":
    logging.getLogger("kvasir").setLevel(logging.WARNING)
    torch.manual_seed(0)
    for name, measure in (("bert-base", bert), ("attention", attention), ("e5-mistral", mistral)):
        print(json.dumps({name: measure()}), flush=True)
