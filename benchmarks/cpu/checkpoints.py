"""Quantized checkpoints against `quantization=int4` and `int8` on a CPU: CPU time of a decode step and of a prompt.

    OMP_NUM_THREADS=1 python benchmarks/cpu/checkpoints.py [--rounds 7]

All models have random weights in the shape of Qwen2.5-0.5B and one thread, live in one process and are measured in
turns, by the process's CPU time, so that other work on the machine affects all alike. Checkpoints keep their head in
bfloat16; here it is quantized as that of int4 and int8 is, so that both compute the same sizes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import workloads

from kvasir import LLM, SamplingParams

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# Name -> settings, the checkpoint's quantization, and what it is compared with.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "int4": ({"quantization": "int4"}, None, "int4"),
    "gptq 4 bits": ({"head_quantization": "int4"}, GPTQ, "int4"),
    "awq": ({"head_quantization": "int4"}, AWQ, "int4"),
    "int8": ({"quantization": "int8"}, None, "int8"),
    "gptq 8 bits": ({"head_quantization": "int8"}, {**GPTQ, "bits": 8}, "int8"),
    "fp8": ({"head_quantization": "int8"}, FP8, "int8"),
}


def start(place: Path, settings: dict[str, Any], quantization: dict[str, Any] | None) -> LLM:
    place.mkdir()
    config = {**SHAPE, **({} if quantization is None else {"quantization_config": quantization})}
    (place / "config.json").write_text(json.dumps(config))
    return LLM(
        str(place), load_format="dummy", device="cpu", skip_tokenizer_init=True, max_model_len=512, cpu_threads=1,
        kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, use_tqdm_on_load=False, **settings,
    )  # fmt: skip


def seconds(llm: LLM, requests: list[workloads.Request]) -> float:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
    started = time.process_time()
    llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    logging.getLogger("kvasir").setLevel(logging.WARNING)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory() as folder:
        llms = {
            name: start(Path(folder) / str(number), settings, quantization)
            for number, (name, (settings, quantization, _)) in enumerate(MODELS.items())
        }
        for salt in range(rounds + 1):  # the first warms up
            for name, llm in llms.items():
                first = seconds(llm, workloads.w1(salt, 1))
                token = (seconds(llm, workloads.w1(salt + 1000, 17)) - first) / 16
                found[name] += [(first, token)] if salt else []
        for name, (_, _, other) in MODELS.items():
            first, token = (statistics.median(part) for part in zip(*found[name], strict=True))
            pairs = list(zip(found[name], found[other], strict=True))
            ratios = [statistics.median(ours[at] / theirs[at] for ours, theirs in pairs) for at in (0, 1)]
            print(
                f"{name:12} prompt of 128: {first * 1e3:6.0f} ms, {ratios[0]:.2f} of {other}; "
                f"token: {token * 1e3:5.1f} ms, {ratios[1]:.2f} of {other}"
            )


if __name__ == "__main__":
    main()
