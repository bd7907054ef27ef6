"""Trains an EAGLE-3 head for a model from text that the model writes itself, and measures how often it is right.

usage: train_draft.py --out my-head [--model M] [--tokens 200000] [--prompts FILE]
then:  kvasir serve M --speculative-config '{"method": "eagle3", "model": "my-head", "num_speculative_tokens": 3}'

The model answers prompts (one in each line of FILE, or some that are made up here). A drafter that drafts nothing reads
its hidden states while it computes the answers again, and a small network learns to continue them. 200,000 tokens of a
model of 135 M parameters take minutes on a GPU; more text makes a better head.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from kvasir import LLM, SamplingParams
from kvasir.config.resolve import read_hf_config
from kvasir.models.hub import find_starter_model
from kvasir.worker.speculative.drafter import Drafter, DrafterSettings, DraftRows, ModelInputs, TokensTaken

TASKS = (
    *("Explain {} to a child.", "Write a short story about {}.", "List ten facts about {}.", "Write a poem on {}."),
    *("What are the benefits and risks of {}?", "Write an email to a friend about {}.", "Summarize the history of {}."),
    *("Give advice to a beginner in {}.", "Write a dialogue of two people about {}.", "How does {} work?"),
)
TOPICS = """
    volcanoes; bicycles; the Roman Empire; leaves; chess; baking bread; the stock market; black holes; vaccines;
    gardening; jazz; the French Revolution; solar panels; dogs; the Python language; sorting algorithms; marathons;
    tea; whales; railways; dreams; climate change; poetry; mathematics; the printing press; coral reefs; robots; coffee;
    democracy; mountains; electric cars; sleep; painting; the Internet; bees; castles; friendship; storms; football;
    DNA
"""
STEPS = 3  # drafts after one another for which the head is trained


class Recorder(Drafter):
    """Drafts nothing, and keeps the hidden states of all tokens."""

    reads_states = True
    layers: tuple[int, ...] = ()
    states: list[torch.Tensor] = []  # noqa: RUF012 - shared with the script

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        assert settings.record is not None, "the worker hands out states"
        settings.record(self.layers)

    def follow(self, plan: Any, inputs: ModelInputs, states: torch.Tensor | None) -> None:
        if plan is not None and states is not None and (inputs.positions[-1] > 0 or len(states) > 1):
            self.states.append(states.to("cpu", torch.float16))

    def learn(self, taken: TokensTaken) -> None:
        return None

    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        drafts.counts[taken.rows] = 0


# ---------------------------------------------------------------- the head


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Attention of a chain of drafts: after the known tokens each draft sees the drafts before it."""

    def __init__(self, hf: dict[str, Any]) -> None:
        super().__init__()
        size, self.heads, self.kv_heads = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
        self.head_dim, self.theta = hf["head_dim"], hf["rope_theta"]
        self.q_proj = nn.Linear(2 * size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=False)

    def forward(self, x: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """x [tokens, 2 * hidden]; `kept`: keys and values of the steps before, to which this step's are added."""
        step, count = len(kept), len(x)
        q, k, v = (
            each(x).view(count, -1, self.head_dim).transpose(0, 1) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._rotated(q, step), self._rotated(k, step)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 0) for each in (k, v))
        kept.append((k, v))
        known = q @ kept[0][0].transpose(1, 2)  # [heads, tokens, tokens]
        later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
        scores = [known.masked_fill(later, -torch.inf)] + [(q * keys).sum(-1, keepdim=True) for keys, _ in kept[1:]]
        weights = torch.softmax(torch.cat(scores, -1) * self.head_dim**-0.5, -1)
        seen = weights[..., :count] @ kept[0][1]
        for number, (_, values) in enumerate(kept[1:]):
            seen = seen + weights[..., count + number, None] * values
        out: torch.Tensor = self.o_proj(seen.transpose(0, 1).reshape(count, -1))
        return out

    def _rotated(self, x: torch.Tensor, step: int) -> torch.Tensor:
        half = self.head_dim // 2
        speed = self.theta ** (-torch.arange(half, device=x.device) / half)
        angle = (torch.arange(x.shape[1], device=x.device) + step)[:, None] * speed
        a, b = x.split(half, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class MidLayer(nn.Module):
    def __init__(self, hf: dict[str, Any]) -> None:
        super().__init__()
        size, eps = hf["hidden_size"], hf["rms_norm_eps"]
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.self_attn, self.post_attention_layernorm = Attention(hf), Norm(size, eps)
        self.mlp = FeedForward(size, hf["intermediate_size"])

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        stream = states + self.self_attn(x, kept)
        out: torch.Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class Head(nn.Module):
    """Named as in published checkpoints of EAGLE-3."""

    def __init__(self, hf: dict[str, Any], features: int) -> None:
        super().__init__()
        size = hf["hidden_size"]
        self.fc, self.midlayer = nn.Linear(features * size, size, bias=False), MidLayer(hf)
        self.norm, self.lm_head = Norm(size, hf["rms_norm_eps"]), nn.Linear(size, hf["draft_vocab_size"], bias=False)

    def losses(self, embedded: torch.Tensor, states: torch.Tensor, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Of each step. `embedded` [tokens, hidden] and `states` [tokens, features * hidden] of one text, and the
        head's numbers [tokens] of its tokens, -100 where it has none."""
        found: list[torch.Tensor] = []
        kept: list[Any] = []
        own = self.fc(states[: -1 - STEPS])
        for step in range(STEPS):
            own = self.midlayer(embedded[1 + step : len(own) + 1 + step], own, kept)
            wanted = numbers[2 + step : len(own) + 2 + step]
            logits = self.lm_head(self.norm(own))
            found.append(F.cross_entropy(logits[: len(wanted)], wanted))
        return found


# ---------------------------------------------------------------- the steps


def read_prompts(file: Path | None) -> list[str]:
    if file is not None:
        prompts = [line for line in file.read_text().splitlines() if line.strip()]
    else:
        topics = [topic.strip() for topic in TOPICS.split(";")]
        prompts = [task.format(topic) for task in TASKS for topic in topics]
    random.Random(0).shuffle(prompts)
    return prompts


def write_texts(model: str, prompts: Sequence[str], tokens: int, settings: dict[str, Any]) -> list[list[int]]:
    """Prompts and the model's answers."""
    texts: list[list[int]] = []
    with LLM(model, **settings) as llm:
        seed = 0
        while sum(map(len, texts)) < tokens:
            for at in range(0, len(prompts), 64):
                messages: Any = [[{"role": "user", "content": prompt}] for prompt in prompts[at : at + 64]]
                params = SamplingParams(temperature=0.7 * (seed > 0), seed=seed, max_tokens=256)
                outputs = llm.chat(messages, params, use_tqdm=False)
                texts += [[*(each.prompt_token_ids or []), *each.outputs[0].token_ids] for each in outputs]
                if sum(map(len, texts)) >= tokens:
                    break
            seed += 1
    longest = settings["max_model_len"] - 1  # reading a text again needs room for one token
    return [text[:longest] for text in texts if len(text) > 2 * STEPS + 2]


def read_states(model: str, texts: Sequence[list[int]], layers: tuple[int, ...], settings: Any) -> list[torch.Tensor]:
    """[tokens, layers * hidden] of each text: what enters each of the layers."""
    Recorder.layers, found = layers, []
    drafting = {"method": f"{Recorder.__module__}:Recorder", "num_speculative_tokens": 1}
    settings = {**settings, "enable_prefix_caching": False, "enforce_eager": True}
    with LLM(model, speculative_config=drafting, **settings) as llm:
        for text in texts:
            Recorder.states.clear()
            llm.generate([{"prompt_token_ids": text}], SamplingParams(max_tokens=1), use_tqdm=False)
            found.append(torch.cat(Recorder.states)[: len(text)])
    return found


def train(head: Head, texts: Sequence[torch.Tensor], states: Sequence[torch.Tensor], epochs: int, rate: float) -> None:
    """`texts`: the head's numbers of their tokens. `states` begin with the embeddings."""
    device, size = next(head.parameters()).device, head.norm.weight.numel()
    total = epochs * len(texts)
    optimizer = torch.optim.AdamW(head.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=-(-total // 8) + 1, pct_start=0.05)
    order, began, recent = random.Random(1), time.monotonic(), [0.0] * STEPS
    for number in range(total):
        at = order.randrange(len(texts))
        own = states[at].to(device, torch.float32)
        losses = head.losses(own[:, :size], own[:, size:], texts[at].to(device))
        torch.stack([loss * 0.8**step for step, loss in enumerate(losses)]).sum().div(8).backward()
        recent = [0.98 * mean + 0.02 * float(loss.detach()) for mean, loss in zip(recent, losses, strict=True)]
        if number % 8 == 7 or number == total - 1:
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number % 400 == 399:
            shown = " ".join(f"{mean:.2f}" for mean in recent)
            print(f"text {number + 1} of {total}, {time.monotonic() - began:.0f} s, losses {shown}", flush=True)


def save(head: Head, tokens: torch.Tensor, hf: dict[str, Any], out: Path) -> None:
    """Write the public layout; `tokens` are the model's tokens of the head's numbers."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    allowed = torch.zeros(hf["vocab_size"], dtype=torch.bool)
    allowed[tokens] = True
    save_file({**tensors, "d2t": tokens - torch.arange(len(tokens)), "t2d": allowed}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(hf, indent=1))


def measure(model: str, head: str, prompts: Sequence[str], settings: dict[str, Any]) -> None:
    drafting = {"method": "eagle3", "model": head, "num_speculative_tokens": STEPS, "adaptive": False}
    with LLM(model, speculative_config=drafting, **settings) as llm:
        messages: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
        llm.chat(messages, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
        found = {metric.name.removeprefix("kvasir:spec_decode_num_"): metric.value for metric in llm.get_metrics()}
    steps, drafts, accepted = (found[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    print(f"{1 + accepted / steps:.2f} tokens a step, {accepted / drafts:.0%} of {STEPS} drafts accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=None, help="if unset, the starter model")
    parser.add_argument("--prompts", type=Path, default=None, help="one in each line")
    parser.add_argument("--tokens", type=int, default=200_000, help="of text to learn from")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that the head drafts from")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of further engine settings")
    args = parser.parse_args()
    model = args.model or str(find_starter_model())
    settings = {"max_model_len": 1024, **args.settings}
    prompts = read_prompts(args.prompts)
    held_out = max(1, len(prompts) // 20)
    texts = write_texts(model, prompts[held_out:], args.tokens, settings)
    print(f"{len(texts)} texts of {sum(map(len, texts))} tokens", flush=True)

    target = read_hf_config(Path(model), {})
    count = target["num_hidden_layers"]
    features = (2, count // 2, count - 3)
    states = read_states(model, texts, (0, *features), settings)  # what enters layer 0 are the embeddings

    common = Counter(token for text in texts for token in text).most_common(args.draft_vocab)
    tokens = torch.tensor(sorted(token for token, _ in common))
    numbers = torch.full((target["vocab_size"],), -100)
    numbers[tokens] = torch.arange(len(tokens))
    heads = target["num_attention_heads"]
    hf = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"},
        **{name: target[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")},
        **{"num_hidden_layers": 1, "num_attention_heads": heads, "rope_theta": 10000.0},
        "num_key_value_heads": target.get("num_key_value_heads", heads),
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "max_position_embeddings": target["max_position_embeddings"],
        "draft_vocab_size": len(tokens),
        "eagle_aux_hidden_state_layer_ids": list(features),
    }
    torch.manual_seed(0)
    head = Head(hf, len(features)).to("cuda" if torch.cuda.is_available() else "cpu")
    train(head, [numbers[torch.tensor(text)] for text in texts], states, args.epochs, args.learning_rate)
    save(head, tokens, hf, args.out)
    measure(model, str(args.out), prompts[:held_out][:16], settings)


if __name__ == "__main__":
    main()
