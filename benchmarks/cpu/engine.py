"""Runs one engine in a process of its own for run.py, which asks for one measurement after another, so that all engines
are measured in turns and a noisy minute affects all alike. Runs in the engine's own Python and imports nothing of ours.

    engine.py KIND MODEL DTYPE      KIND: kvasir, transformers, vllm, llamacpp

Every line read is a request for a workload, every line written begins with RESULT and is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

STARTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parent))

import workloads  # noqa: E402

Generate = Callable[[list[workloads.Request]], int]
THREADS = len(os.sched_getaffinity(0))
KV_BYTES = 256 << 20


def kvasir(model: str, dtype: str) -> Generate:
    from kvasir import LLM, SamplingParams

    quantization = None if dtype == "bf16" else dtype
    llm = LLM(
        model,
        dtype="bfloat16",
        quantization=quantization,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
    )

    def generate(requests: list[workloads.Request]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        return sum(len(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False))

    return generate


def transformers(model: str, dtype: str) -> Generate:
    """Its static batch, padded on the left; as wide as the workload."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    loaded.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(requests: list[workloads.Request]) -> int:
        longest, most = max(len(prompt) for prompt, _ in requests), max(n for _, n in requests)
        ids = torch.tensor([[1] * (longest - len(prompt)) + prompt for prompt, _ in requests])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
        out = loaded.generate(
            ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, eos_token_id=None,
            pad_token_id=1,
        )  # fmt: skip
        assert out.shape[1] == longest + most
        return sum(n for _, n in requests)  # what was asked for; the rest is padding

    return generate


def vllm(model: str, dtype: str) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype="bfloat16", max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False,
        disable_log_stats=True, skip_tokenizer_init=True,
    )  # fmt: skip

    def generate(requests: list[workloads.Request]) -> int:
        params = [
            SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        return sum(len(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False))

    return generate


def llamacpp(model: str, dtype: str) -> Generate:
    """llama.cpp's batch interface behind a small loop of continuous batching."""
    from llamacpp_loop import make_generate

    return make_generate(model, THREADS)


def peak_mib() -> int:
    """The most memory that this process and its children have held, summed."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (ValueError, OSError):
            continue
    tree = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    peaks = []
    for pid in tree:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        peaks += [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return sum(peaks) // 1024


def measure(generate: Generate, workload: str, salt: int) -> dict[str, float]:
    def clock(requests: list[workloads.Request]) -> float:
        began = time.perf_counter()
        count = generate(requests)
        assert count == sum(n for _, n in requests), f"{count} tokens came"
        return time.perf_counter() - began

    if workload == "W1":
        first = clock(workloads.w1(salt, 1))
        whole = clock(workloads.w1(salt + 500))
        return {"ttft_ms": first * 1e3, "ms_per_tok": (whole - first) * 1e3 / 63}
    requests = workloads.w2(salt) if workload == "W2" else workloads.w3(salt)
    return {"out_tok_s": sum(n for _, n in requests) / clock(requests)}


def answer(said: dict[str, object]) -> None:
    print("RESULT " + json.dumps(said), flush=True)


def main() -> None:
    kind, model, dtype = sys.argv[1:4]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("KVASIR_LOG_LEVEL", "WARNING")
    generate = {"kvasir": kvasir, "transformers": transformers, "vllm": vllm, "llamacpp": llamacpp}[kind](model, dtype)
    answer({"start_s": time.perf_counter() - STARTED})
    generate(workloads.w1(99, 8))
    for line in sys.stdin:
        workload, _, salt = line.strip().partition(" ")
        if workload == "stop":
            break
        if workload == "warm":
            generate(workloads.w2(97, 4))
            answer({})
        elif workload == "memory":
            answer({"peak_mib": peak_mib()})
        else:
            answer(measure(generate, workload, int(salt)))


if __name__ == "__main__":
    main()
