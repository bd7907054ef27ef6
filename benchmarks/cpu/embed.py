"""Embeddings on a CPU: Kvasir against sentence-transformers, in turns within one process.

    python benchmarks/cpu/embed.py MODEL [--shape bge-base] [--texts 500] [--dtypes float32 bfloat16 int8] [--rounds 3]
        [--cpu-time] [--onnx] [--batches 16 32 64]

MODEL is a sentence-transformers directory with a BERT. With --shape bge-base its tokenizer is used with random weights
of BERT-base's sizes. sentence-transformers runs in the fastest of its settings here: float32 and bfloat16, sorted by
length, in batches of several sizes. Prints texts and tokens per second, the ratio to sentence-transformers' best, the
median latency of one short text, and the least cosine to sentence-transformers in float32. With --cpu-time the
process's CPU time counts instead of the clock's: with OMP_NUM_THREADS=1 it says something on a machine that others use.
--onnx adds ONNX Runtime, which fastembed and Text Embeddings Inference use on a CPU: the same model, exported here in
float32, with its nodes fused and with int8 weights, sorted by length, in the same batches. It needs onnx, onnxruntime.
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

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
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


class OnnxModel:
    """The model in ONNX Runtime: tokens in, the mean of the last hidden states out, of length 1."""

    def __init__(self, bert: torch.nn.Module, tokenizer: Any, folder: Path, int8: bool) -> None:
        import onnx
        import onnxruntime
        from onnxruntime.quantization import quantize_dynamic
        from onnxruntime.transformers import optimizer

        plain, fused, small = (str(folder / f"{name}.onnx") for name in ("plain", "fused", "int8"))
        if not Path(fused).is_file():
            export(bert, plain)
            config: Any = bert.config
            heads, size = config.num_attention_heads, config.hidden_size
            optimizer.optimize_model(plain, "bert", num_heads=heads, hidden_size=size).save_model_to_file(fused)
        if int8:
            quantize_dynamic(fused, small, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(small if int8 else fused, options, ["CPUExecutionProvider"])
        self.tokenizer = tokenizer

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for at in range(0, len(order), batch_size):
            chosen = order[at : at + batch_size]
            given = self.tokenizer([texts[i] for i in chosen], padding=True, truncation=True, return_tensors="np")
            (states,) = self.session.run(None, {name: given[name].astype(np.int64) for name in INPUTS})
            mask = given["attention_mask"][:, :, None].astype(np.float32)
            means = (states * mask).sum(1) / mask.sum(1)
            for i, mean in zip(chosen, means, strict=True):
                vectors[i] = mean / np.linalg.norm(mean)
        return np.array(vectors)


class HiddenStates(torch.nn.Module):
    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.bert(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state
        return states


def export(bert: torch.nn.Module, file: str) -> None:
    names, ids = (*INPUTS, "states"), torch.ones(2, 7, dtype=torch.long)
    torch.onnx.export(
        HiddenStates(bert).eval(),
        (ids, ids, ids * 0),
        file,
        input_names=list(INPUTS),
        output_names=["states"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in names},
        opset_version=17,
        dynamo=False,
    )


def add_onnx(model: str, folder: Path, batches: list[int], runs: dict[str, Callable[[list[str]], Any]]) -> None:
    import transformers

    bert = transformers.AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, model_max_length=max_length(model))
    for name in ("float32", "int8"):
        made = OnnxModel(bert, tokenizer, folder, name == "int8")
        for size in batches:
            runs[f"onnxruntime {name} {size}"] = lambda given, one=made, size=size: one.encode(given, size)


def max_length(model: str) -> int:
    return int(json.loads((Path(model) / "sentence_bert_config.json").read_text())["max_seq_length"])


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
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64], help="the other engines' batch sizes")
    args = parser.parse_args()
    logging.getLogger("kvasir").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.shape == "bge-base":
            random_bert(args.model, model := Path(folder))
        print(json.dumps(compare(str(model), args, Path(folder)), indent=1))


def compare(model: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    texts, clock = make_texts(args.texts), time.process_time if args.cpu_time else time.perf_counter
    runs: dict[str, Callable[[list[str]], Any]] = {}
    theirs: dict[torch.dtype, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        theirs[dtype] = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})
        for size in args.batches:
            runs[f"sentence-transformers {dtype} {size}".replace("torch.", "")] = (
                lambda given, one=theirs[dtype], size=size: one.encode(given, batch_size=size, show_progress_bar=False)
            )
    if args.onnx:
        add_onnx(model, folder, args.batches, runs)
    for name in args.dtypes:
        how = {"dtype": "bfloat16", "quantization": name} if name in ("int8", "int4") else {"dtype": name}
        llm = LLM(model, use_tqdm_on_load=False, **how)
        runs[f"kvasir {name}"] = lambda given, one=llm: one.embed(given, truncate_prompt_tokens=-1, use_tqdm=False)
    expected = theirs[torch.float32].encode(texts[:100], show_progress_bar=False)
    found: dict[str, Any] = {name: {"seconds": []} for name in runs}
    for name, run in runs.items():
        run(texts[:20])
        if not name.startswith("sentence"):
            made = run(texts[:100])
            ours = np.array([each.outputs.embedding for each in made]) if name.startswith("kvasir") else made
            found[name]["least cosine"] = float((ours * expected).sum(1).min())
    for _ in range(args.rounds):
        for name, run in runs.items():
            found[name]["seconds"].append(rate(lambda run=run: run(texts), clock))
    for name, run in runs.items():
        found[name]["ms of one text"] = round(1e3 * latency(lambda run=run: run([SHORT]), clock), 2)
    for peer in ("sentence-transformers", *(["onnxruntime"] if args.onnx else [])):
        peers = [each for name, each in found.items() if name.startswith(peer)]
        best, quickest = min(min(each["seconds"]) for each in peers), min(each["ms of one text"] for each in peers)
        for each in found.values():
            each[f"against the best of {peer}"] = round(best / min(each["seconds"]), 2)
            each[f"latency against the best of {peer}"] = round(each["ms of one text"] / quickest, 2)
    for each in found.values():
        each["texts/s"] = round(len(texts) / min(each["seconds"]), 1)
        each["seconds"] = [round(one, 2) for one in each["seconds"]]
    return {"threads": torch.get_num_threads(), "texts": len(texts), "runs": found}


if __name__ == "__main__":
    main()
