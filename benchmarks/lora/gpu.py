"""What adapters cost on a GPU, all in one call: the step of 64 decoding requests with none, 1, 8 and 64 adapters, a
large batch with 8, and the longest gap between tokens while an adapter is loaded.

    python -m benchmarks.lora.gpu [--shape 8b] > adapters.json

The model has the shape of Llama 3.1 8B and random weights (load_format=dummy), in bfloat16; adapters have rank 16 on
all linear layers. Prints one JSON object. Limits for an H200: base requests with adapters enabled at most +1 % over one
without, 1 adapter +8 %, 8 adapters +12 %, 64 distinct ones 7.2 ms; 512 requests with 8 adapters at least 0.9 of the
base's throughput; no gap over 15 ms beside the step while a load runs. Everything must have run as graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lora.adapters import make_adapters
from kvasir import LLM, LoRARequest, SamplingParams

SHAPES = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    },
}  # fmt: skip
RANK = 16


def write_config(folder: Path, shape: str) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False}
    config |= {"torch_dtype": "bfloat16", **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_llm(path: Path, device: str | None, **settings: Any) -> LLM:
    more = {} if device is None else {"device": device}
    return LLM(
        str(path), load_format="dummy", skip_tokenizer_init=True, generation_config="kvasir", max_model_len=2048,
        max_num_seqs=512, use_tqdm_on_load=False, enable_prefix_caching=False, **more, **settings,
    )  # fmt: skip


def prompts(count: int, length: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [(i * 7 + j) % 500 for j in range(length)]} for i in range(count)]


def step_times(
    llm: LLM, adapters: list[LoRARequest | None], tokens: int, load: LoRARequest | None = None
) -> list[float]:
    """Seconds of each step in which all rows decode. With `load`, a request for it joins half way."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i, (prompt, adapter) in enumerate(zip(prompts(len(adapters), 128), adapters, strict=True)):
        engine.add_request(f"{time.perf_counter()}-{i}", prompt, params, lora_request=adapter)
    stats, times = engine.client.stats, []
    while stats().num_running < len(adapters):
        engine.step()
    for _ in range(5):  # prompts in flight
        engine.step()
    for step in range(tokens - 20):
        if load is not None and step == (tokens - 20) // 2:
            engine.add_request("late", prompts(1, 1)[0], SamplingParams(max_tokens=1), lora_request=load)
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    while engine.has_unfinished_requests():
        engine.step()
    return times


def throughput(llm: LLM, adapters: list[LoRARequest | None]) -> float:
    """Output tokens per second of a batch."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts(len(adapters), 128), params, lora_request=adapters, use_tqdm=False)
    return 128 * len(adapters) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default=None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--most", type=int, default=None, help="adapters; if unset, as many as rows")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=220)
    args = parser.parse_args()
    most = args.most or args.rows
    found: dict[str, Any] = {"shape": args.shape, "rank": RANK, "rows": args.rows}
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name), args.shape)
        with make_llm(folder, args.device) as plain:
            found["without adapters, ms"] = 1e3 * median(step_times(plain, [None] * args.rows, args.tokens))
            found["batch without adapters, tokens/s"] = max(throughput(plain, [None] * args.batch) for _ in range(2))
        with make_llm(folder, args.device, enable_lora=True, max_loras=args.rows, max_lora_rank=RANK) as llm:
            targets = llm.llm_engine.client.call("resource_targets")
            paths = make_adapters(targets, folder / "adapters", most + 1, RANK)
            *own, late = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
            for adapter in own:  # all loads before anything is measured
                llm.generate(prompts(1, 1), SamplingParams(max_tokens=1), lora_request=adapter, use_tqdm=False)
            for count in sorted({0, 1, 8, most}):
                asked = [own[i % count] if count else None for i in range(args.rows)]
                found[f"{count} adapters, ms"] = 1e3 * median(step_times(llm, asked, args.tokens))
            for count in (0, 8):
                asked = [own[i % count] if count else None for i in range(args.batch)]
                found[f"batch with {count} adapters, tokens/s"] = max(throughput(llm, asked) for _ in range(2))
            half: list[LoRARequest | None] = [None] * args.rows
            quiet = step_times(llm, half, args.tokens)
            loading = step_times(llm, half, args.tokens, load=late)
            found["longest step, ms"] = 1e3 * max(quiet)
            found["longest step while an adapter is loaded, ms"] = 1e3 * max(loading)
            core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
            graphs = core.executor.runner.graphs
            found["late compilations"] = core.graphs.use.late_compilations
            found["adapted graph replays"] = None if graphs is None else graphs.stats.changed_steps
            found["adapted steps"] = core.executor.runner.stats.changed_steps
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
