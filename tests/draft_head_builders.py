"""Heads that draft, written in plain torch: what tests compare ours with, and where their checkpoints come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.model_builders import make_hf_model, save

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """A head for a model of hidden size 32 and 96 tokens."""

    kind: str = "eagle3"
    features: tuple[int, ...] = (0, 1, 2)
    vocab: int = 96  # that it drafts from
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 48
    theta: float = 10000.0
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    qk_norm: bool = False
    bias: bool = False


class Gain(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Attend(nn.Module):
    def __init__(self, shape: Shape, inputs: int) -> None:
        super().__init__()
        self.shape, dim = shape, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.heads * dim, bias=shape.bias)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * dim, bias=shape.bias)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * dim, shape.hidden, bias=shape.bias)
        self.q_norm, self.k_norm = (Gain(dim) if shape.qk_norm else None for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, count = self.shape, len(x)
        q, k, v = (
            each(x).view(count, -1, shape.head_dim).transpose(0, 1) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (each.repeat_interleave(shape.heads // shape.kv_heads, 0) for each in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(seen.transpose(0, 1).reshape(count, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.shape.head_dim // 2
        speed = self.shape.theta ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[1])[:, None] * speed
        a, b = x.split(half, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Feed(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        is_three = shape.kind == "eagle3"
        self.self_attn = Attend(shape, (2 if is_three else 1) * shape.hidden)
        self.mlp, self.post_attention_layernorm = Feed(shape), Gain(shape.hidden)
        if is_three:
            self.input_layernorm, self.hidden_norm = Gain(shape.hidden), Gain(shape.hidden)


class TorchHead(nn.Module):
    """A head of EAGLE-3 or EAGLE-1 on top of a model of transformers."""

    def __init__(self, shape: Shape, target: Any, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape, self._target = shape, (target,)
        size, count = shape.hidden, len(shape.features)
        self.midlayer = MidLayer(shape)
        if shape.kind == "eagle3":
            self.fc = nn.Linear(count * size, size, bias=False)
            self.norm = Gain(size)
            self.lm_head = nn.Linear(size, shape.vocab, bias=False)
            self.fc_norm = nn.ModuleList(Gain(size) for _ in range(count)) if shape.fc_norm else None
            self.input_norm = Gain(count * size) if shape.norm_before_fc else None
            chosen = torch.randperm(target.config.vocab_size)[: shape.vocab].sort().values
            self.register_buffer("d2t", chosen - torch.arange(shape.vocab))
        else:
            self.fc = nn.Linear(2 * size, size, bias=shape.bias)
        self.embed_tokens = nn.Embedding(target.config.vocab_size, size) if shape.own_embedding else None

    # ------------------------------------------------------------ computing

    def states_of(self, text: Sequence[int]) -> torch.Tensor:
        """The model's states of a text, as the head reads them."""
        return self.combined(self.read(text))

    def read(self, text: Sequence[int]) -> list[torch.Tensor]:
        """The model's states of a text, by layer."""
        with torch.no_grad():
            said = self._target[0](torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
        return [said.hidden_states[layer][0] for layer in self.shape.features]

    def combined(self, states: list[torch.Tensor]) -> torch.Tensor:
        if self.shape.kind == "eagle3":
            if self.fc_norm is not None:
                states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            joined = torch.cat(states, -1)
            return self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return states[0]

    def run(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the head's own tokens and the next states, from tokens and the states of the tokens before."""
        shape, layer = self.shape, self.midlayer
        table = self.embed_tokens or self._target[0].get_input_embeddings()
        embedded = table(ids)
        if shape.kind == "eagle3":
            normed = layer.hidden_norm(states)
            residual = normed if shape.norm_before_residual else states
            x = torch.cat((layer.input_layernorm(embedded), normed), -1)
        else:
            residual = x = self.fc(torch.cat((embedded, states), -1))
        stream = residual + layer.self_attn(x)
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        if shape.kind == "eagle3":
            normed = self.norm(stream)
            return self.lm_head(normed), normed if shape.norm_output else stream
        return self._target[0].lm_head(stream), stream

    def named(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's tokens of the head's own."""
        return tokens + self.d2t[tokens] if self.shape.kind == "eagle3" else tokens

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """The drafts after a text whose last token the model has not computed."""
        ids, states = torch.tensor(text[1:]), self.states_of(text[:-1])
        found: list[int] = []
        for _ in range(count):
            logits, own = self.run(ids, states)
            found.append(int(self.named(logits[-1].argmax())))
            ids, states = torch.cat((ids, torch.tensor(found[-1:]))), torch.cat((states, own[-1:]))
        return found

    # ------------------------------------------------------------ training and files

    def learn(self, texts: Sequence[Sequence[int]], steps: int = 60) -> None:
        """Learn the model's next tokens on these texts, so that drafts are sometimes right."""
        known = [(torch.tensor(text[1:-1]), self.read(text[:-2]), torch.tensor(text[2:])) for text in texts]
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        for _ in range(steps):
            loss = torch.zeros(())
            for ids, before, wanted in known:
                logits, _ = self.run(ids, self.combined(before))
                if self.shape.kind == "eagle3":
                    numbers = torch.full((self._target[0].config.vocab_size,), -100)
                    numbers[self.named(torch.arange(self.shape.vocab))] = torch.arange(self.shape.vocab)
                    wanted = numbers[wanted]
                loss = loss + F.cross_entropy(logits, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def config(self) -> dict[str, Any]:
        shape = self.shape
        found = {
            "architectures": ["LlamaForCausalLMEagle3" if shape.kind == "eagle3" else "LlamaForCausalLM"],
            **{"model_type": "llama", "hidden_size": shape.hidden, "intermediate_size": shape.inner},
            **{"num_hidden_layers": 1, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads},
            **{"head_dim": shape.head_dim, "vocab_size": self._target[0].config.vocab_size, "rms_norm_eps": EPS},
            **{"rope_theta": shape.theta, "max_position_embeddings": 16, "hidden_act": "silu"},
            "attention_bias": shape.bias,
        }
        if shape.kind == "eagle3":
            found |= {"draft_vocab_size": shape.vocab, "eagle_aux_hidden_state_layer_ids": list(shape.features)}
            found |= {name: getattr(shape, name) for name in ("norm_before_residual", "fc_norm", "norm_before_fc")}
            found |= {"norm_output": shape.norm_output}
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.state_dict())
        if self.shape.kind == "eagle3":
            allowed = torch.zeros(self._target[0].config.vocab_size, dtype=torch.bool)
            allowed[self.named(torch.arange(self.shape.vocab))] = True
            return {**found, "t2d": allowed}
        return {name.replace("midlayer", "layers.0"): tensor for name, tensor in found.items()}

    def save(self, path: Path, as_bin: bool = False, as_speculators: bool = False) -> str:
        """Write a checkpoint: as the authors do, or as `speculators` does."""
        path.mkdir(parents=True, exist_ok=True)
        config, tensors = self.config(), {name: each.contiguous() for name, each in self.tensors().items()}
        if as_speculators:
            outer = ("draft_vocab_size", "norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
            outer += ("eagle_aux_hidden_state_layer_ids",)
            inner = {name: value for name, value in config.items() if name not in (*outer, "architectures")}
            config = {name: config[name] for name in outer} | {"transformer_layer_config": inner}
            config |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
            tensors = {name.replace("midlayer", "layers.0"): each for name, each in tensors.items()}
        (path / "config.json").write_text(json.dumps(config))
        if as_bin:
            torch.save(tensors, path / "pytorch_model.bin")
        else:
            save_file(tensors, path / "model.safetensors")
        return str(path)


# ---------------------------------------------------------------- the layer past a model's last one


class TorchMtp:
    """A model of transformers with a layer that predicts one token more, and transformers' word on its drafts."""

    def __init__(self, name: str, path: Path, *, own_ends: bool) -> None:
        """`own_ends`: the checkpoint repeats embedding and head beside the layer, as published ones do."""
        whole = make_hf_model(name)
        save(whole, path)
        config = json.loads((path / "config.json").read_text())
        config["num_hidden_layers"] = count = config["num_hidden_layers"] - 1
        config |= {"num_nextn_predict_layers": 1, "num_mtp_layers": 1}
        (path / "config.json").write_text(json.dumps(config))
        torch.manual_seed(4)
        tensors, last, size = load_file(path / "model.safetensors"), f"model.layers.{count}", config["hidden_size"]
        norms = ("enorm", "hnorm", "shared_head.norm")
        tensors |= {f"{last}.{norm}.weight": 1 + 0.2 * torch.randn(size) for norm in norms}
        tensors[f"{last}.eh_proj.weight"] = torch.randn(size, 2 * size) * 0.1
        if own_ends:
            tensors[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        self.path = str(path)
        self.hf = AutoModelForCausalLM.from_pretrained(path)
        # transformers finds the layer by patterns that have the published models' numbers
        self.hf._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{count}.*"]
        self.layer = MtpModel.from_pretrained(self.hf)
        self.last = count - 1

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        said = self.hf(torch.tensor([list(text[:-1])]), use_cache=False, output_hidden_states=[self.last])
        ids, states, found = list(text[1:]), said.hidden_states[-1], []
        for _ in range(count):
            places = torch.arange(1, 1 + len(ids))[None]
            own = self.layer.forward_layer(0, states, places, None, input_ids=torch.tensor([ids]))
            found.append(int(self.hf.lm_head(own[0, -1]).argmax()))
            ids, states = [*ids, found[-1]], torch.cat((states, own[:, -1:]), 1)
        return found


# ---------------------------------------------------------------- Medusa


class TorchMedusa(nn.Module):
    """Medusa heads on a model of transformers."""

    def __init__(self, target: Any, heads: int, layers: int = 1, vocab: int = 96) -> None:
        super().__init__()
        torch.manual_seed(6)
        self._target, size = (target,), target.config.hidden_size
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(size, size) for _ in range(layers)) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(heads))
        self.token_map = torch.randperm(target.config.vocab_size)[:vocab]

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        said = self._target[0](torch.tensor([list(text[:-1])]), use_cache=False, output_hidden_states=True)
        found = []
        for blocks, head in list(zip(self.blocks, self.lm_heads, strict=True))[:count]:
            x = said.hidden_states[-1][0, -1]
            for block in blocks:
                x = x + F.silu(block(x))
            found.append(int(self.token_map[head(x).argmax()]))
        return found

    def save(self, path: Path, by_authors: bool) -> str:
        layers, size = len(self.blocks[0]), self.token_map.numel()
        if by_authors:
            self.token_map = torch.arange(size)
            tensors = {}
            for number, (blocks, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
                for layer, block in enumerate(blocks):
                    tensors |= {f"{number}.{layer}.linear.{name}": each for name, each in block.state_dict().items()}
                tensors[f"{number}.{layers}.weight"] = head.weight.detach()
            config = {"medusa_num_heads": len(self.blocks), "medusa_num_layers": layers}
            torch.save(tensors, path / "medusa_lm_head.pt")
        else:
            config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": len(self.blocks)}
            config |= {"num_hidden_layers": layers, "truncated_vocab_size": size}
            tensors = {_medusa_name(name): each for name, each in self.state_dict().items()}
            tensors["token_map"] = self.token_map
            save_file(tensors, path / "model.safetensors")
        config |= {"hidden_size": self._target[0].config.hidden_size}
        (path / "config.json").write_text(json.dumps(config))
        return str(path)


def _medusa_name(name: str) -> str:
    """blocks.0.1.weight -> blocks.0.layers.1.weight"""
    parts = name.split(".")
    return ".".join((*parts[:2], "layers", *parts[2:])) if parts[0] == "blocks" else name
