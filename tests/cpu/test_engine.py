"""The whole engine on tiny models: its log-probabilities and greedy text equal transformers', whatever the load."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError, EngineDeadError, KvasirError, ModelError, RequestError
from kvasir.outputs import RequestOutput
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric, tokens
from tests.model_builders import REPRESENTATIVE, TINY
from tests.pairwise import few

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
# Those of which everything is asked; of the others, log-probabilities and text under load.
CORE = ("llama", "mistral_window", "qwen3")


@pytest.fixture(scope="module", params=few(list(TINY), fast=REPRESENTATIVE))
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


@pytest.fixture(scope="module", params=few(CORE, fast=["mistral_window"]))
def core_model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


@pytest.fixture(scope="module")
def qwen(models: Callable[[str], Model]) -> Model:
    return models("qwen3")


@pytest.fixture(scope="module")
def llm(qwen: Model) -> Iterator[LLM]:
    with qwen.llm() as llm:
        yield llm


# ---------------------------------------------------------------- parity


def check_logprobs(model: Model, outputs: list[RequestOutput]) -> None:
    """Every log-probability the engine reports equals transformers' for the same text; the text is greedy."""
    for output in outputs:
        text = output.prompt_token_ids + output.outputs[0].token_ids
        wanted = model.logprobs(text)
        for i, entry in enumerate(output.outputs[0].logprobs or []):
            at = len(output.prompt_token_ids) + i - 1
            assert wanted[at].max() - wanted[at, text[at + 1]] < 1e-4, f"position {at}: not transformers' choice"
            for token, logprob in entry.items():
                assert math.isclose(logprob.logprob, wanted[at, token], abs_tol=1e-4), f"position {at}, token {token}"


def test_logits_and_text_equal_transformers_under_every_kind_of_load(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=20)
    with model.llm(**model.tight(), async_scheduling=True) as llm:
        assert llm.llm_engine.config.model.model_impl == "kvasir", "transformers would be compared with itself"
        outputs = generate(llm, model.prompts[:12], params)
        again = generate(llm, model.prompts[11::-1], params)  # what ended last is cached still
        assert metric(llm, "num_preemptions") + metric(llm, "kv_blocks_freed_by_window") > 0
        assert metric(llm, "partial_prefills") > 0
        assert metric(llm, "prefix_cache_hits") > 0
    check_logprobs(model, outputs)
    check_logprobs(model, again)
    assert tokens(outputs) == tokens(again)[::-1]


def test_the_last_layer_is_spared_tokens_that_nobody_asks_for(core_model: Model) -> None:
    """Scores of a prompt need all of them, so asking for those is the same step without the saving."""
    found, narrowed = [], []
    for params in (GREEDY, replace(GREEDY, prompt_logprobs=0)):
        with core_model.llm(**SMALL) as llm:
            found.append(tokens(generate(llm, core_model.prompts, params)))
            narrowed.append(llm.llm_engine.client.core.executor.runner.stats.narrowed_steps)  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert narrowed[0] > 5 and narrowed[1] == 0


@pytest.mark.parametrize(
    ("name", "groups", "most"),
    [
        ("mistral_window", 1, 3),  # all layers see 7 tokens, blocks hold 4: no more than 3 blocks are ever needed
        ("gemma2", 2, 25 + 3),  # half of them see everything
        pytest.param("smollm3_windows", 3, 2 * 25 + 3, marks=pytest.mark.slow),
        pytest.param("phi3", 1, 4, marks=pytest.mark.slow),
    ],
)
def test_windows_give_blocks_back(name: str, groups: int, most: int, models: Callable[[str], Model]) -> None:
    """Text far beyond the window equals transformers', on the few blocks that the window needs."""
    model = models(name)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=5)
    with model.llm(**SMALL) as llm:
        engine = llm.llm_engine
        assert engine.client.core.scheduler.cache.num_groups == groups  # type: ignore[attr-defined]
        engine.add_request("a", {"prompt_token_ids": model.prompts[0][:10]}, params)
        used, last = [], []
        while engine.has_unfinished_requests():
            last = engine.step() or last
            used.append(metric(llm, "kv_cache_blocks_used"))
        assert max(used) <= most
        assert metric(llm, "kv_blocks_freed_by_window") > 15
        # a prefix is found again even where the window's group has only its end
        again = generate(llm, [model.prompts[0][:10] + last[0].outputs[0].token_ids], params.clone())
        assert again[0].num_cached_tokens >= 92
    check_logprobs(model, last)
    check_logprobs(model, again)


def test_a_window_that_no_text_outgrows_makes_no_group(models: Callable[[str], Model]) -> None:
    with models("mistral_window").llm(max_model_len=7) as llm:
        assert llm.llm_engine.client.core.scheduler.cache.windows == (None,)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_text_equals_what_transformers_generates(core_model: Model) -> None:
    with core_model.llm(**core_model.tight()) as llm:
        assert tokens(generate(llm, core_model.prompts, GREEDY)) == [core_model.greedy(p) for p in core_model.prompts]


def test_greedy_text_alone_equals_at_once(core_model: Model) -> None:
    model = core_model
    with model.llm(enable_prefix_caching=False) as llm:
        together = tokens(generate(llm, model.prompts, GREEDY))
        alone = [tokens(generate(llm, [p], GREEDY))[0] for p in model.prompts]
    assert together == alone


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.slow),
        {"async_scheduling": False},
        pytest.param({"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param(SMALL, marks=pytest.mark.slow),
        pytest.param(TIGHT, marks=pytest.mark.slow),
        {**TIGHT, "enable_prefix_caching": False},
        {**SMALL, "long_prefill_token_threshold": 5},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128, "max_num_seqs": 8},
        {"block_size": 1},
        pytest.param({"block_size": 64}, marks=pytest.mark.slow),
        {"block_size": 256},
    ],
    ids=str,
)
def test_no_setting_changes_the_text(qwen: Model, settings: dict[str, Any]) -> None:
    prompts = qwen.prompts[:10]
    with qwen.llm(**settings) as llm:
        assert tokens(generate(llm, prompts, GREEDY)) == [qwen.greedy(p) for p in prompts]


def test_no_full_collection_of_garbage_halts_a_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step, before = set(), llm.llm_engine.step, gc.get_threshold()

    def watched() -> Any:
        seen.add(gc.get_threshold()[2])
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", watched)
    llm.generate({"prompt_token_ids": [3, 4]}, GREEDY, use_tqdm=False)
    assert min(seen) > 1 << 20 and gc.get_threshold() == before


def test_seeded_output_is_the_same_alone_and_in_a_batch_of_64(qwen: Model) -> None:
    params = [
        SamplingParams(
            temperature=0.5 + i % 5 / 4, top_p=0.95, top_k=i % 7 * 10, seed=i, max_tokens=12, ignore_eos=True
        )
        for i in range(64)
    ]
    prompts = [qwen.prompts[i % 16] for i in range(64)]
    with qwen.llm(max_num_seqs=64) as llm:
        together = tokens(generate(llm, prompts, params))
        alone = [tokens(generate(llm, [p], s))[0] for p, s in zip(prompts[:16], params[:16], strict=True)]
    assert together[:16] == alone
    assert len({tuple(text) for text in together}) > 32, "different seeds say different things"


def test_fork_shares_blocks_with_a_real_model(qwen: Model) -> None:
    """A fork taken in the middle of a block goes on as the model would."""
    prompt = qwen.prompts[0]
    with qwen.llm(**SMALL) as llm:
        engine = llm.llm_engine
        greedy = partial(SamplingParams, temperature=0, ignore_eos=True)
        engine.add_request("parent", {"prompt_token_ids": prompt}, greedy(max_tokens=20))
        said: list[int] = []
        while len(said) < 6:
            for output in engine.step():
                said = list(output.outputs[0].token_ids)
        child = {"prompt_token_ids": prompt + said}
        request, state = engine.input_processor.process("child", child, greedy(max_tokens=9), 77, 0.0)
        engine.client.core.scheduler.fork(0, request)  # type: ignore[attr-defined]
        engine.output_processor.add(state)
        done = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = output.outputs[0].token_ids
        assert metric(llm, "kv_block_copies") >= 1
    wanted = qwen.greedy(prompt, 20)
    assert done["parent"] == wanted
    assert done["child"] == wanted[6:15]


# ---------------------------------------------------------------- sampling parameters


def test_min_tokens_holds_stop_tokens_back(qwen: Model, llm: LLM) -> None:
    prompt = qwen.prompts[0]
    stop = qwen.greedy(prompt)[0]
    short = generate(llm, [prompt], SamplingParams(temperature=0, stop_token_ids=[stop], max_tokens=32))[0].outputs[0]
    assert short.token_ids == [stop] and short.finish_reason == "stop" and short.stop_reason == stop
    held = generate(llm, [prompt], SamplingParams(temperature=0, stop_token_ids=[stop], min_tokens=9, max_tokens=32))[0]
    assert stop not in held.outputs[0].token_ids[:9]


def test_length_ends_with_its_reason(llm: LLM, qwen: Model) -> None:
    (output,) = generate(llm, [qwen.prompts[1]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"


def test_max_tokens_stops_at_the_model_length(qwen: Model) -> None:
    with qwen.llm(max_model_len=40) as llm:
        (output,) = generate(llm, [qwen.prompts[0][:30]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(qwen: Model) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)

    def draw(seed: int) -> list[list[int]]:
        with qwen.llm(seed=seed) as llm:
            return tokens(generate(llm, [qwen.prompts[0]] * 4, params))

    first = draw(1)
    assert len({tuple(text) for text in first}) == 4
    assert draw(1) == first != draw(2)


# ---------------------------------------------------------------- bad input


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "empty"),
    ([5] * 128, "128"),
    ([5, 96], "vocabulary"),
    ([5, -1], "vocabulary"),
    ([5, "x"], "integer"),
    ("text", "tokenizer"),
]


@pytest.mark.parametrize(("prompt", "said"), BAD_PROMPTS, ids=str)
def test_bad_prompt_is_refused_and_the_engine_goes_on(llm: LLM, qwen: Model, prompt: Any, said: str) -> None:
    good = {"prompt_token_ids": qwen.prompts[0]}
    bad = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    with pytest.raises(RequestError, match=said) as error:
        llm.generate([good, bad], GREEDY, use_tqdm=False)
    assert str(error.value).startswith("prompt 1: ")
    assert not llm.llm_engine.has_unfinished_requests(), "the good prompt of the same call was left running"
    assert tokens(generate(llm, [qwen.prompts[0]], GREEDY)) == [qwen.greedy(qwen.prompts[0])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(temperature=-1),
        lambda: SamplingParams(temperature=float("nan")),
        lambda: SamplingParams(top_p=0),
        lambda: SamplingParams(top_k=-2),
        lambda: SamplingParams(min_p=1.5),
        lambda: SamplingParams(max_tokens=0),
        lambda: SamplingParams(min_tokens=9, max_tokens=3),
        lambda: SamplingParams(thinking_token_budget=2),
        lambda: SamplingParams(presence_penalty=2.5),
        lambda: SamplingParams(temprature=1),
    ],
)
def test_bad_parameters_are_refused_by_name(make: Callable[[], SamplingParams]) -> None:
    with pytest.raises(RequestError) as error:
        make()
    assert error.value.parameter


def test_mismatched_parameters_and_too_many_logprobs(llm: LLM, qwen: Model) -> None:
    with pytest.raises(RequestError, match="16 prompts but 2 sampling_params"):
        generate(llm, qwen.prompts, [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="20"):
        generate(llm, qwen.prompts, SamplingParams(logprobs=21))


def test_model_that_cannot_be_loaded_says_why(qwen: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    unknown = {"architectures": ["NoSuchModel"], "vocab_size": 9, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(ModelError, match="NoSuchModel.*LlamaForCausalLM"):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy")
    with pytest.raises(ModelError):
        qwen.llm(hf_overrides={"intermediate_size": 64})


def test_cache_that_cannot_hold_one_request_says_what_to_change(qwen: Model) -> None:
    advice = r"max_model_len=128 needs [1-9][\d.]* [KM]iB.*set max_model_len to \d+.*num_gpu_blocks_override"
    with pytest.raises(ConfigError, match=advice):
        qwen.llm(num_gpu_blocks_override=4, block_size=16)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        qwen.llm(kv_cache_memory_bytes=5000)


# ---------------------------------------------------------------- life


def test_close_frees_everything_and_says_so_afterwards(qwen: Model) -> None:
    llm = qwen.llm()
    worker = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
    held = [weakref.ref(worker.model), weakref.ref(worker.runner.kv_memory)]
    del worker
    llm.close()
    llm.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    with pytest.raises(EngineDeadError, match="closed"):
        generate(llm, [[1]], GREEDY)


def test_engine_steps_streams_and_aborts(qwen: Model) -> None:
    with qwen.llm() as llm:
        engine = llm.llm_engine
        for name in ("a", "b"):
            engine.add_request(name, {"prompt_token_ids": qwen.prompts[0]}, GREEDY.clone())
        with pytest.raises(RequestError, match="in use"):
            engine.add_request("a", {"prompt_token_ids": [1]}, GREEDY)
        seen: dict[str, list[int]] = {}
        for step in range(200):
            for output in engine.step():
                longer = list(output.outputs[0].token_ids)
                assert longer[: len(seen.get(output.request_id, []))] == seen.get(output.request_id, [])
                seen[output.request_id] = longer
            if step == 9:
                (last,) = engine.abort_request(["b", "unknown"])
                assert last.finished and last.outputs[0].finish_reason == "abort"
        assert not engine.has_unfinished_requests()
        assert seen["a"] == qwen.greedy(qwen.prompts[0])
        assert len(seen["b"]) < 32
        assert metric(llm, "kv_cache_blocks_used") == 0


def test_interrupted_generate_leaves_nothing_running(llm: LLM, qwen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.llm_engine.step
    calls = iter(range(100))

    def interrupted() -> list[RequestOutput]:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, qwen.prompts, GREEDY)
    monkeypatch.undo()
    assert tokens(generate(llm, qwen.prompts[:2], GREEDY)) == [qwen.greedy(p) for p in qwen.prompts[:2]]
    assert metric(llm, "kv_cache_blocks_used") == 0


def test_failing_step_ends_the_engine_with_its_cause(qwen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = qwen.llm()

    def broken(*_: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.llm_engine.client.core.executor, "execute", broken)  # type: ignore[attr-defined]
    with pytest.raises(KvasirError, match="device lost"):
        generate(llm, qwen.prompts, GREEDY)
    with pytest.raises(EngineDeadError, match="device lost"):
        generate(llm, qwen.prompts, GREEDY)
    llm.close()


def test_reset_prefix_cache(llm: LLM, qwen: Model) -> None:
    generate(llm, [qwen.prompts[0] * 2], GREEDY)
    assert generate(llm, [qwen.prompts[0] * 2], GREEDY)[0].num_cached_tokens
    assert llm.reset_prefix_cache()
    assert generate(llm, [qwen.prompts[0] * 2], GREEDY)[0].num_cached_tokens == 0


# ---------------------------------------------------------------- settings reach the engine

# Those of a group are set together; a setting by itself is in a group of its own where another would change it.
Reads = list[tuple[dict[str, Any], Callable[[LLM], Any], Any]]
REACHED: list[Reads] = [
    [
        ({"block_size": 8}, lambda llm: core(llm).scheduler.cache.block_size, 8),
        ({"num_gpu_blocks_override": 77}, lambda llm: core(llm).scheduler.cache.pool.num_blocks, 77),
        ({"enable_prefix_caching": False}, lambda llm: core(llm).scheduler.cache.caching, False),
        ({"max_num_seqs": 3}, lambda llm: core(llm).scheduler.rows.num_free, 3),
        ({"max_num_batched_tokens": 300}, lambda llm: core(llm).scheduler.limits.max_num_batched_tokens, 300),
        ({"long_prefill_token_threshold": 9}, lambda llm: core(llm).scheduler.limits.long_prefill_token_threshold, 9),
        ({"async_scheduling": True}, lambda llm: core(llm).lookahead, 1),
        ({"max_logprobs": 2}, lambda llm: refusal(llm, SamplingParams(logprobs=3)), "logprobs"),
    ],
    [
        ({"enable_chunked_prefill": False}, lambda llm: core(llm).scheduler.limits.chunked_prefill, False),
        ({"async_scheduling": False}, lambda llm: core(llm).lookahead, 0),
        ({"max_model_len": 50}, lambda llm: core(llm).scheduler.rows.tokens.shape[1], 50),
        ({"dtype": "bfloat16"}, lambda llm: decoder(llm).norm.weight.dtype, torch.bfloat16),
    ],
    [({"kv_cache_memory_bytes": 1 << 20, "block_size": 16}, lambda llm: core(llm).scheduler.cache.pool.num_blocks, 56)],
]


def core(llm: LLM) -> Any:
    return llm.llm_engine.client.core  # type: ignore[attr-defined]


def decoder(llm: LLM) -> Any:
    """The model itself, whoever runs it."""
    model = core(llm).executor.model
    return getattr(model, "model", model)


def refusal(llm: LLM, params: SamplingParams) -> str | None:
    try:
        generate(llm, [[1, 2]], params)
    except RequestError as error:
        return error.parameter
    return None


@pytest.mark.parametrize("reads", REACHED, ids=["most", "others", "bytes"])
def test_settings_reach_the_engine(qwen: Model, reads: Reads) -> None:
    settings = {name: value for each, _, _ in reads for name, value in each.items()}
    with qwen.llm(**settings) as llm:
        for each, read, wanted in reads:
            assert read(llm) == wanted, each


def test_progress_bar_while_loading_can_be_turned_off(qwen: Model, capfd: pytest.CaptureFixture[str]) -> None:
    qwen.llm(use_tqdm_on_load=True).close()
    assert "Loading weights" in capfd.readouterr().err
    qwen.llm(use_tqdm_on_load=False).close()
    assert "Loading weights" not in capfd.readouterr().err


# ---------------------------------------------------------------- interrupted, and misused


@pytest.mark.parametrize("prompts", few([1, 16], fast=[16]))
def test_ctrl_c_in_the_middle_leaves_a_working_engine(qwen: Model, prompts: int) -> None:
    with qwen.llm(async_scheduling=True) as llm:
        endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        for _ in range(3):
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    generate(llm, [p[:20] for p in qwen.prompts[:prompts]], endless)
            timer.join()
            assert tokens(generate(llm, qwen.prompts[:2], GREEDY)) == [qwen.greedy(p) for p in qwen.prompts[:2]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_exit_raised_inside_a_step_leaves_a_working_engine(llm: LLM, qwen: Model) -> None:
    def leave(said: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(said) == 3:
            raise SystemExit(3)
        return logits

    with pytest.raises(SystemExit):
        generate(llm, qwen.prompts[:1], SamplingParams(logits_processors=[leave], max_tokens=9, ignore_eos=True))
    assert tokens(generate(llm, qwen.prompts, GREEDY)) == [qwen.greedy(p) for p in qwen.prompts]


def test_threads_take_turns(llm: LLM, qwen: Model) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda p: tokens(generate(llm, [p], GREEDY))[0], qwen.prompts[:8]))
    assert texts == [qwen.greedy(p) for p in qwen.prompts[:8]]


def test_generate_beside_requests_added_by_hand_is_refused(llm: LLM, qwen: Model) -> None:
    llm.llm_engine.add_request("mine", {"prompt_token_ids": [5, 6]}, GREEDY.clone())
    with pytest.raises(RequestError, match="added by hand"):
        generate(llm, qwen.prompts[:1], GREEDY)
    llm.llm_engine.abort_request("mine")
    assert tokens(generate(llm, qwen.prompts[:1], GREEDY)) == [qwen.greedy(qwen.prompts[0])]


@pytest.mark.parametrize("wrong", [{"max_tokens": 2}, 5, "greedy", [GREEDY, None]], ids=str)
def test_parameters_of_the_wrong_type_are_refused(llm: LLM, qwen: Model, wrong: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams, not"):
        generate(llm, qwen.prompts[:2], wrong)


def test_an_adapter_needs_an_engine_that_takes_adapters(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest, not str"):
        llm.generate([1, 2], GREEDY, use_tqdm=False, lora_request="adapter")  # type: ignore[arg-type]
