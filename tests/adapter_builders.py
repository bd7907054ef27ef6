"""Adapters for tests: made and run by PEFT, over tiny models with random weights."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir import LoRARequest, SamplingParams
from kvasir.outputs import RequestOutput
from tests.model_builders import make_hf_model, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
# Settings of an engine for tiny models: float32, and blocks so small that texts have several.
TINY_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "attention_backend": "torch", "block_size": 4,
    "kv_cache_memory_bytes": 1 << 22, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8,
    "use_tqdm_on_load": False, "generation_config": "kvasir",
}  # fmt: skip

LORAS: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear", "r": 4},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 3},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"],
        "r": 4,
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 1},
        "alpha_pattern": {"o_proj": 2, r".*layers.2.self_attn.k_proj": 11},
    },
    "rslora": {"target_modules": "all-linear", "r": 8, "lora_alpha": 8, "use_rslora": True},
    "dora": {"target_modules": "all-linear", "r": 4, "use_dora": True},
    "one_layer": {"target_modules": ["up_proj"], "layers_to_transform": [1], "r": 3},
    "head": {"target_modules": ["lm_head", "o_proj"], "r": 4},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "r": 4},
    "saved_head": {"target_modules": ["q_proj"], "r": 4, "modules_to_save": ["lm_head"]},
    "saved_both": {"target_modules": ["v_proj"], "r": 2, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved_linear": {"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["gate_proj", "k_proj"]},
    "biases": {"target_modules": "all-linear", "r": 4, "bias": "lora_only"},
    "lora_bias": {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_bias": True},
    "experts": {"target_modules": "all-linear", "r": 3},  # PEFT makes them one adapter of each stack of matrices
    "down_of_experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "r": 4},
    "expert_stacks": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2},
    "dora_biases": {"target_modules": "all-linear", "r": 4, "bias": "lora_only", "use_dora": True},
}
PROMPTS = ("prompt_tuning", "p_tuning", "prefix_tuning", "multitask")


@dataclass
class TinyAdapter:
    """An adapter that PEFT made, and the model that it runs it with."""

    path: Path
    model: Any
    task: int | None = None
    number: int = 1

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(self.path.name, self.number, str(self.path), task_id=self.task)

    @torch.inference_mode()
    def logits(self, tokens: list[int], count: int) -> torch.Tensor:
        """The logits after each of the last `count` tokens."""
        more = {} if self.task is None else {"task_ids": torch.tensor([self.task])}
        return self.model(input_ids=torch.tensor([tokens]), **more).logits[0, -count:].float()


def make_base(path: Path, name: str = "llama", **changes: Any) -> Path:
    """A checkpoint of one of model_builders.TINY."""
    return save(make_hf_model(name, **changes), path)


def base_model(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def make_adapter(
    base: Path, path: Path, kind: str = "all_linear", seed: int = 1, task: int | None = None
) -> TinyAdapter:
    """Make one of LORAS or PROMPTS with random weights and save it."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(base_model(base), _config(kind))
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if value.requires_grad:
            value.data += torch.randn_like(value) * (0.3 if "magnitude" in name or value.dim() > 1 else 0.5)
    model.eval().save_pretrained(path)
    return TinyAdapter(path, model, 1 if kind == "multitask" and task is None else task)


def write_lora(model: Any, path: Path, seed: int, rank: int = 4, alpha: float = 3.0) -> Any:
    """Write a LoRA for all linear layers of transformers' model, and return a copy with the adapter merged into its
    weights. It needs no PEFT, which takes ten seconds to import."""
    generator, tensors, merged = torch.Generator().manual_seed(seed), {}, deepcopy(model)
    for name, module in merged.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            outputs, inputs = module.weight.shape
            down = torch.randn(rank, inputs, generator=generator) * 0.4
            up = torch.randn(outputs, rank, generator=generator) * 0.4
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            module.weight.data += alpha / rank * up @ down
    write_files(path, tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear"})
    return merged


def write_files(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _config(kind: str) -> Any:
    import peft

    if kind in LORAS:
        return peft.LoraConfig(**{"init_lora_weights": False, "lora_alpha": 6, **LORAS[kind]})
    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 6}
    if kind == "prompt_tuning":
        return peft.PromptTuningConfig(**common)
    if kind == "p_tuning":
        return peft.PromptEncoderConfig(**common, encoder_hidden_size=16)
    if kind == "prefix_tuning":
        return peft.PrefixTuningConfig(**common, prefix_projection=True, encoder_hidden_size=16)
    return peft.MultitaskPromptTuningConfig(**common, num_tasks=3)


def check(adapter: TinyAdapter | Any, output: RequestOutput, tolerance: float = 2e-4) -> None:
    """Assert that every token is the likeliest by the reference, with its log-probability."""
    completion = output.outputs[0]
    tokens, count = list(output.prompt_token_ids) + list(completion.token_ids), len(completion.token_ids)
    if isinstance(adapter, TinyAdapter):
        logits = adapter.logits(tokens[:-1], count)
    else:
        with torch.inference_mode():
            logits = adapter(input_ids=torch.tensor([tokens[:-1]])).logits[0, -count:].float()
    scores = torch.log_softmax(logits, dim=-1)
    assert completion.logprobs is not None, "the checks read log-probabilities"
    for place, (token, line) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        best = float(scores[place].max())
        assert abs(float(scores[place, token]) - best) < tolerance, f"token {place} is not the likeliest"
        assert abs(line[token].logprob - float(scores[place, token])) < tolerance, f"token {place}'s logprob"
