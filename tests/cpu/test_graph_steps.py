"""Whole steps as graphs would run them, without a GPU: the kernels in Triton's interpreter, replays by running again.

What only a GPU can show is left to tests/gpu: that nothing waits, and that what is captured may be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvasir import LLM, LoRARequest, SamplingParams, kernels
from kvasir.attention import base as attention_backends
from kvasir.messages import GraphUse
from tests.adapter_builders import GREEDY, TINY_ENGINE, check, write_lora
from tests.draft_head_builders import Shape, TorchHead, TorchMedusa
from tests.model_builders import make_hf_model, save
from tests.pairwise import few

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run for real here: see tests/gpu", allow_module_level=True)

from kvasir import messages
from kvasir.engine.cache import prefix_groups
from kvasir.kernels import triton as triton_kernels
from kvasir.kernels.triton import adapters as triton_adapters
from kvasir.kernels.triton import paged_decode
from kvasir.worker import graph_keys as keys
from kvasir.worker import step_graphs
from kvasir.worker.graph_memory import Captured
from kvasir.worker.speculative.drafter import PassDrafter
from tests.capturing import capturing
from tests.graph_fakes import Repeats


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test run as graphs; what pays on a GPU only with many rows does here with few."""
    monkeypatch.setattr(step_graphs, "GraphPool", Repeats)
    monkeypatch.setitem(attention_backends._BACKENDS, "torch", attention_backends._BACKENDS["triton"])
    monkeypatch.setattr(paged_decode, "order_pays", lambda sequences: sequences >= 2)
    monkeypatch.setattr(paged_decode, "choose_split", lambda sequences, kv_heads: paged_decode.Split(2, 32))
    monkeypatch.setattr(prefix_groups, "MIN_GROUP_ROWS", 3)
    monkeypatch.setattr("kvasir.engine.scheduler.MIN_GROUP_ROWS", 3)
    monkeypatch.setattr(messages, "MIN_GROUP_ROWS", 3)
    monkeypatch.setattr(keys, "MIN_SHARED_TOKENS", 16)
    monkeypatch.setattr(prefix_groups, "is_worthwhile", lambda sequences, tokens: tokens >= 16 and sequences >= 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_hf_model("qwen3", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(path: Path) -> list[list[int]]:
    """What the requests of `answers_of(path, 16)` are answered without graphs."""
    return answers_of(path, 16)[0]


def some_requests(shared: int) -> tuple[list[Any], list[SamplingParams]]:
    rng = np.random.default_rng(shared)
    stem = rng.integers(2, 96, shared).tolist()
    lengths, answers = rng.integers(1, 12, 5), [2, 3, 5, 6, 7]  # one after the other ends
    prompts = [{"prompt_token_ids": stem + rng.integers(2, 96, int(n)).tolist()} for n in lengths]
    return prompts, [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in answers]


def answers_of(path: Path, shared: int) -> tuple[list[list[int]], Any]:
    prompts, params = some_requests(shared)
    settings = {"max_model_len": 128, "max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 16}
    settings |= {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings) as llm:
        said = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
        graphs = core.executor.runner.graphs
        assert core.graphs.use == (GraphUse() if graphs is None else graphs.use), "the core knows of every graph"
        return said, graphs


@pytest.mark.parametrize("shared", few([0, 16], fast=[16]))
def test_steps_as_graphs_say_what_plain_steps_say(path: Path, shared: int, request: pytest.FixtureRequest) -> None:
    wanted, none = answers_of(path, shared)
    assert none is None, "the CPU's own backend runs without graphs"
    request.getfixturevalue("graphs")
    found, taken = answers_of(path, shared)
    assert found == wanted
    stats = taken.stats
    assert stats.mixed_steps > 0 and stats.ordered_steps > 0 and stats.replays > stats.mixed_steps
    assert (stats.shared_prefix_steps > 0) == (shared > 0)
    assert taken.use.num_graphs == len(taken.forwards) + len(taken.heads) > 4
    assert set(taken.forwards) == set(taken.keys.forwards()) and taken.use.late_captures == 0


@pytest.mark.parametrize("ahead", few([False, True], fast=[True]))
def test_drafts_are_verified_by_graphs(path: Path, request: pytest.FixtureRequest, ahead: bool) -> None:
    """Rows with drafts, rows without and chunks of prompts in the same steps; some heads have no graph."""
    rng = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": (rng.integers(2, 96, 3).tolist() * 9)[: int(n)]} for n in (20, 3, 9, 14)]
    asked: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3, "top_k": 20}, {"logprobs": 2}, {}]
    asked[3] = {"repetition_penalty": 1.1}
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 6 + i, "ignore_eos": True, **own})
              for i, own in enumerate(asked)]  # fmt: skip
    settings: Any = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 16}
    settings |= {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}
    drafting = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}

    def answers(**more: Any) -> tuple[list[Any], Any]:
        with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings, **more) as llm:
            found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
            said = [(one.token_ids, [sorted(line) for line in one.logprobs or ()]) for one in found]
            return said, (core.executor.runner.graphs, core.stats())

    wanted, _ = answers()
    request.getfixturevalue("graphs")
    found, (graphs, stats) = answers(speculative_config=drafting, async_scheduling=ahead)
    assert found == wanted
    assert stats.accepted_tokens > 0 and graphs.stats.mixed_steps > 0 and sum(graphs.stats.heads.values()) > 0
    assert set(graphs.forwards) == set(graphs.keys.forwards()) and graphs.use.late_captures == 0


@pytest.mark.parametrize(
    ("ahead", "count", "method"),
    few([(a, k, m) for a in (False, True) for k in (1, 3) for m in ("eagle3", "medusa")], fast=[(True, 3, "eagle3")]),
)
def test_heads_that_draft_run_as_graphs(
    path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ahead: bool,
    count: int,
    method: str,
) -> None:
    """The head follows the model within the forward graphs, and drafts in graphs of its own, whose drafts are those of
    steps without graphs."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, 96, int(n)).tolist() for n in (20, 3, 9)]
    asked: list[dict[str, Any]] = [{}, {"temperature": 0.6, "seed": 3}, {"repetition_penalty": 1.1}]
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 4 + i, "ignore_eos": True, **own})
              for i, own in enumerate(asked)]  # fmt: skip
    settings: Any = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 16}
    settings |= {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}

    def answers(**more: Any) -> tuple[list[list[int]], Any, Any]:
        with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings, **more) as llm:
            found = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
            core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
            return [list(each.outputs[0].token_ids) for each in found], core.executor.runner.graphs, core.stats()

    drafted: list[list[list[int]]] = []
    propose = PassDrafter.propose

    def watched(self: PassDrafter, taken: Any, drafts: Any) -> None:
        propose(self, taken, drafts)
        drafted.append(drafts.tokens[taken.rows, : taken.wanted].tolist())

    monkeypatch.setattr(PassDrafter, "propose", watched)
    wanted, _, _ = answers()
    target = AutoModelForCausalLM.from_pretrained(path)
    drafting = {"method": method, "num_speculative_tokens": count, "adaptive": False}
    if method == "eagle3":
        head = TorchHead(Shape(features=(0,), vocab=64), target)
        head.learn([prompt + said for prompt, said in zip(prompts, wanted, strict=True)], 60)
        drafting["model"] = head.save(tmp_path)
    else:
        drafting["model"] = TorchMedusa(target, heads=3).save(tmp_path, by_authors=True)
    found, _, eager = answers(speculative_config=drafting, async_scheduling=ahead)
    assert found == wanted and (eager.accepted_tokens > 2 or method == "medusa")
    eagerly, drafted = drafted, []
    request.getfixturevalue("graphs")
    found, graphs, stats = answers(speculative_config=drafting, async_scheduling=ahead)
    assert found == wanted
    assert drafted == eagerly and stats.accepted_by_position == eager.accepted_by_position
    assert set(graphs.passes) == set(graphs.pass_keys()) and graphs.stats.passes > 3
    assert graphs.stats.mixed_steps > 0 and graphs.use.late_captures == 0


@pytest.mark.slow
def test_adapters_have_graphs_of_their_own(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without adapters replays the graphs of the plain model; one with them replays others, of all sizes."""
    model = make_hf_model("llama", num_hidden_layers=1)
    merged = {f"a{seed}": write_lora(model, tmp_path / f"a{seed}", seed) for seed in (1, 2)}
    save(model, tmp_path / "base")
    request.getfixturevalue("graphs")
    monkeypatch.setattr(kernels, "adapt", triton_adapters.adapt)
    settings = {**TINY_ENGINE, "max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 16, "max_lora_rank": 4}
    prompts = [{"prompt_token_ids": list(range(3, 9 + i))} for i in range(4)]
    with LLM(str(tmp_path / "base"), **settings) as llm:
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
        stats = core.executor.runner.graphs.stats
        for output in llm.generate(prompts, GREEDY, use_tqdm=False):
            check(model, output)
        assert stats.replays > 10 and stats.changed_steps == 0
        names = [None, "a1", "a2", "a1"]
        asked = [name and LoRARequest(name, 1, str(tmp_path / name)) for name in names]
        before = stats.replays
        for name, output in zip(names, llm.generate(prompts, GREEDY, lora_request=asked, use_tqdm=False), strict=True):
            check(merged.get(name or "", model), output)
        assert stats.changed_steps > 10 and stats.replays - before >= stats.changed_steps
        assert core.executor.runner.graphs.use.late_captures == 0


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_prefixes_that_only_some_share(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """Two groups of requests among others, which join while the first ones run: steps of single tokens and mixed ones
    read each prefix once."""
    rng = np.random.default_rng(3)
    stems = [rng.integers(2, 96, n).tolist() for n in (16, 32, 0)]
    kinds = [0, 1, 0, 2, 1, 0, 1, 1, 0]
    prompts = [{"prompt_token_ids": stems[kind] + rng.integers(2, 96, 5).tolist()} for kind in kinds]
    params = [SamplingParams(temperature=0, max_tokens=5 + i // 2, ignore_eos=True) for i in range(len(kinds))]
    settings: Any = {"max_model_len": 128, "max_num_seqs": 10, "max_num_batched_tokens": 24, "block_size": 16}
    settings |= {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}

    def answers() -> tuple[list[list[int]], list[int], Any]:
        groups: list[int] = []
        with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings) as llm:
            core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
            groups_of = core.scheduler._prefix_groups.groups_of
            core.scheduler._prefix_groups.groups_of = lambda rows: watched(groups_of(rows), groups)
            said = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            return said, groups, core.executor.runner.graphs

    wanted, none, _ = answers()
    assert not any(none)
    request.getfixturevalue("graphs")
    settings["enforce_eager"] = eager
    attend, calls = paged_decode.attend_prefixes, []
    monkeypatch.setattr(paged_decode, "attend_prefixes", lambda *args: calls.append(1) or attend(*args))
    found, groups, taken = answers()
    assert found == wanted
    assert max(groups) == 2, "two prefixes in one step"
    shared = sum(count > 0 for count in groups)
    if eager:
        assert taken is None and len(calls) == shared
        return
    assert taken.stats.shared_prefix_steps == shared


def watched(shared: messages.PrefixGroups | None, groups: list[int]) -> messages.PrefixGroups | None:
    groups.append(0 if shared is None else len(shared.tokens))
    return shared


class Full(Repeats):
    """A device that has memory for few graphs."""

    def capture(self, run: Callable[[], Any]) -> Captured[Any]:
        if self.taken >= 5 << 20:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return super().capture(run)


def test_steps_whose_graphs_find_no_memory_run_without(
    path: Path, plain: list[list[int]], graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_graphs, "GraphPool", Full)
    found, taken = answers_of(path, 16)
    assert found == plain
    assert len(taken.forwards) == 5 and not taken.heads and taken.stats.replays > 0
    assert "there is memory for 5 of" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompiling_changes_nothing(
    path: Path, plain: list[list[int]], graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graph's kernels are compiled before anything is captured, with a model of few layers."""
    compiled: list[keys.ForwardGraphKey] = []
    forward = step_graphs.StepGraphs._forward

    def seen(self: step_graphs.StepGraphs, key: keys.ForwardGraphKey, model: Any) -> Any:
        if model is not self.model:
            compiled.append(key)
        return forward(self, key, model)

    monkeypatch.setattr(step_graphs.kernels, "are_compiled", lambda device: device.type == "cpu")
    monkeypatch.setattr(step_graphs.kernels, "watch_compilations", lambda device: None)
    monkeypatch.setattr(step_graphs.kernels, "compile_listed", lambda name: False)
    monkeypatch.setattr(step_graphs.kernels, "keep_list", lambda name: None)
    monkeypatch.setattr(step_graphs.StepGraphs, "_forward", seen)
    found, taken = answers_of(path, 16)
    assert found == plain
    assert len(compiled) > 4 and set(compiled) == set(taken.forwards)


@pytest.mark.timeout(30)
def test_precompile_within_precompile_is_refused() -> None:
    precompile, refused = step_graphs.kernels.precompile, pytest.raises(AssertionError, match="would wait for itself")
    with precompile(), refused, precompile():
        pass
    with precompile():
        pass  # the end of the first left everything as it was


def test_a_copy_to_compile_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    path = save(make_hf_model("gemma2", num_hidden_layers=4), tmp_path)
    with LLM(
        str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, dtype="float32", device="cpu", max_model_len=64,
        attention_backend="torch", kv_cache_memory_bytes=8 << 20,
    ) as llm:  # fmt: skip
        model = llm.llm_engine.client.core.executor.model  # type: ignore[attr-defined]
        short = model.compile_copy()
        assert {layer.attention.window for layer in short.layers} == {layer.attention.window for layer in model.layers}
        assert (len(short.layers), len(model.layers)) == (3, 4) and short.layers[-1] is model.layers[-1]


def test_the_check_of_logits_sees_those_of_steps_that_are_graphs(
    path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/h200/logits.py, which runs before anything is timed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks" / "h200"))
    check = import_module("logits")
    settings: Any = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 16, "dtype": "float32", "device": "cpu"}
    settings |= {"attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings) as llm:
        found, sequences = check.engine_logits(llm, [[3, 4, 5], [6]], 3)
        taken: Any = llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]
        assert sorted(found) == [(0, 3), (0, 4), (0, 5), (1, 1), (1, 2), (1, 3)]
        assert [len(each) for each in sequences] == [6, 4] and taken.stats.replays > 0


@pytest.mark.parametrize(("kind", "pooling"), few([("Bert", "cls"), ("ModernBert", "mean")], fast=[("Bert", "cls")]))
def test_prompts_of_an_encoder_run_as_graphs(
    kind: str, pooling: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 48, "pad_token_id": 0}
    if kind == "ModernBert":
        sizes |= {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(1)
    getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(tmp_path)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 96, int(count)).tolist() for count in (1, 5, 31, 2, 2, 40, 1, 17, 33, 7, 1, 1, 3)]
    settings: Any = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "max_num_batched_tokens": 80}
    settings |= {"skip_tokenizer_init": True, "pooler_config": {"pooling_type": pooling}, "max_num_seqs": 9}

    def vectors() -> tuple[list[Any], Any]:
        with LLM(str(tmp_path), **settings) as llm:
            found = [output.outputs.data for output in llm.encode(prompts, use_tqdm=False)]
            found += [output.outputs.data for output in llm.encode(prompts[1], use_tqdm=False)]
            every = llm.encode(prompts, use_tqdm=False, pooling_task="token_embed")
            found += [output.outputs.data[-1] for output in every]
            core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
            graphs = core.executor.runner.graphs
            assert core.graphs.use == (GraphUse() if graphs is None else graphs.use)
            if graphs is not None:
                for key in graphs.keys.forwards():
                    graphs.buffers.clear()
                    with torch.inference_mode(), capturing():
                        graphs._forward(key, core.executor.runner.model)
            return found, graphs

    wanted, none = vectors()
    assert none is None
    request.getfixturevalue("graphs")
    monkeypatch.setattr(kernels, "encoder_attention", triton_kernels.encoder_attention)
    found, graphs = vectors()
    for vector, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(vector, other, atol=2e-5)
    assert set(graphs.forwards) == set(graphs.keys.forwards()) and len(graphs.forwards) > 6 and not graphs.heads
    assert graphs.stats.replays > 6 and graphs.use.late_captures == 0


@pytest.mark.parametrize(("max_rows", "max_tokens", "length"), [(1, 16, 16), (9, 80, 48), (1024, 16384, 512)])
def test_steps_of_an_encoder_have_graphs_with_room_for_them(max_rows: int, max_tokens: int, length: int) -> None:
    known = keys.make_graph_keys(False, max_rows, max_tokens, length)
    all_keys = list(known.forwards())
    assert all_keys[0].tokens == known.max_size == max_tokens and len(set(all_keys)) == len(all_keys) < 60
    rng, fitting = np.random.default_rng(4), 0
    for _ in range(300):
        counts = rng.integers(1, rng.integers(1, length + 1) + 1, int(rng.integers(1, max_rows + 1))).astype(np.int32)
        counts = counts[np.cumsum(counts) <= max_tokens]
        plan: Any = SimpleNamespace(rows=counts, total_tokens=int(counts.sum()))
        key = known.fit(plan)
        if key is None:
            assert plan.total_tokens > keys.FEW_TOKENS or len(counts) > plan.total_tokens // 4, "a small step"
            continue
        fitting += 1
        assert key in all_keys and len(counts) <= key.rows and plan.total_tokens <= key.tokens
        assert counts.max() <= key.longest and (
            key.tokens <= keys.FEW_TOKENS or key.tokens * 3 <= plan.total_tokens * 4
        )
    assert fitting > 200
