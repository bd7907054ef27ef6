"""Embeddings on a CPU: Kvasir against sentence-transformers, in turns within one process.

    python benchmarks/cpu/embed.py MODEL [--shape bge-base] [--texts 500] [--dtypes float32 bfloat16 int8] [--rounds 3]
        [--cpu-time]

MODEL is a sentence-transformers directory with a BERT. With --shape bge-base its tokenizer is used with random weights
of BERT-base's sizes. sentence-transformers runs in the fastest of its settings here: float32 and bfloat16, sorted by
length, in batches of 16, 32 and 64. Prints texts and tokens per second, the ratio to sentence-transformers' best, the
median latency of one short text, and the least cosine to sentence-transformers in float32. With --cpu-time the
process's CPU time counts instead of the clock's: with OMP_NUM_THREADS=1 it says something on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir import LLM

SHORT = "How do I reset my password?"
WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend
""".split()  # noqa: SIM905


def make_texts(count: int) -> list[str]:
    """Texts of 5 to 250 words, most of them short."""
    rng = random.Random(1)
    return [" ".join(rng.choices(WORDS, k=int(5 + 245 * rng.random() ** 3))) for _ in range(count)]


def random_bert(source: Path, target: Path) -> None:
    """BERT-base's sizes with random weights, and the tokenizer and pooling of `source`."""
    import transformers

    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    transformers.BertModel(transformers.BertConfig(vocab_size=vocabulary), add_pooling_layer=False).save_pretrained(
        target
    )


def rate(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return clock() - started


def latency(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    return statistics.median(rate(run, clock) for _ in range(15))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", choices=("own", "bge-base"), default="own")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    logging.getLogger("kvasir").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.shape == "bge-base":
            random_bert(args.model, model := Path(folder))
        print(json.dumps(compare(str(model), args), indent=1))


def compare(model: str, args: argparse.Namespace) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    texts, clock = make_texts(args.texts), time.process_time if args.cpu_time else time.perf_counter
    runs: dict[str, Callable[[list[str]], Any]] = {}
    theirs: dict[torch.dtype, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        theirs[dtype] = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})
        for size in (16, 32, 64):
            runs[f"sentence-transformers {dtype} {size}".replace("torch.", "")] = (
                lambda given, one=theirs[dtype], size=size: one.encode(given, batch_size=size, show_progress_bar=False)
            )
    for name in args.dtypes:
        how = {"dtype": "bfloat16", "quantization": name} if name in ("int8", "int4") else {"dtype": name}
        llm = LLM(model, use_tqdm_on_load=False, **how)
        runs[f"kvasir {name}"] = lambda given, one=llm: one.embed(given, truncate_prompt_tokens=-1, use_tqdm=False)
    expected = theirs[torch.float32].encode(texts[:100], show_progress_bar=False)
    found: dict[str, Any] = {name: {"seconds": []} for name in runs}
    for name, run in runs.items():
        run(texts[:20])
        if name.startswith("kvasir"):
            ours = np.array([each.outputs.embedding for each in run(texts[:100])])
            found[name]["least cosine"] = float((ours * expected).sum(1).min())
    for _ in range(args.rounds):
        for name, run in runs.items():
            found[name]["seconds"].append(rate(lambda run=run: run(texts), clock))
    for name, run in runs.items():
        found[name]["ms of one text"] = round(1e3 * latency(lambda run=run: run([SHORT]), clock), 2)
    best = min(min(each["seconds"]) for name, each in found.items() if name.startswith("sentence"))
    quickest = min(each["ms of one text"] for name, each in found.items() if name.startswith("sentence"))
    for each in found.values():
        each["texts/s"] = round(len(texts) / min(each["seconds"]), 1)
        each["against the best"] = round(best / min(each["seconds"]), 2)
        each["latency against the best"] = round(each["ms of one text"] / quickest, 2)
        each["seconds"] = [round(one, 2) for one in each["seconds"]]
    return {"threads": torch.get_num_threads(), "texts": len(texts), "runs": found}


if __name__ == "__main__":
    main()
