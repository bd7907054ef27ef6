"""Is what an engine says right? transformers reads each prompt with the engine's answer, and both are compared.

Fed with the engine's own tokens, transformers can be compared at every place of an answer, not only up to the first
difference. How far an engine may be off in 16 bit is not a constant: transformers itself, run in the same 16 bits, is
off from transformers in float32, and an engine may be off by little more. Where the engine's token is not the best one
of the float32 model, the two must be a near-tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvasir import LLM, SamplingParams

LEAST = 1e-4  # in float32 log-probabilities are equal to this
# How much more than transformers' own rounding: on the mean square, and at the worst of some thousand places.
MARGIN, WORST_MARGIN = 1.5, 2.0
NUM_LOGPROBS = 16

# transformers' name of an architecture, and a real model's shape but for its depth.
HEADS = {"num_key_value_heads": 8, "head_dim": 128}
ROPE_8B = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
WIDTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        {
            **HEADS, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            **HEADS, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
            "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": ROPE_8B,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests that go to an engine at once."""

    lengths: Sequence[int]  # of prompts, without what they share
    shared: int = 0  # tokens that all begin with
    max_tokens: int = 16
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine

    def prompts(self, vocab_size: int) -> list[list[int]]:
        rng = np.random.default_rng(self.shared + len(self.lengths))
        stem = rng.integers(2, vocab_size, self.shared).tolist()
        return [stem + rng.integers(2, vocab_size, n).tolist() for n in self.lengths]


@dataclass(frozen=True)
class Said:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]] | None  # per token: of the likeliest ones, and of the token itself


@dataclass(frozen=True)
class Step:
    """One step that an engine ran."""

    decodes: int
    rows: int
    tokens: int

    @property
    def is_mixed(self) -> bool:
        return 0 < self.decodes < self.rows


def speak(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, scored: bool = True) -> list[Said]:
    """Greedy answers. Unscored, so that the head may be part of a graph, too."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=NUM_LOGPROBS if scored else None
    )
    llm.reset_prefix_cache()
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [
        Said(
            prompt=list(prompt),
            tokens=list(answer.token_ids),
            logprobs=[{i: float(entry.logprob) for i, entry in place.items()} for place in answer.logprobs]
            if answer.logprobs
            else None,
        )
        for prompt, answer in zip(prompts, (output.outputs[0] for output in outputs), strict=True)
    ]


def runner_of(llm: LLM) -> Any:
    client: Any = llm.llm_engine.client
    return client.core.executor.runner


def watch_steps(llm: LLM) -> list[Step]:
    """Filled with the steps that the engine runs from now on."""
    steps: list[Step] = []
    runner = runner_of(llm)
    execute: Callable[[Any], None] = runner.execute

    def watched(plan: Any) -> None:
        steps.append(Step(plan.num_decodes, len(plan.rows), plan.total_tokens))
        execute(plan)

    runner.execute = watched
    return steps


class RoundedCache(DynamicCache):
    """Keys and values as a cache of narrower floats has them."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = (x.to(self.kind).to(x.dtype) for x in (key_states, value_states))
        return super().update(key, value, *args, **kwargs)


@dataclass(frozen=True)
class Reference:
    model: Any  # transformers'; its attention written out, so that no library's kernel is trusted
    kv_dtype: torch.dtype | None = None  # what the engine's cache rounds to, if it does

    def rounded(self, dtype: torch.dtype) -> Reference:
        """The same in another dtype. Weights alone are cast: transformers keeps the angles of its rotations wide."""
        model = deepcopy(self.model)
        for value in model.parameters():
            value.data = value.data.to(dtype)
        model.config.dtype = dtype
        return Reference(model, self.kv_dtype)

    @torch.inference_mode()
    def logprobs(self, said: Said) -> torch.Tensor:
        """[tokens of the answer, vocabulary], float32."""
        ids = torch.tensor([[*said.prompt, *said.tokens[:-1]]], device=self.model.device)
        cache = None if self.kv_dtype is None else RoundedCache(self.kv_dtype)
        seen = self.model.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
        logits: torch.Tensor = self.model.lm_head(seen.last_hidden_state[0, len(said.prompt) - 1 :])
        return logits.float().log_softmax(-1)


def make_reference(kind: str, device: str, dtype: torch.dtype, **shape: Any) -> Reference:
    """A random model in float32, whose weights are numbers of `dtype`.

    They keep the size of what goes through them, and gains differ. Scores of attention then have a spread of about one:
    losing the oldest tenth of a prompt moves log-probabilities by 0.7 to 1, rounding to bfloat16 by 0.02 (Qwen3-0.6B's
    width, two or three layers, on a CPU). With larger queries attention is sharper, and rounding grows more than that.
    """
    config = AutoConfig.for_model(kind, **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator(device=device).manual_seed(0)
    for value in model.parameters():
        if value.dim() == 1:
            value.data.normal_(1.0, 0.15, generator=generator)
        else:
            value.data.normal_(0.0, value.shape[-1] ** -0.5, generator=generator)
        value.data = value.data.to(dtype).float()
    return Reference(model)


@contextmanager
def scaled(reference: Reference, weight: str, factor: float) -> Iterator[None]:
    """A weight of the last layer is another for a while."""
    value = dict(reference.model.model.layers[-1].named_parameters())[f"{weight}.weight"].data
    before = value.clone()
    value.mul_(factor)
    try:
        yield
    finally:
        value.copy_(before)


@dataclass(frozen=True)
class Comparison:
    """All in log-probability, over all places of all answers."""

    errors: torch.Tensor  # of the engine: [number of log-probabilities]
    noise: torch.Tensor  # of the reference in the engine's dtype, for the likeliest tokens of each place
    gaps: torch.Tensor  # how much likelier the best token is than the one said; 0 where it was said

    @property
    def tolerance(self) -> float:
        return max(LEAST, WORST_MARGIN * float(self.noise.abs().max()))

    def check(self) -> None:
        found = str(self)
        assert self.gaps.max() <= self.tolerance, f"a token that is no near-tie was said: {found}"
        if len(self.errors):
            assert self.errors.abs().max() <= self.tolerance, f"too far off somewhere: {found}"
            assert _rms(self.errors) <= max(LEAST, MARGIN * _rms(self.noise)), f"too far off on average: {found}"

    def __str__(self) -> str:
        off = (
            f"off by {_rms(self.errors):.2g}, at worst {self.errors.abs().max():.2g}"
            if len(self.errors)
            else "unscored"
        )
        rounding = f"rounding alone by {_rms(self.noise):.2g}, at worst {self.noise.abs().max():.2g}"
        return (
            f"{off}; {rounding}; {int((self.gaps > 0).sum())} of {len(self.gaps)} tokens are not the best, "
            f"the widest gap is {self.gaps.max():.2g}"
        )


def compare(said: Sequence[Said], exact: Reference, rounded: Reference | None = None) -> Comparison:
    """`exact` is in float32; `rounded` in the engine's dtype, or None where that is float32."""
    errors, noise, gaps = [], [], []
    for one in said:
        wanted = exact.logprobs(one)
        others = wanted if rounded is None else rounded.logprobs(one)
        places = torch.arange(len(one.tokens), device=wanted.device)
        tokens = torch.tensor(one.tokens, device=wanted.device)
        gaps.append(wanted.max(-1).values - wanted[places, tokens])
        noise.append((others - wanted).gather(1, wanted.topk(NUM_LOGPROBS).indices).flatten())
        if one.logprobs is not None:
            scored = [(place, i, value) for place, entry in enumerate(one.logprobs) for i, value in entry.items()]
            at, ids, values = (torch.tensor(column, device=wanted.device) for column in zip(*scored, strict=True))
            errors.append(values - wanted[at, ids])
    return Comparison(torch.cat(errors) if errors else torch.empty(0), torch.cat(noise), torch.cat(gaps))


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())
