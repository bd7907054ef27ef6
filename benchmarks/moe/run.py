"""Checks and times experts and latent attention on a GPU, all in one call:

    PYTHONPATH=. python benchmarks/moe/run.py [--parts check,kernels,models] [--models NAME,NAME] [--seconds 540]

check    the kernels in bfloat16 against float64 (small shapes) and float32 (real ones); a wrong one ends the run
kernels  microseconds of a layer's experts and of attention over a latent cache, with TB/s or TFLOP/s
models   whole engines with random weights that route evenly: decode steps of 1, 16 and 64 rows, 512 requests of 512
         tokens in and 256 out, prefill of 128 x 2048 tokens
Each result is a line of JSON after the word RESULT. Parts that --seconds leaves no time for are named at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # run it from a checkout without installing

from kvasir.attention.base import AttentionBatch
from kvasir.attention.triton import TritonAttention
from kvasir.kernels import reference
from kvasir.kernels.triton.experts import experts, route
from kvasir.kernels.triton.latent import latent_decode
from kvasir.kernels.triton.one_row_experts import one_row_experts
from kvasir.kernels.triton.paged_decode import Workspace

COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16", "rms_norm_eps": 1e-6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": COMMON
    | {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        **{"norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0},
    },
    "deepseek-v2-lite": COMMON
    | {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048},
        **{"intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_hidden_layers": 27, "num_attention_heads": 16},
        **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 163840, "rope_theta": 10000},
        "rope_scaling": {
            **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707},
            **{"mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
        },
    },
    "gpt-oss-20b": COMMON
    | {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64},
        **{"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128, "vocab_size": 201088},
        **{"max_position_embeddings": 131072, "rope_theta": 150000.0, "attention_bias": True},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        },
    },
}
# hidden size, inner size, experts, experts of a token, activation, biases
LAYERS: dict[str, tuple[int, int, int, int, Any, bool]] = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, "silu", False),
    "deepseek-v2-lite": (2048, 1408, 64, 6, "silu", False),
    "gpt-oss-20b": (2880, 2880, 32, 4, (1.702, 7.0), True),
}
BF16, DEVICE = torch.bfloat16, "cuda"
LATENT, ROTARY, PLAIN, VALUE, BLOCK = 512, 64, 128, 128, 64
TOLERANCE = 1.2e-2  # of bfloat16's rounding, three products deep


def report(**line: Any) -> None:
    print("RESULT", json.dumps(line), flush=True)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def microseconds(call: Callable[[], object], calls: int = 10, replays: int = 15) -> float:
    """Of one call, from replays of a graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return median(times)


# ---------------------------------------------------------------- experts


class Layer:
    """The experts of one layer, and tokens that are spread evenly over them."""

    def __init__(self, name: str) -> None:
        self.hidden, self.inner, self.count, self.top_k, self.activation, bias = LAYERS[name]
        size = {"device": DEVICE, "dtype": BF16}
        self.gate_up = torch.randn(self.count, 2 * self.inner, self.hidden, **size) / self.hidden**0.5
        self.down = torch.randn(self.count, self.hidden, self.inner, **size) / self.inner**0.5
        self.gain = torch.ones(self.hidden, **size)
        self.biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if bias:
            self.biases = (
                torch.randn(self.count, 2 * self.inner, **size),
                torch.randn(self.count, self.hidden, **size),
            )

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(count, self.hidden, device=DEVICE, dtype=BF16)
        weights, chosen = route(torch.randn(count, self.count, device=DEVICE), self.top_k, "softmax", normalise=True)
        return x, weights, chosen

    def run(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, parts: bool = False) -> torch.Tensor:
        return experts(x, weights, chosen, self.gate_up, self.down, self.activation, *self.biases, parts)

    def run_one_row(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """With the norm before and the residual after."""
        args = x, weights, chosen, self.gate_up, self.down, self.activation, *self.biases
        return one_row_experts(*args, gain=self.gain, eps=1e-6)


def check_experts(name: str) -> bool:
    layer, worst = Layer(name), 0.0
    wide = [None if bias is None else bias.float() for bias in layer.biases]
    for count in (1, 3, 16, 64, 300, 1500, 5000):
        x, weights, chosen = layer.tokens(count)
        got = layer.run(x, weights, chosen)
        some = torch.randperm(count, device=DEVICE)[:48]  # in float32 all experts do not fit beside each other
        wanted = torch.zeros(len(some), layer.hidden, device=DEVICE)
        for line, token in enumerate(some.tolist()):
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                both = layer.gate_up[expert].float() @ x[token].float()
                both = both if wide[0] is None else both + wide[0][expert]
                y = layer.down[expert].float() @ reference.gated_activation(both[None], layer.activation)[0]
                wanted[line] += weight * (y if wide[1] is None else y + wide[1][expert])
        worst = max(worst, error(got[some], wanted))
        alone = layer.run(x[:1], weights[:1], chosen[:1])
        worst = max(worst, error(got[:1], alone))
    normed = reference.rms_norm(x[:1], layer.gain, 1e-6)
    whole = x[:1].float() + layer.run(normed, weights[:1], chosen[:1]).float()
    worst = max(worst, error(layer.run_one_row(x[:1], weights[:1], chosen[:1]), whole))
    report(part="check", what=f"experts {name}", error=worst, ok=worst < TOLERANCE)
    return worst < TOLERANCE


def check_routes() -> bool:
    ok = True
    for count, top_k, groups in ((128, 8, 1), (64, 6, 1), (256, 8, 8)):
        logits, correction = torch.randn(500, count, device=DEVICE), torch.randn(count, device=DEVICE) * 0.1
        how = dict(groups=groups, top_groups=max(1, groups // 2), by_two=groups > 1, normalise=True, scale=2.5)
        scoring = "sigmoid" if groups > 1 else "softmax"
        got = route(logits, top_k, scoring, correction if groups > 1 else None, **how)
        wanted = reference.route(logits, top_k, scoring, correction if groups > 1 else None, **how)
        same = float((got[1] == wanted[1]).float().mean())
        ok &= same > 0.999 and error(got[0], wanted[0]) < 1e-3
        report(part="check", what=f"route {count}/{top_k}/{groups}", same_experts=same, ok=ok)
    return ok


def time_experts(name: str) -> None:
    layer = Layer(name)
    each = 3 * layer.inner * layer.hidden  # weights of an expert
    one = layer.tokens(1)
    us = microseconds(lambda: layer.run_one_row(*one))
    report(
        part="kernels", what=f"experts {name}, one row with norm and residual", us=round(us, 1),
        tb_per_s=round(layer.top_k * each * 2 / us / 1e6, 2),
    )  # fmt: skip
    for count in (1, 4, 16, 64, 256, 1024, 4096, 16384):
        x, weights, chosen = layer.tokens(count)
        touched = int(chosen.unique().numel())
        us = microseconds(lambda x=x, w=weights, c=chosen: layer.run(x, w, c, True), 4 if count > 512 else 10)
        report(
            part="kernels", what=f"experts {name}", tokens=count, experts_touched=touched, us=round(us, 1),
            tb_per_s=round(touched * each * 2 / us / 1e6, 2),
            tflop_per_s=round(2 * count * layer.top_k * each / us / 1e6, 1),
        )  # fmt: skip


# ---------------------------------------------------------------- attention over a latent cache


class Latents:
    """Sequences in a paged cache of vectors; those that run one token come first."""

    def __init__(self, chunks: list[int], lengths: list[int], heads: int) -> None:
        blocks = [-(-n // BLOCK) for n in lengths]
        self.cache = torch.randn(sum(blocks), BLOCK, LATENT + ROTARY, device=DEVICE).to(BF16)
        numbers = torch.randperm(sum(blocks), dtype=torch.int32)
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, some in enumerate(numbers.split(blocks)):
            self.tables[row, : len(some)] = some
        self.tables = self.tables.to(DEVICE)
        self.chunks, self.lengths = chunks, lengths
        self.starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
        self.rows = torch.arange(len(lengths), device=DEVICE)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.query = torch.randn(int(self.starts[-1]), heads, PLAIN + ROTARY, device=DEVICE).to(BF16)
        self.up = (torch.randn(heads, PLAIN + VALUE, LATENT, device=DEVICE) / LATENT**0.5).to(BF16)

    def attend(self) -> torch.Tensor:
        batch = AttentionBatch(
            slots=self.rows, query_start=torch.from_numpy(self.starts).to(DEVICE), seq_lens=self.lens,
            tables=self.tables, rows=self.rows, num_decodes=sum(n == 1 for n in self.chunks),
            query_lens=np.array(self.chunks, np.int32), seq_bounds=np.array(self.lengths, np.int32), block_size=BLOCK,
        )  # fmt: skip
        scale = (PLAIN + ROTARY) ** -0.5
        return TritonAttention().forward_latent(self.query, self.cache, self.up, batch, scale=scale)

    def exact(self, row: int) -> torch.Tensor:
        """One sequence in float64."""
        part, length = slice(self.starts[row], self.starts[row + 1]), self.lengths[row]
        seen = self.cache[self.tables[row].long()].flatten(0, 1)[:length].double()
        both = torch.einsum("nl,hdl->nhd", seen[:, :LATENT], self.up.double())
        query, count = self.query[part].double(), self.chunks[row]
        scores = torch.einsum("mhd,nhd->hmn", query[..., :PLAIN], both[..., :PLAIN])
        scores = (scores + torch.einsum("mhd,nd->hmn", query[..., PLAIN:], seen[:, LATENT:])) * (PLAIN + ROTARY) ** -0.5
        hidden = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(hidden.to(DEVICE), -torch.inf).softmax(-1)
        return torch.einsum("hmn,nhd->mhd", weights, both[..., PLAIN:])


def check_latents(heads: int) -> bool:
    case = Latents([1, 1, 1, 7, 130, 300], [1, 700, 3000, 40, 130, 900], heads)
    got = case.attend()
    worst = max(error(got[case.starts[i] : case.starts[i + 1]], case.exact(i)) for i in range(len(case.lengths)))
    report(part="check", what=f"latent attention, {heads} heads", error=worst, ok=worst < TOLERANCE)
    return worst < TOLERANCE


def time_latents(heads: int, sequences: int, length: int) -> None:
    case = Latents([1] * sequences, [length] * sequences, heads)
    query = torch.randn(sequences, heads, LATENT, device=DEVICE).to(BF16)
    out, workspace = torch.empty_like(query), Workspace()
    where = case.tables, case.rows, case.lens

    def call() -> None:
        latent_decode(query, case.query[..., PLAIN:], case.cache, *where, out, workspace, 0.1, longest=length)

    us = microseconds(call)
    read = sequences * length * (LATENT + ROTARY) * 2
    flops = 2 * sequences * length * heads * (2 * LATENT + ROTARY)
    report(
        part="kernels", what=f"latent decode, {heads} heads, {sequences} x {length}", us=round(us, 1),
        tb_per_s=round(read / us / 1e6, 2), tflop_per_s=round(flops / us / 1e6, 1),
    )  # fmt: skip


# ---------------------------------------------------------------- attention sinks


def check_sinks(window: int | None) -> bool:
    """gpt-oss's heads: decodes, and chunks that the kernel for Hopper GPUs takes where there is no window."""
    heads, kv_heads, dim = 64, 8, 64
    chunks, lengths = [1, 1, 300, 130], [700, 3000, 300, 900]
    blocks = [-(-n // BLOCK) for n in lengths]
    cache = torch.randn(sum(blocks), 2, BLOCK, kv_heads, dim, device=DEVICE).to(BF16)
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, some in enumerate(torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)):
        tables[row, : len(some)] = some
    tables, starts = tables.to(DEVICE), np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    query = torch.randn(int(starts[-1]), heads, dim, device=DEVICE).to(BF16)
    sinks, rows = torch.randn(heads, device=DEVICE) * 3, torch.arange(len(lengths), device=DEVICE)
    batch = AttentionBatch(
        slots=rows, query_start=torch.from_numpy(starts).to(DEVICE), rows=rows, tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE), num_decodes=2,
        query_lens=np.array(chunks, np.int32), seq_bounds=np.array(lengths, np.int32), block_size=BLOCK,
    )  # fmt: skip
    got = TritonAttention().forward(query, cache, batch, scale=dim**-0.5, window=window, sinks=sinks)
    worst = 0.0
    for row, (count, length) in enumerate(zip(chunks, lengths, strict=True)):
        part = slice(starts[row], starts[row + 1])
        seen = cache[tables[row].long()].transpose(0, 1).flatten(1, 2)[:, :length].double()
        keys, values = seen.repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("mhd,nhd->hmn", query[part].double(), keys) * dim**-0.5
        at = torch.arange(length - count, length, device=DEVICE)[:, None]
        key = torch.arange(length, device=DEVICE)[None]
        scores = scores.masked_fill((key > at) | (key <= at - (window or length + 1)), -torch.inf)
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), dim=-1)
        wanted = torch.einsum("hmn,nhd->mhd", scores.softmax(-1)[..., :length], values)
        worst = max(worst, error(got[part], wanted))
    report(part="check", what=f"sinks, window {window}", error=worst, ok=worst < TOLERANCE)
    return worst < TOLERANCE


# ---------------------------------------------------------------- whole models


def time_model(name: str, deadline: float) -> None:
    from kvasir import LLM, SamplingParams

    directory = Path(tempfile.mkdtemp()) / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODELS[name]))
    rng = np.random.default_rng(0)

    def seconds(llm: LLM, count: int, length: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": rng.integers(10, 90000, length).tolist()} for _ in range(count)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    with LLM(str(directory), **settings) as llm:
        seconds(llm, 4, 64, 8)
        for batch in (1, 16, 64):
            took = [seconds(llm, batch, 128, 129) - seconds(llm, batch, 128, 1) for _ in range(3)]
            report(part="models", what=name, batch=batch, ms_per_step=round(median(took) / 128 * 1000, 3))
        if time.perf_counter() < deadline:
            took_s = seconds(llm, 512, 512, 256)
            report(part="models", what=f"{name} 512 x 512 -> 256", out_tok_per_s=round(512 * 256 / took_s))
        if time.perf_counter() < deadline:
            took_s = seconds(llm, 128, 2048, 1)
            report(part="models", what=f"{name} prefill 128 x 2048", tok_per_s=round(128 * 2048 / took_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,kernels,models")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=540.0)
    asked = parser.parse_args()
    torch.manual_seed(0)
    deadline, parts, names = time.perf_counter() + asked.seconds, asked.parts.split(","), asked.models.split(",")
    left_out = []
    work: list[tuple[str, str, Callable[[], object]]] = [("check", "routes", check_routes)]
    work += [("check", f"experts {name}", lambda name=name: check_experts(name)) for name in names]
    work += [("check", f"latents {heads}", lambda heads=heads: check_latents(heads)) for heads in (16, 128)]
    work += [("check", f"sinks {window}", lambda window=window: check_sinks(window)) for window in (None, 128)]
    work += [("kernels", f"experts {name}", lambda name=name: time_experts(name)) for name in names]
    for shape in ((16, 64, 8192), (16, 1, 8192), (16, 256, 1024), (128, 64, 8192)):
        work.append(("kernels", f"latents {shape}", lambda shape=shape: time_latents(*shape)))
    work += [("models", name, lambda name=name: time_model(name, deadline)) for name in names]
    for part, what, call in work:
        if part not in parts:
            continue
        if time.perf_counter() > deadline:
            left_out.append(f"{part}: {what}")
        elif call() is False:
            print(f"{what} is wrong: nothing is timed")
            return 1
        torch.cuda.empty_cache()
    print("left out for lack of time:", ", ".join(left_out) or "nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
