"""Kvasir's adapter for the peers' measure.py and its workloads. One process per engine configuration.

    python benchmarks/h200/bench_kvasir.py --model qwen3-0.6b [--only name,name] [--requests N] [--startup-only]

Lines that start with RESULT are JSON; the first one, of the start, also has the error of the engine's logits.
Environment: KVASIR_PEERS, where workloads.py and measure.py lie (default: ../shared/peers/vllm_h200, seen from the
repository); KVASIR_BENCH_SETTINGS, further engine settings as JSON; KVASIR_BENCH_REFERENCE=1, plain torch in place of
our kernels; MODEL_ROOT, where config.json files are written.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PEERS = Path(os.environ.get("KVASIR_PEERS") or ROOT.parent / "shared" / "peers" / "vllm_h200")
sys.path[:0] = [str(ROOT), str(PEERS), str(Path(__file__).parent)]

import measure  # noqa: E402
import workloads  # noqa: E402

REFERENCE = os.environ.get("KVASIR_BENCH_REFERENCE") == "1"


def build_llm(model: str, eager: bool, gpu_mem: float, max_model_len: int) -> Any:
    """An engine of the shape MODELS[model] with random weights, settings as vLLM was measured with."""
    from kvasir import LLM

    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_mem,
        "enforce_eager": eager,
    }
    if REFERENCE:
        settings["attention_backend"] = "torch"
    settings |= json.loads(os.environ.get("KVASIR_BENCH_SETTINGS") or "{}")
    root = os.environ.get("MODEL_ROOT") or tempfile.mkdtemp(prefix="kvasir-models-")
    return LLM(workloads.write_model_dir(model, root), **settings)


class KvasirEngine:
    def __init__(self, model: str, eager: bool, gpu_mem: float, max_model_len: int) -> None:
        started = time.perf_counter()
        import torch

        import kvasir.entrypoints.llm

        imported = time.perf_counter()
        self.llm = build_llm(model, eager, gpu_mem, max_model_len)
        constructed = time.perf_counter()
        self.generate([list(range(16))], [1], 0.0)
        first_token = seconds_since_process_start()
        import logits

        self.info = {
            "engine": "kvasir",
            "version": kvasir.__version__,
            "torch": torch.__version__,
            "model": model,
            "eager": eager,
            "import_s": round(imported - started, 2),
            "construct_s": round(constructed - imported, 2),
            "start_to_first_token_s": None if first_token is None else round(first_token, 2),
            "gpu_mem": gpu_mem,
            "kernels": "reference" if REFERENCE else "own",
            **self._settings(),
            "logits": logits.check(self.llm),
        }
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the check took

    def _settings(self) -> dict[str, Any]:
        config = self.llm.llm_engine.config
        return {
            "num_gpu_blocks": self.llm.llm_engine.client.stats().num_blocks,
            "block_size": config.cache.block_size,
            "prefix_caching": config.cache.enable_prefix_caching,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "async_scheduling": config.scheduler.async_scheduling,
            "max_model_len": config.model.max_model_len,
            "dtype": config.model.dtype,
            "device": config.device.device,
            "attention_backend": config.device.attention_backend,
        }

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        from kvasir import SamplingParams

        params = [
            SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in max_tokens
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()


def reference_kernels() -> AbstractContextManager[None]:
    from kvasir import kernels

    return kernels.reference_only()


def seconds_since_process_start() -> float | None:
    """On Linux, to a hundredth; None elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    with reference_kernels() if REFERENCE else nullcontext():
        measure.main(KvasirEngine)
