"""Quantized products and engines on a GPU, all in one call: right, and how fast.

    python benchmarks/quantization/h200.py [--seconds 480] [--out results.json] [--only PART] [--engines awq,fp8]

1. Kernels in bfloat16 against float64 on the same codes, for each kind, group and number of rows; it stops if one is
   wrong.
2. Products of Llama-3.1-8B's shapes by rows of x (1, 16, 64, 256, 2048), each kind beside bfloat16, in microseconds:
   medians of CUDA graphs of 20 launches over weights that together exceed the second-level cache.
3. The 8B shape with random weights in each format: decode steps of 1, 16 and 64 rows in milliseconds, the rate of
   prefill, and output tokens per second of 512 requests of 512 tokens in and 256 out; counts kernels that were
   compiled while requests waited, which must be none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvasir import kernels
from kvasir.quantization.coded import Coded, Coding, RandomCoding

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 16, 64, 256, 2048)
KINDS: dict[str, RandomCoding] = {
    "int4 g128": RandomCoding(Coding("u4", 128), has_minimum=True),
    "int4 g128 symmetric": RandomCoding(Coding("u4", 128, 8)),
    "q4_k": RandomCoding(Coding("u4", 32), has_minimum=True),
    "q6_k": RandomCoding(Coding("u6", 16, 32)),
    "int8 rows": RandomCoding(Coding("i8", 0)),
    "fp8 rows": RandomCoding(Coding("e4m3", 0, inputs="e4m3")),
    "fp8 blocks": RandomCoding(Coding("e4m3", 128)),
    "nvfp4": RandomCoding(Coding("e2m1", 16), has_row=True),
    "mxfp4": RandomCoding(Coding("e2m1", 32)),
    "nf4": RandomCoding(Coding("nf4", 64)),
}
GPU = torch.device("cuda")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16",
}  # fmt: skip
_FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
ENGINES: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"},
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": _FLOAT, "input_activations": _FLOAT}},
        "ignore": ["lm_head"],
    },
    "fp8 block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}  # fmt: skip


def make(kind: RandomCoding, outputs: int, inputs: int) -> Coded:
    """Random weights, as a layer holds them. Scales differ, or all would be rounded alike in bfloat16."""
    made = kind.make(outputs, inputs, GPU)
    factors = torch.rand_like(made.scale) + 0.5
    minimum = None if made.minimum is None else made.minimum * factors
    return replace(made, scale=made.scale * factors, minimum=minimum).packed().centered().narrowed(rounds=True)


def check(kind: str) -> dict[str, float]:
    """The largest relative error by number of rows."""
    found = {}
    for rows in (1, 2, 16, 17, 64, 65, 256, 300):
        matrix = make(KINDS[kind], 1027 if KINDS[kind].coding.inputs == "" else 1024, 2048)
        x = torch.randn(rows, 2048, device=GPU, dtype=torch.bfloat16)
        wanted = x.double() @ matrix.expand().double().T
        got = kernels.coded_linear(x, matrix)
        found[str(rows)] = float((got.double() - wanted).norm() / wanted.norm())
    return found


def timed(run: Callable[[int], object], sets: int, launches: int = 20) -> float:
    """Microseconds of one launch, in a CUDA graph that goes through the sets of weights."""
    for number in range(sets):
        run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            run(number % sets)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return statistics.median(times)


def time_products(kind: str | None, rows: int, shape: tuple[int, int]) -> float:
    outputs, inputs = shape
    x = torch.randn(rows, inputs, device=GPU, dtype=torch.bfloat16)
    if kind is None:
        sets = max(2, 240_000_000 // (outputs * inputs * 2))
        plain = [torch.randn(outputs, inputs, device=GPU, dtype=torch.bfloat16) for _ in range(sets)]
        return timed(lambda number: kernels.linear(x, plain[number]), sets)
    first = make(KINDS[kind], outputs, inputs)
    sets = max(2, 240_000_000 // first.nbytes)
    coded = [first, *(make(KINDS[kind], outputs, inputs) for _ in range(sets - 1))]
    return timed(lambda number: kernels.coded_linear(x, coded[number]), sets)


def time_engine(config: dict[str, Any] | None) -> dict[str, float]:
    from kvasir import LLM, SamplingParams

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        described = LLAMA_8B if config is None else {**LLAMA_8B, "quantization_config": config}
        (Path(place) / "config.json").write_text(json.dumps(described), encoding="utf-8")
        began = time.perf_counter()
        options: dict[str, Any] = {"max_model_len": 4096, "enable_prefix_caching": False, "max_num_seqs": 512}
        with LLM(place, load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, **options) as llm:
            found["start s"] = time.perf_counter() - began

            def run(count: int, prompt: int, tokens: int) -> float:
                params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
                prompts = [{"prompt_token_ids": [(i * 7 + j) % 1000 + 3 for j in range(prompt)]} for i in range(count)]
                began = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - began

            for batch in (1, 16, 64):
                run(batch, 256, 8)
                short, long = (min(run(batch, 256, tokens) for _ in range(3)) for tokens in (16, 144))
                found[f"b{batch} ms"] = (long - short) / 128 * 1000
            run(16, 2048, 1)
            found["prefill tok/s"] = 16 * 2048 / min(run(16, 2048, 1) for _ in range(3))
            run(512, 512, 8)
            found["512 x 512 -> 256 tok/s"] = 512 * 256 / run(512, 512, 256)
            found["late compilations"] = float(kernels.late_compilations())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480, help="no new part begins after this time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("check", "products", "engines"))
    parser.add_argument("--engines", type=lambda text: text.split(","), default=list(ENGINES))
    arguments = parser.parse_args()
    began, results = time.perf_counter(), {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def report(part: str, name: str, value: object) -> bool:
        results.setdefault(part, {})[name] = value  # type: ignore[attr-defined]
        print(part, name, json.dumps(value), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        return time.perf_counter() - began < arguments.seconds

    if arguments.only in (None, "check"):
        for kind in KINDS:
            errors = check(kind)
            # bfloat16 rounds the result; inputs of 8 bits lose more
            limit = 0.05 if KINDS[kind].coding.inputs else 8e-3
            report("check", kind, errors)
            if not max(errors.values()) < limit:
                raise SystemExit(f"{kind} is wrong: {errors}")
    if arguments.only in (None, "engines"):
        for name in arguments.engines:
            if not report("engines", name, time_engine(ENGINES[name])):
                return
    if arguments.only in (None, "products"):
        for rows in ROWS:
            for kind in (None, *KINDS):
                times = {name: round(time_products(kind, rows, shape), 1) for name, shape in SHAPES.items()}
                if not report(f"products of {rows} rows, us", kind or "bf16", times):
                    return


if __name__ == "__main__":
    main()
