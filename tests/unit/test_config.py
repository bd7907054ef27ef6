"""Settings: every one of them has an effect or is refused; every way of writing them gives the same result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvasir import platforms
from kvasir.config.args import EngineArgs, flag, parse_size
from kvasir.config.engine import EngineConfig, ModelConfig, all_settings
from kvasir.config.resolve import resolve
from kvasir.config.speculative import read_speculative
from kvasir.entrypoints.cli.main import Parser
from kvasir.errors import ConfigError, ModelError
from kvasir.frontend.requests.structured import StructuredOutputs
from kvasir.frontend.text.grammar import JsonStyle
from kvasir.kernels.cpu import library
from kvasir.platforms.cpu import CpuPlatform

ROOT = Path(__file__).parent.parent.parent
HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
GENERATION = {"eos_token_id": 2, "temperature": 0.6}


@dataclass
class World:
    """A model directory, and a hub that hands out that directory and remembers what it was asked."""

    path: Path
    fetched: dict[str, dict[str, Any]] = field(default_factory=dict)

    def snapshot_download(self, name: str, **asked: Any) -> str:
        self.fetched[name] = asked
        return str(self.path)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HF))
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.1}')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    found = World(path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    monkeypatch.setattr(platforms, "select", lambda device: CpuPlatform("cpu" if device == "auto" else device))
    monkeypatch.setattr(library, "library", object)  # as if it were built
    return found


@dataclass
class Case:
    """A value that is not the default, and what it must do: be refused, or show in the settled configuration."""

    value: Any
    refused: str = ""
    shows: Callable[[EngineConfig, World], Any] = lambda config, world: False
    beside: dict[str, Any] = field(default_factory=dict)  # other settings it needs


ON_HUB = {"model": "org/model"}
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CASES = {
    "model": Case("org/other", shows=lambda c, w: "org/other" in w.fetched and c.model.path == str(w.path)),
    "tokenizer": Case("org/words", shows=lambda c, w: "*.safetensors" not in w.fetched["org/words"]["allow_patterns"]),
    "skip_tokenizer_init": Case(True, shows=lambda c, w: not w.fetched, beside={"tokenizer": "org/words"}),
    "revision": Case("v2", shows=lambda c, w: w.fetched["org/model"]["revision"] == "v2", beside=ON_HUB),
    "tokenizer_revision": Case(
        "v3",
        shows=lambda c, w: w.fetched["org/words"]["revision"] == "v3" and w.fetched["org/model"]["revision"] is None,
        beside=ON_HUB | {"tokenizer": "org/words"},
    ),
    "hf_token": Case("secret", shows=lambda c, w: w.fetched["org/model"]["token"] == "secret", beside=ON_HUB),
    "trust_remote_code": Case(True, shows=lambda c, w: c.model.trust_remote_code is True),  # it warns: see below
    "dtype": Case("half", shows=lambda c, w: c.model.dtype == "float16"),
    "seed": Case(7, shows=lambda c, w: c.model.seed == 7),
    "max_model_len": Case("1k", shows=lambda c, w: c.model.max_model_len == 1000),
    "max_logprobs": Case(5, shows=lambda c, w: c.model.max_logprobs == 5),
    "logprobs_mode": Case("processed_logits", shows=lambda c, w: c.model.logprobs_mode == "processed_logits"),
    "hf_overrides": Case(
        {"vocab_size": 500, "rope_parameters": {"factor": 2.0}},
        shows=lambda c, w: (
            c.model.vocab_size == 500 and c.model.hf["rope_parameters"] == {**HF["rope_parameters"], "factor": 2.0}
        ),
    ),
    "generation_config": Case(".", shows=lambda c, w: c.model.generation == {"temperature": 0.1}),
    "override_generation_config": Case(
        {"temperature": 0.3}, shows=lambda c, w: c.model.generation == {"eos_token_id": 2, "temperature": 0.3}
    ),
    "chat_template": Case("template.jinja", shows=lambda c, w: c.model.chat_template == "{{ messages }}"),
    "model_impl": Case("kvasir", shows=lambda c, w: c.model.model_impl == "kvasir"),
    "runner": Case("generate", shows=lambda c, w: c.model.runner == "generate"),
    "pooler_config": Case(
        {"pooling_type": "mean"},
        shows=lambda c, w: c.model.poolers[0].pooling == "mean",
        beside={"runner": "pooling", "hf_overrides": SMALL},
    ),
    "convert": Case("none", shows=lambda c, w: c.model.convert == "none"),
    "quantization": Case("int8", shows=lambda c, w: c.model.quantization == "int8"),
    "head_quantization": Case("int8", shows=lambda c, w: c.model.head_quantization == "int8"),
    "enable_lora": Case(True, shows=lambda c, w: c.adapters.enable_lora),
    "max_loras": Case(3, shows=lambda c, w: (c.adapters.max_loras, c.adapters.max_cpu_loras) == (3, 12)),
    "max_lora_rank": Case(64, shows=lambda c, w: c.adapters.max_lora_rank == 64),
    "max_cpu_loras": Case(99, shows=lambda c, w: c.adapters.max_cpu_loras == 99),
    "speculative_config": Case(
        {"method": "suffix"}, shows=lambda c, w: c.model.speculative_config == {"method": "suffix"}
    ),
    "structured_outputs_config": Case(
        {"backend": "guidance", "whitespace": "compact"},
        shows=lambda c, w: StructuredOutputs(c.model, None).style == JsonStyle("compact"),
    ),
    "enable_prompt_embeds": Case(True, shows=lambda c, w: c.model.enable_prompt_embeds),
    "logits_processors": Case(["a:b"], shows=lambda c, w: c.model.logits_processors == ["a:b"]),
    "load_format": Case(
        "dummy",
        shows=lambda c, w: (
            c.load.load_format == "dummy" and "*.safetensors" not in w.fetched["org/model"]["allow_patterns"]
        ),
        beside=ON_HUB,
    ),
    "download_dir": Case("/models", shows=lambda c, w: w.fetched["org/model"]["cache_dir"] == "/models", beside=ON_HUB),
    "packed_weights_dir": Case("packed", shows=lambda c, w: c.load.packed_weights_dir == "packed"),
    "use_tqdm_on_load": Case(False, shows=lambda c, w: c.load.use_tqdm_on_load is False),
    "stall_timeout": Case(3.5, shows=lambda c, w: c.scheduler.stall_timeout == 3.5),
    "stream_interval": Case(4, shows=lambda c, w: c.scheduler.stream_interval == 4),
    "block_size": Case(32, shows=lambda c, w: c.cache.block_size == 32),
    "gpu_memory_utilization": Case(0.5, shows=lambda c, w: c.cache.gpu_memory_utilization == 0.5),
    "kv_cache_memory_bytes": Case("2G", shows=lambda c, w: c.cache.kv_cache_memory_bytes == 2**31),
    "num_gpu_blocks_override": Case(99, shows=lambda c, w: c.cache.num_gpu_blocks_override == 99),
    "kv_cache_dtype": Case("fp8", shows=lambda c, w: c.cache.kv_dtype == "float8_e4m3fn"),
    "enable_prefix_caching": Case(False, shows=lambda c, w: c.cache.enable_prefix_caching is False),
    "swap_space": Case(4, shows=lambda c, w: c.cache.swap_space == 4),
    "kv_offloading_size": Case(1.5, shows=lambda c, w: c.cache.kv_offloading_size == 1.5),
    "preemption_mode": Case("swap", shows=lambda c, w: c.cache.preemption_mode == "swap", beside={"swap_space": 1}),
    "cpu_offload_gb": Case(1.5, refused="Offloading weights is not supported"),
    "max_num_seqs": Case(8, shows=lambda c, w: c.scheduler.max_num_seqs == 8),
    "max_num_batched_tokens": Case(512, shows=lambda c, w: c.scheduler.max_num_batched_tokens == 512),
    # Without chunks a whole prompt must fit into a step: the automatic budget grows.
    "enable_chunked_prefill": Case(False, shows=lambda c, w: c.scheduler.max_num_batched_tokens == 4096),
    "long_prefill_token_threshold": Case(64, shows=lambda c, w: c.scheduler.long_prefill_token_threshold == 64),
    "target_step_ms": Case(12.5, shows=lambda c, w: c.scheduler.target_step_ms == 12.5),
    "scheduling_policy": Case("priority", shows=lambda c, w: c.scheduler.scheduling_policy == "priority"),
    "priority_aging_seconds": Case(2.5, shows=lambda c, w: c.scheduler.priority_aging_seconds == 2.5),
    "priority_aging_best": Case(-3, shows=lambda c, w: c.scheduler.priority_aging_best == -3),
    "default_deadline": Case(5.0, shows=lambda c, w: c.scheduler.default_deadline == 5.0),
    "deadline_least_chance": Case(0.25, shows=lambda c, w: c.scheduler.deadline_least_chance == 0.25),
    "max_queued_requests": Case(100, shows=lambda c, w: c.scheduler.max_queued_requests == 100),
    "max_queued_tokens": Case("100k", shows=lambda c, w: c.scheduler.max_queued_tokens == 100_000),
    "watermark": Case(0.1, shows=lambda c, w: c.scheduler.watermark == 0.1),
    "async_scheduling": Case(True, shows=lambda c, w: c.scheduler.async_scheduling is True),
    "tensor_parallel_size": Case(2, shows=lambda c, w: c.parallel.distributed_executor_backend == "mp"),
    "pipeline_parallel_size": Case(2, refused="Pipeline parallelism is not supported"),
    "data_parallel_size": Case(2, shows=lambda c, w: c.parallel.data_parallel_size == 2),
    "enable_expert_parallel": Case(True, shows=lambda c, w: c.parallel.enable_expert_parallel is True),
    "expert_load_metrics": Case(False, shows=lambda c, w: c.parallel.expert_load_metrics is False),
    "distributed_executor_backend": Case("uni", shows=lambda c, w: c.parallel.distributed_executor_backend == "uni"),
    "device": Case("cpu:0", shows=lambda c, w: c.device.device == "cpu:0"),
    "attention_backend": Case("torch", shows=lambda c, w: c.device.attention_backend == "torch"),
    "cpu_threads": Case(3, shows=lambda c, w: c.device.cpu_threads == 3),
    "cpu_bind": Case("0", shows=lambda c, w: (c.device.cpu_bind, c.device.cpu_threads) == ("0", 1)),
    "enforce_eager": Case(True, shows=lambda c, w: c.device.enforce_eager is True),
    "batch_invariant": Case(True, shows=lambda c, w: c.device.batch_invariant is True),
}
NAMES = [f.name for f in dataclasses.fields(EngineArgs)]


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_an_effect_or_is_refused(name: str, world: World) -> None:
    assert name in CASES, f"{name} has no entry in CASES: say what it does"
    case, known = CASES[name], all_settings()[name]
    assert case.value != known.default, "the value must not be the default"
    given = {"model": str(world.path), **case.beside, name: case.value}
    if case.refused:
        with pytest.raises(ConfigError, match=case.refused) as error:
            EngineArgs(**given)
        assert f"{name}={case.value!r}" in str(error.value)
    else:
        assert case.shows(resolve(EngineArgs(**given)), world)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"dtype": "float32"}, "the library, or leave batch_invariant out"),
        ({"attention_backend": "torch"}, "attention_backend='torch'"),
        ({"model_impl": "transformers"}, "through transformers"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": {"method": "suffix"}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
    ],
    ids=str,
)
def test_batch_invariance_is_refused_where_nothing_shows_it(beside: dict[str, Any], said: str, world: World) -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True") as error:
        resolve(EngineArgs(model=str(world.path), batch_invariant=True, **beside))
    assert said in str(error.value)


def test_a_gpu_refuses_batch_invariance(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CpuPlatform("cuda")
    platform.kind = "cuda"  # type: ignore[misc]
    monkeypatch.setattr(platforms, "select", lambda device: platform)
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        resolve(EngineArgs(model=str(world.path), batch_invariant=True))


@pytest.mark.parametrize("name", NAMES)
def test_flags_and_files_mean_what_keywords_mean(name: str, world: World) -> None:
    case, known = CASES[name], all_settings()[name]
    given = {"model": "org/model", **case.beside, name: case.value}
    if case.refused:
        for argv in ([*as_flags(given)], ["--config", as_file(given)]):
            with pytest.raises(ConfigError, match=case.refused):
                from_command_line(argv)
        return
    expected = EngineArgs(**given)
    assert getattr(expected, name) != known.default
    assert from_command_line(as_flags(given)) == expected
    assert from_command_line(["--config", as_file(given)]) == expected


def as_flags(given: dict[str, Any]) -> list[str]:
    argv = []
    for name, value in given.items():
        if isinstance(value, bool):
            argv.append(flag(name) if value else flag("no_" + name))
        else:
            argv += [flag(name), json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return argv


def as_file(given: dict[str, Any]) -> str:
    Path("settings.yaml").write_text(yaml.safe_dump({name.replace("_", "-"): value for name, value in given.items()}))
    return "settings.yaml"


def from_command_line(argv: list[str]) -> EngineArgs:
    parser = EngineArgs.add_cli_args(Parser(prog="kvasir"))
    return EngineArgs.from_cli_args(parser.parse_args(argv))


# ---------------------------------------------------------------- keywords


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max_model_length is not a setting. Did you mean max_model_len"):
        EngineArgs("m", max_model_length=10)
    with pytest.raises(ConfigError, match="^bogus_switch is not a setting.$"):
        EngineArgs("m", bogus_switch=True)


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="No model was given"):
        EngineArgs()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gpu_memory_utilization", 0, "more than 0"),
        ("gpu_memory_utilization", 1.01, "at most 1"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization=nan"),
        ("gpu_memory_utilization", "much", "is a str; gpu_memory_utilization takes a number"),
        ("max_model_len", 0, "at least 1"),
        ("max_model_len", 10.5, "takes a whole number or 'auto'"),
        ("max_model_len", True, "takes a whole number"),
        ("max_model_len", "10x", "is not a whole number"),
        ("max_num_seqs", -1, "at least 1"),
        ("seed", 0.5, "takes a whole number"),
        ("block_size", 24, "Possible: 1, 2, 4, 8, 16, 32, 64, 128, 256"),
        ("enable_prefix_caching", "yes", "takes true or false"),
        ("enable_prefix_caching", 1, "takes true or false"),
        ("hf_overrides", "x", "takes a mapping"),
        ("dtype", "int8", "Possible: auto, half"),
        ("dtype", {}, "takes a string"),
        ("model", 3, "takes a string"),
        ("attention_backend", "FLEX_ATTENTION", "Possible: auto, torch, triton, cpu, flash_attn, flashinfer"),
        ("attention_backend", 2, "takes a string"),
        ("scheduling_policy", "lifo", "Possible: fair, fcfs, priority, wrr, deadline, or your own class"),
        ("watermark", 0.6, "at most 0.5"),
    ],
)
def test_wrong_types_and_ranges_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        EngineArgs(**{"model": "m", name: value})
    assert name in str(error.value)


def test_what_is_set_later_is_checked_too() -> None:
    args = EngineArgs("m")
    args.gpu_memory_utilization = 3.0
    with pytest.raises(ConfigError, match="at most 1"):
        args.create_engine_config()


def test_budgets_must_agree() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        EngineArgs("m", max_num_seqs=8, max_num_batched_tokens=4)


def test_auto_and_none_may_be_written_out() -> None:
    assert EngineArgs("m", max_model_len="auto", block_size="auto") == EngineArgs("m")
    assert EngineArgs("m", max_model_len=None, hf_overrides=None, speculative_config=None) == EngineArgs("m")


def test_torch_dtypes_are_taken() -> None:
    class Fake:  # torch itself is not imported for this
        __module__ = "torch"

        def __str__(self) -> str:
            return "torch.bfloat16"

    assert EngineArgs("m", dtype=Fake()).dtype == "bfloat16"


def test_defaults_are_not_shared() -> None:
    EngineArgs("m").hf_overrides["vocab_size"] = 1
    assert EngineArgs("m").hf_overrides == {}


def test_the_token_is_not_shown() -> None:
    args = EngineArgs("m", hf_token="secret")
    assert "secret" not in repr(args) + repr(args.create_engine_config())


@given(whole=st.integers(0, 10**9), unit=st.sampled_from(["", "k", "m", "K", "M", "G"]))
def test_sizes_are_exact(whole: int, unit: str) -> None:
    factor = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20, "G": 2**30}[unit]
    assert parse_size("n", f"{whole}{unit}") == whole * factor


def test_sizes_with_a_point() -> None:
    assert parse_size("n", "25.6k") == 25600
    assert parse_size("n", "1.5K") == 1536
    for wrong in ("25.6", "1.0001k", "k", "1e3", "", "1 k", "0x10"):
        with pytest.raises(ConfigError, match="not a whole number"):
            parse_size("n", wrong)


# ---------------------------------------------------------------- older names


@pytest.mark.parametrize("name", ["rope_scaling", "rope_theta"])
def test_older_names_warn_once(name: str, log_lines: list[str]) -> None:
    value = {"rope_type": "linear", "factor": 2.0} if name == "rope_scaling" else 5e5
    for _ in range(2):
        args = EngineArgs("m", hf_overrides={"vocab_size": 9}, **{name: value})
    assert args.hf_overrides == {"vocab_size": 9, name: value}
    assert [line for line in log_lines if name in line] == [
        f"WARNING {name} is deprecated; set hf_overrides={{'{name}': ...}}."
    ]
    assert from_command_line(["m", flag(name), json.dumps(value)]).hf_overrides == {name: value}


def test_older_names_of_speculative_settings_are_entries_now() -> None:
    args = EngineArgs("m", speculative_model="[ngram]", num_speculative_tokens=3)
    assert args.speculative_config == {"model": "[ngram]", "num_speculative_tokens": 3}
    found = read_speculative(args.speculative_config)
    assert found is not None and (found.method, found.num_speculative_tokens) == ("ngram", 3)


def test_the_older_name_of_the_backend_of_structured_outputs() -> None:
    assert EngineArgs("m", guided_decoding_backend="guidance").structured_outputs_config == {"backend": "guidance"}
    found = from_command_line(["m", "--guided-decoding-backend", "auto"])
    assert found.structured_outputs_config == {"backend": "auto"}
    with pytest.raises(ConfigError, match="backend='xgrammar' is a backend of vLLM"):
        EngineArgs("m", guided_decoding_backend="xgrammar")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "neither method nor model"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngramm", "num_speculative_tokens": 2}, "Did you mean ngram"),
        ({"method": "suffix", "num_speculative_tokens": 0}, "from 1 to 32"),
        ({"method": "suffix", "num_speculative_tokens": True}, "whole number"),
        ({"method": "suffix", "num_speculativ_tokens": 2}, "Did you mean num_speculative_tokens"),
        ({"method": "suffix", "disable_by_batch_size": 8}, "an entry of vLLM that Kvasir does not have"),
        ({"method": "suffix", "draft_tensor_parallel_size": 2}, "an entry of vLLM that Kvasir does not have"),
        ({"method": ["suffix"]}, r"method=\['suffix'\] is not possible"),
        ({"method": "suffix", "model": "org/model"}, "takes no model"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs `model`"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "needs `model`"),
        ({"method": "medusa", "num_speculative_tokens": 2}, "needs `model`"),
        ({"method": "mtp", "num_speculative_tokens": 1, "model": "org/model"}, "leave model out"),
        ({"model": "org/model", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, "has no effect with"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "is more than",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2, "suffix_decoding_max_tree_depth": 3}, "method='suffix'"),
        ({"method": "suffix", "adaptive": 1}, "true or false"),
        ({"method": "suffix", "synthetic_acceptance_rate": 2}, "from 0 to 1"),
    ],
)
def test_wrong_speculative_settings_are_refused_by_name(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineArgs("m", speculative_config=entries)


def test_speculative_settings_of_vllm_that_change_nothing_are_taken() -> None:
    harmless = {
        "draft_tensor_parallel_size": 1,
        "enforce_eager": False,
        "draft_sample_method": "greedy",
        "revision": None,
    }
    assert read_speculative({"method": "suffix", **harmless}) == read_speculative({"method": "suffix"})


def test_speculative_settings_have_the_defaults_of_vllm() -> None:
    def lookup(**entries: Any) -> tuple[int, int, int]:
        found = read_speculative(entries)
        assert found is not None
        return found.num_speculative_tokens, found.prompt_lookup_min, found.prompt_lookup_max

    assert lookup(method="ngram", num_speculative_tokens=3) == (3, 5, 5)
    assert lookup(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4) == (3, 4, 4)
    assert lookup(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4) == (3, 2, 4)
    assert lookup(method="suffix", suffix_decoding_max_tree_depth=24) == (8, 1, 24)
    named = read_speculative({"model": "org/model", "num_speculative_tokens": 2})
    assert named is not None and named.method == "draft_model" and named.model == "org/model"
    by_name = {
        "a/EAGLE3-Llama": "eagle3",
        "a/EAGLE-Llama": "eagle",
        "a/llama-Medusa": "medusa",
        "a/llama": "draft_model",
    }
    for model, method in by_name.items():
        found = read_speculative({"model": model, "num_speculative_tokens": 2})
        assert found is not None and found.method == method
    assert lookup(method="ngram_gpu", num_speculative_tokens=3) == (3, 5, 5)
    assert lookup(method="mtp")[0] == 1
    text = '{"method": "suffix", "num_speculative_tokens": 5}'
    assert from_command_line(["m", "--speculative-config", text]).speculative_config["num_speculative_tokens"] == 5


def test_older_and_newer_name_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="both given"):
        EngineArgs("m", rope_theta=1.0, hf_overrides={"rope_theta": 2.0})


def test_attention_backend_from_the_environment(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH")
    assert EngineArgs("m").attention_backend == "torch"
    assert EngineArgs("m", attention_backend="auto").attention_backend == "auto"
    assert len([line for line in log_lines if line.startswith("WARNING VLLM_ATTENTION_BACKEND")]) == 1
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")
    assert EngineArgs("m").attention_backend == "flash_attn"
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    with pytest.raises(ConfigError, match="attention_backend='XFORMERS' is not possible"):
        EngineArgs("m")


@pytest.mark.parametrize(
    ("written", "meant"),
    {
        "FLASH_ATTN": "flash_attn",
        "FLASHINFER": "flashinfer",
        "FlashInfer": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
        "CPU_ATTN": "cpu",
        "AUTO": "auto",
    }.items(),
)
def test_attention_backends_by_vllms_names(written: str, meant: str) -> None:
    assert EngineArgs("m", attention_backend=written).attention_backend == meant
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    arguments = parser.parse_args(["m", "--attention-backend", written])
    assert EngineArgs.from_cli_args(arguments).attention_backend == meant


# ---------------------------------------------------------------- the command line and the file


@pytest.mark.parametrize("argv", [["m", "--config", "f"], ["--config", "f", "m"], ["--config", "f", "--model", "m"]])
def test_flags_win_over_the_file(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").write_text("model: other\nseed: 5\nmax_model_len: 2k\n")
    for order in ([*argv, "--seed", "0"], ["--seed", "0", *argv]):
        args = from_command_line(order)
        assert (args.model, args.seed, args.max_model_len) == ("m", 0, 2000)


def test_the_file_may_hold_a_subcommands_own_flags(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("port: 9000\nhost: here\n")
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="localhost")
    assert vars(parser.parse_args(["--config", str(file), "--host", "there"])) == {
        "config": str(file), "port": 9000, "host": "there",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-lenn: 1", "max-model-lenn is not a setting. Did you mean --max-model-len"),
        ("config: other.yaml", "config is not a setting"),
        ("- a\n- b", "must be a list of `setting: value` lines"),
        ("a: [", "is not YAML"),
        (None, "cannot be read"),
    ],
)
def test_wrong_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "f"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_command_line(["m", "--config", str(file)])


def test_short_flags_and_underscores() -> None:
    assert from_command_line(["m", "-tp", "1", "-pp", "1", "-dp", "1", "--max_model_len", "1K"]).max_model_len == 1024


def test_hf_token_needs_no_value() -> None:
    assert from_command_line(["m", "--hf-token"]).hf_token is True
    assert from_command_line(["m", "--hf-token", "abc"]).hf_token == "abc"


# ---------------------------------------------------------------- vLLM's keywords


@pytest.mark.parametrize(
    "given",
    [
        {"disable_log_stats": True},
        {"disable_log_stats": False},
        {"disable_log_requests": True},
        {"served_model_name": None},
        {"enable_log_requests": False},
        {"trust_remote_code": False},
        {"tokenizer_mode": "auto", "compilation_config": None, "disable_custom_all_reduce": False},
        {"compilation_config": {}, "limit_mm_per_prompt": {}, "allowed_local_media_path": "", "ignore_patterns": []},
        {"nnodes": 1, "max_num_partial_prefills": 1, "safetensors_load_strategy": "lazy"},
        {"disable_cascade_attn": True, "scheduler_reserve_full_isl": True},
        {"task": "auto", "override_pooler_config": None, "worker_use_ray": False},
        {"enable_prefix_caching": None, "enable_chunked_prefill": None, "kv_offloading_size": None},
        {"attention_backend": None, "mm_processor_cache_gb": 4, "data_parallel_backend": "mp", "ubatch_size": 0},
    ],
    ids=str,
)
def test_vllms_own_defaults_ask_for_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    assert EngineArgs("m", **given) == EngineArgs("m")
    (tmp_path / "f").write_text(yaml.safe_dump({name.replace("_", "-"): value for name, value in given.items()}))
    assert from_command_line(["m", "--config", str(tmp_path / "f")]) == EngineArgs("m")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("served_model_name", "x", "^served_model_name is a flag of `kvasir serve`; leave it out here.$"),
        ("enable_log_requests", True, "^enable_log_requests is a flag of `kvasir serve`"),
        ("tokenizer_mode", "slow", "^tokenizer_mode is a setting of vLLM that Kvasir does not have yet.$"),
        ("disable_custom_all_reduce", True, "^disable_custom_all_reduce is a setting of vLLM"),
        ("compilation_config", {"mode": 3}, "^compilation_config is a setting of vLLM"),
        ("scheduler_reserve_full_isl", False, "^scheduler_reserve_full_isl is a setting of vLLM"),
        ("nnodes", 2, "^nnodes is a setting of vLLM"),
        ("nnodes", True, "^nnodes is a setting of vLLM"),
        ("task", "embed", "^task was vLLM's; use runner='pooling' .*leave it out otherwise.$"),
        ("num_scheduler_steps", 8, "^num_scheduler_steps was vLLM's; leave it out"),
        ("use_v2_block_manager", True, "^use_v2_block_manager was vLLM's; leave it out"),
        ("worker_use_ray", True, "^worker_use_ray was vLLM's; leave it out"),
        ("max_seq_len_to_capture", 8192, "^max_seq_len_to_capture was vLLM's; leave it out"),
        ("disable_async_output_proc", True, "^disable_async_output_proc was vLLM's; leave it out"),
        ("override_pooler_config", {"normalize": True}, "^override_pooler_config was vLLM's; use pooler_config.$"),
    ],
)
def test_what_vllms_keywords_ask_for_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs("m", **{name: value})


def test_no_seed_is_another_one_every_time() -> None:
    seeds = {EngineArgs("m", seed=None).seed for _ in range(8)}
    assert len(seeds) > 1 and min(seeds) >= 0


@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_vllms_backends_of_structured_output_are_to_be_left_out(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"backend='{backend}' is a backend of vLLM. Leave backend out"):
        EngineArgs("m", structured_outputs_config={"backend": backend})


REMOTE = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}, "model_type": "no_such_type"}


@pytest.mark.parametrize("extra", [{}, REMOTE], ids=["plain", "auto_map"])
def test_trust_in_code_that_is_not_needed_is_a_warning(
    extra: dict[str, Any], world: World, log_lines: list[str]
) -> None:
    (world.path / "config.json").write_text(json.dumps(HF | extra))
    for _ in range(2):
        resolve(EngineArgs(str(world.path), trust_remote_code=True))
    assert len([line for line in log_lines if "Kvasir runs no code of models; trust_remote_code" in line]) == 1
    log_lines.clear()
    resolve(EngineArgs(str(world.path)))
    assert not [line for line in log_lines if "trust_remote_code" in line]


@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("kind", ["no_such_type", None, ["llama"]], ids=str)
def test_a_model_that_is_only_code_is_refused(trust: bool, implementation: str, kind: Any, world: World) -> None:
    hf = HF | REMOTE | {"architectures": ["XForCausalLM"], "model_type": kind}
    (world.path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ModelError, match="XForCausalLM comes only as Python code with the model .*runs no code"):
        resolve(EngineArgs(str(world.path), trust_remote_code=trust, model_impl=implementation))


# ---------------------------------------------------------------- what comes out


def test_the_settled_configuration_is_plain_data(world: World) -> None:
    config = resolve(EngineArgs(str(world.path)))
    assert pickle.loads(pickle.dumps(config)) == config
    assert json.loads(json.dumps(dataclasses.asdict(config)))["model"]["vocab_size"] == 1000
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.seed = 3  # type: ignore[misc]


def test_a_settled_configuration_stays_as_it_is(world: World) -> None:
    config = resolve(EngineArgs(str(world.path)))
    assert resolve(config) is config
    assert resolve(EngineConfig(ModelConfig(str(world.path)))) == config


def test_the_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "configuration_page.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run `make docs`"
