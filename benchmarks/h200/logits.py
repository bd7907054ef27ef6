"""Are the engine's logits right? They are compared with a decoder of plain torch in float32 on the same weights.

The engine runs prompts of different lengths at once, prefill and decode, through its scheduler, paged cache, kernels;
the reference runs each whole sequence alone, without any of these, and widens one layer's weights at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F

from kvasir import LLM, SamplingParams
from kvasir.layers.rope import inverse_frequencies

PROMPT_LENGTHS = (1, 17, 64, 65, 130, 257, 600, 1000)
OUTPUT_TOKENS = 4
# How much more than rounding alone an engine may be off: sums are taken in another order, for better or worse.
MARGIN, LEAST = 1.5, 1e-4

Logits = dict[tuple[int, int], torch.Tensor]  # (prompt, how many tokens were seen) -> [vocabulary]


def check(llm: LLM) -> dict[str, Any]:
    """Run prompts, compare, and say how far off the engine is."""
    config = llm.llm_engine.config.model
    rng = random.Random(8)
    lengths = [min(length, config.max_model_len - OUTPUT_TOKENS) for length in PROMPT_LENGTHS]
    prompts = [[rng.randrange(config.vocab_size) for _ in range(length)] for length in lengths]
    found, sequences = engine_logits(llm, prompts, OUTPUT_TOKENS)
    model, places = _runner(llm).model, sorted(found)
    with torch.inference_mode():
        expected = reference_logits(model, sequences, places)
        rounded = reference_logits(model, sequences, places, getattr(torch, config.dtype))
    llm.reset_prefix_cache()
    rounding = compare(rounded, expected)["max_relative_error"]
    errors = compare(found, expected)
    tolerance = max(LEAST, MARGIN * rounding)
    return {
        "prompts": len(prompts),
        **errors,
        "rounding_error": rounding,  # of the reference itself, rounded to the model's dtype after every operation
        "tolerance": tolerance,
        "ok": errors["max_relative_error"] <= tolerance,
    }


def compare(found: Logits, expected: Logits) -> dict[str, Any]:
    """Largest errors over all positions, and how often both would choose the same token."""
    absolute, relative, same = [], [], 0
    for place, ours in found.items():
        theirs = expected[place]
        absolute.append(float((ours - theirs).abs().max()))
        relative.append(float((ours - theirs).norm() / theirs.norm()))
        same += int(ours.argmax() == theirs.argmax())
    return {
        "positions": len(found),
        "max_abs_error": max(absolute),
        "max_relative_error": max(relative),  # |difference| / |reference|, as vectors over the vocabulary
        "same_argmax": same / len(found),
    }


# ---------------------------------------------------------------- the engine's


def engine_logits(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[Logits, list[list[int]]]:
    """What the engine computed while it answered all prompts at once, and the whole sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    with _watching(_runner(llm)) as found:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    sequences = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    return found, sequences


@contextmanager
def _watching(runner: Any) -> Iterator[Logits]:
    """Keep the logits of every step, whose head is launched kernel by kernel: within a graph nobody sees them. Requests
    take rows in the order in which they came."""
    found: Logits = {}
    prompt_of: dict[int, int] = {}  # by row
    arrivals = count()
    plans: list[Any] = []
    execute, logits = runner.execute, runner.model.logits

    def watched_execute(plan: Any) -> None:
        for new in plan.new_rows:
            prompt_of[new.row] = next(arrivals)
        plans.append(plan)
        execute(plan)

    def watched_logits(hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = logits(hidden)
        plan = plans[-1]
        lines = [(int(row), int(seen)) for row, seen, s in zip(plan.rows, plan.bounds, plan.samples, strict=True) if s]
        if len(lines) == len(values):  # else it is no step, but the capture of a graph
            for (row, seen), line in zip(lines, values.float().cpu(), strict=True):
                found[prompt_of[row], seen] = line
        return values

    def sample(running: Any, sampled: Any, outputs: Any) -> None:
        runner._sample_eagerly(running, sampled, [], outputs)

    runner.execute, runner.model.logits, runner._sample = watched_execute, watched_logits, sample
    try:
        yield found
    finally:
        del runner.execute, runner.model.logits, runner._sample  # the class's own are seen again


def _runner(llm: LLM) -> Any:
    client: Any = llm.llm_engine.client
    return client.core.executor.runner


# ---------------------------------------------------------------- the reference's


def reference_logits(
    model: Any,
    sequences: Sequence[Sequence[int]],
    places: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
) -> Logits:
    """Logits after the first `seen` tokens of a sequence, for every (sequence, seen) in `places`.

    Computed in float32; with another `dtype`, rounded to it after every operation.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    device = model.norm.weight.device
    embedding = _wide(model.embedding.weight)
    hidden = [F.embedding(torch.tensor(tokens, device=device), embedding) for tokens in sequences]
    frequencies = inverse_frequencies(model.rotaries[0].rope, len(model.rotaries[0].table)).to(device)
    for layer in model.layers:
        weights = {name: _wide(value) for name, value in layer.named_parameters()}
        hidden = [_layer(x, layer, weights, frequencies, rounded) for x in hidden]
    hidden = [rounded(_norm(x, _wide(model.norm.weight), model.norm.eps)) for x in hidden]
    head = embedding if model.spec.tie_embeddings else _wide(model.head.weight)
    return {(i, seen): rounded(F.linear(hidden[i][seen - 1], head)).cpu() for i, seen in places}


Rounding = Callable[[torch.Tensor], torch.Tensor]


def _layer(
    x: torch.Tensor, layer: Any, weights: Mapping[str, torch.Tensor], frequencies: torch.Tensor, rounded: Rounding
) -> torch.Tensor:
    normed = rounded(_norm(x, weights["attention_norm.weight"], layer.attention_norm.eps))
    qkv = rounded(_linear(normed, weights, "attention.qkv"))
    seen = rounded(_attention(qkv, layer.attention, weights, frequencies, rounded))
    x = rounded(x + rounded(_linear(seen, weights, "attention.o")))
    normed = rounded(_norm(x, weights["mlp_norm.weight"], layer.mlp_norm.eps))
    gate, up = rounded(_linear(normed, weights, "mlp.gate_up")).chunk(2, dim=-1)
    assert layer.mlp.activation == "silu", f"the reference does not know {layer.mlp.activation}"
    return rounded(x + rounded(_linear(rounded(rounded(F.silu(gate)) * up), weights, "mlp.down")))


def _attention(
    qkv: torch.Tensor,
    attention: Any,
    weights: Mapping[str, torch.Tensor],
    frequencies: torch.Tensor,
    rounded: Rounding,
) -> torch.Tensor:
    length, heads, kv_heads = len(qkv), attention.heads, attention.kv_heads
    query, key, value = qkv.view(length, -1, attention.head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if attention.q_norm is not None:
        query = rounded(_norm(query, weights["attention.q_norm.weight"], attention.q_norm.eps))
        key = rounded(_norm(key, weights["attention.k_norm.weight"], attention.k_norm.eps))
    query, key = rounded(_rotate(query, frequencies)), rounded(_rotate(key, frequencies))
    key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * attention.scale
    age = torch.arange(length, device=qkv.device)[:, None] - torch.arange(length, device=qkv.device)
    hidden = age < 0 if attention.window is None else (age < 0) | (age >= attention.window)
    shares = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, value).reshape(length, -1)


def _rotate(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(len(x), device=x.device)[:, None, None] * frequencies
    half = len(frequencies)
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def _norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _wide(weight: torch.Tensor) -> torch.Tensor:
    """In float32, and out of the layout in which oneDNN keeps it on a CPU."""
    return (weight.detach().to_dense() if weight.is_mkldnn else weight.detach()).float()
