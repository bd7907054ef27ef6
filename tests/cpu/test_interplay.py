"""Everything at once: drafts, constraints, adapters, soft prompts, several completions, beams, log-probabilities, stop
strings, aborts and deadlines, in caches too small for it. Each text is that of running alone, and nothing leaks."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kvasir import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from kvasir.errors import DeviceMemoryError, RequestError
from kvasir.lora.host import VIRTUAL_TOKEN
from kvasir.messages import NewRow
from kvasir.sampling_params import ReasoningTokens, RequestOutputKind
from kvasir.worker.speculative.drafter import Drafter, DrafterSettings, DraftRows, TokensTaken
from tests.adapter_builders import TINY_ENGINE, write_files, write_lora
from tests.builders import check_blocks
from tests.draft_head_builders import Shape, TorchHead, TorchMedusa
from tests.grammars import EOS, THINK_END, small_tokenizer, token_id
from tests.model_builders import make_hf_model, save

VOCAB, LENGTH = 512, 72
Asked = dict[str, Any]  # the arguments of add_request


class Oracle(Drafter):
    """Drafts what each request will say, with a wrong token now and then, so that any number of drafts is accepted."""

    texts: ClassVar[list[list[int]]] = []  # prompts with what follows them

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.random, self.said = random.Random(0), dict[int, list[int]]()  # by row

    def open(self, new_rows: Sequence[NewRow], rows: torch.Tensor) -> None:
        self.said |= {new.row: [] if new.token_ids is None else new.token_ids.tolist() for new in new_rows}

    def learn(self, taken: TokensTaken) -> None:
        for row, own, count in zip(taken.rows.tolist(), taken.tokens.tolist(), taken.counts.tolist(), strict=True):
            self.said[row] += own[:count]

    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        for row in taken.rows.tolist():
            said = self.said[row]
            found = [text[len(said) :] for text in self.texts if said and text[: len(said)] == said]
            more = self.random.choice(found)[: self.num_drafts] if found else []
            more = [token if self.random.random() < 0.9 else (token + 1) % VOCAB for token in more]
            drafts.tokens[row, : len(more)] = torch.tensor(more, dtype=torch.int32)
            drafts.counts[row] = len(more)


class Tiny:
    """A model with a tokenizer, its adapters, and engines of it."""

    def __init__(self, folder: Path, name: str = "llama", **changes: Any) -> None:
        self.folder, self.has_windows = folder, name != "llama"
        self.hf = make_hf_model(name, vocab_size=VOCAB, eos_token_id=token_id(EOS), **changes)
        self.path = save(self.hf, folder / "model")
        small_tokenizer().save(str(self.path / "tokenizer.json"))
        (self.path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
        for seed in (1, 2, 3):
            write_lora(self.hf, folder / f"lora{seed}", seed)
        generator = torch.Generator().manual_seed(4)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.4

        head = {"base_model.model.lm_head.lora_A.weight": random(4, 32)}
        head["base_model.model.lm_head.lora_B.weight"] = random(VOCAB, 4)
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
        write_files(folder / "head", head, {**config, "target_modules": ["lm_head"]})
        first = "base_model.model.model.embed_tokens.lora_embedding_"
        table = {f"{first}A": random(4, VOCAB), f"{first}B": random(32, 4)}
        write_files(folder / "embedding", table, {**config, "target_modules": ["embed_tokens"]})
        config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5}
        write_files(folder / "soft", {"prompt_embeddings": random(5, 32)}, config)
        self.adapters = ["lora1", "lora2", "lora3", "head", "embedding", "soft"]
        if name == "llama":
            config = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}
            write_files(folder / "prefix", {"prompt_embeddings": random(3, 3 * 2 * 16)}, config)
            self.adapters.append("prefix")
        self.drafts = self._drafts()
        self.alone = cache(self._alone)

    def _drafts(self) -> dict[str, dict[str, Any]]:
        """Settings of drafters by method. Those that never fit beside adapters are left out of engines with some."""
        heads: dict[str, Any] = {
            "eagle3": TorchHead(Shape("eagle3", vocab=96), self.hf, seed=2),
            "eagle": TorchHead(Shape("eagle", features=(3,)), self.hf, seed=1),
        }
        medusa = TorchMedusa(self.hf, heads=4)
        (self.folder / "medusa").mkdir()
        models = {name: head.save(self.folder / name) for name, head in heads.items()}
        models |= {"medusa": medusa.save(self.folder / "medusa", by_authors=False), "draft_model": str(self.path)}
        found = {name: {"method": name, "model": model, "num_speculative_tokens": 3} for name, model in models.items()}
        if self.has_windows:  # then drafters with a cache are refused
            found = {"medusa": found["medusa"]}
        found["suffix"] = {"method": "suffix", "num_speculative_tokens": 4}
        found["oracle"] = {"method": "tests.cpu.test_interplay:Oracle", "num_speculative_tokens": 4}
        return found

    def llm(self, **settings: Any) -> LLM:
        own = {"skip_tokenizer_init": False, "max_model_len": LENGTH, "enable_prompt_embeds": True, "max_loras": 7}
        return LLM(str(self.path), **{**TINY_ENGINE, **own, **settings})

    def _alone(self) -> LLM:
        """An engine with everything turned off."""
        return self.llm(async_scheduling=False, enable_prefix_caching=False, max_num_batched_tokens=256)

    def lora(self, name: str) -> LoRARequest:
        return LoRARequest(name, 1 + self.adapters.index(name), str(self.folder / name))

    def vanishing(self, seed: int) -> LoRARequest:
        """An adapter that no engine has read. The caller takes its file away before it is loaded."""
        write_lora(self.hf, self.folder / "vanishing", 1000 + seed)
        return LoRARequest("vanishing", 99, str(self.folder / "vanishing"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tiny]]:
    made = cache(lambda name: Tiny(tmp_path_factory.mktemp(name), name))
    yield made
    made.cache_clear()


# ---------------------------------------------------------------- random requests and settings


CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-c]{3,9}"},
    {"regex": "(the |name )+of"},
    {"choice": ["London", "Paris is the name of the city", "Rome"]},
    {"json": {"type": "object", "properties": {"name": {"enum": ["Bob", "Alice"]}, "age": {"enum": [1, 12]}},
              "required": ["name", "age"], "additionalProperties": False}},
    {"grammar": 'start: "{" ("red" | "green")+ "}"'},
)  # fmt: skip
BASES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.7, "top_ema_p": 0.3, "top_ema_d": 3},
)


def some_params(rng: random.Random) -> SamplingParams:
    length: dict[str, Any] = {"max_tokens": rng.randint(1, 22), "ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.12:
        width = rng.randint(2, 4)
        search = {"n": width, "early_stopping": rng.choice([True, False]), "temperature": 0}
        return SamplingParams(use_beam_search=True, **search, **length)
    asked: dict[str, Any] = {**rng.choice(BASES), "seed": rng.randrange(1000), **length}
    if rng.random() < 0.3:
        asked["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.15:
        asked["prompt_logprobs"] = rng.randint(0, 2)
    if rng.random() < 0.2:
        asked["stop"] = [rng.choice(["e", "th", "a", '"n', "o"])]
        asked["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.2:
        asked["stop_token_ids"] = rng.sample(range(VOCAB), 60)
        asked["min_tokens"] = rng.randint(0, asked["max_tokens"])
    if rng.random() < 0.1:
        asked["logit_bias"] = {rng.randrange(VOCAB): rng.choice([-9.0, 4.0]) for _ in range(3)}
    if rng.random() < 0.06:
        asked["logits_processors"] = [lambda said, logits: logits.roll(len(said) % 4)]
    if rng.random() < 0.4:
        asked["max_tokens"] += 8
        asked["structured_outputs"] = StructuredOutputsParams(**rng.choice(CONSTRAINTS))
    if rng.random() < 0.2:
        asked["thinking_token_budget"] = rng.randint(0, 6)
        asked["reasoning_tokens"] = ReasoningTokens(7, token_id(THINK_END), begun=rng.random() < 0.7)
        if "structured_outputs" in asked:
            asked["structured_outputs"].starts_after = THINK_END
    asked["output_kind"] = rng.choice(list(RequestOutputKind))
    if rng.random() < 0.3 and asked["temperature"]:
        asked["n"] = rng.randint(1, 3)
        if rng.random() < 0.4:
            asked |= {"best_of": asked["n"] + rng.randint(0, 2), "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**asked)


def some_prompt(rng: random.Random, stems: list[list[int]]) -> dict[str, Any]:
    if rng.random() < 0.07:
        return {
            "prompt_embeds": torch.randn(
                rng.randint(1, 9), 32, generator=torch.Generator().manual_seed(rng.randrange(9))
            )
        }
    stem = rng.choice(stems)[: rng.randint(1, 24)]
    part = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 4))]
    return {"prompt_token_ids": (stem + part * rng.randint(1, 4))[:30]}


def some_request(tiny: Tiny, rng: random.Random, stems: list[list[int]], adapters: bool) -> Asked:
    asked: Asked = {"prompt": some_prompt(rng, stems), "params": some_params(rng)}
    if adapters and rng.random() < 0.5:
        asked["lora_request"] = tiny.lora(rng.choice(tiny.adapters))
    return asked


def some_settings(tiny: Tiny, rng: random.Random, groups: int) -> dict[str, Any]:
    block_size = rng.choice([2, 4])
    tokens = int(LENGTH * rng.choice([1, 1.3, 1.3, 2, 3]))  # of the cache
    settings: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": groups * tokens // block_size + 2,
        "max_num_seqs": rng.randint(4, 9),
        "max_num_batched_tokens": rng.randint(9, 60),
        "async_scheduling": rng.random() < 0.75,
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fair", "fair", "fcfs", "wrr", "deadline"]),
        "max_loras": rng.randint(1, 4),
    }
    if rng.random() < 0.3:
        settings["long_prefill_token_threshold"] = rng.randint(2, 12)
    method = rng.choice([None, *tiny.drafts, *["oracle"] * 5])
    if method is not None:
        settings["speculative_config"] = {**tiny.drafts[method], "adaptive": rng.random() < 0.4}
        settings["enable_lora"] = method not in ("eagle3", "eagle", "medusa")
    if "model" not in settings.get("speculative_config", {}):
        if rng.random() < 0.4:
            settings |= {"swap_space": rng.choice([0.00002, 0.0001]), "preemption_mode": rng.choice(["swap", "auto"])}
        if rng.random() < 0.3 and settings["enable_prefix_caching"]:
            settings["kv_offloading_size"] = 0.00003
    return settings


# ---------------------------------------------------------------- running them

# Why a request is refused, in any engine and in a small one.
NEVER_POSSIBLE = ("cannot be had with adapter", "prompt_embeds has no tokens", "is a soft prompt")
TOO_LARGE = ("beams", "KV blocks")


class Collected:
    """What a caller sees of one request, put together from its outputs."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.ends: dict[int, tuple[Any, Any]] = {}
        self.prompt_logprobs: Any = None
        self.finished = False
        self.num_generated = 0

    def take(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        assert not self.finished, "an output came after the last one"
        self.finished = output.finished
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        for each in output.outputs:
            joins = kind is RequestOutputKind.DELTA
            self.tokens[each.index] = (self.tokens.get(each.index, []) if joins else []) + list(each.token_ids)
            self.text[each.index] = (self.text.get(each.index, "") if joins else "") + each.text
            if each.logprobs is not None:
                before = self.logprobs.get(each.index, []) if joins else []
                self.logprobs[each.index] = before + list(each.logprobs)
            if each.finish_reason is not None:
                self.ends[each.index] = each.finish_reason, each.stop_reason


def scores(lines: list[Any] | None) -> list[list[tuple[int, float]]]:
    return [sorted((token, entry.logprob) for token, entry in line.items()) for line in lines or () if line]


def assert_scores(got: list[Any] | None, wanted: list[Any] | None) -> None:
    """The same values; ties of tokens that were not taken may be broken otherwise."""
    one, other = scores(got), scores(wanted)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert sorted(value for _, value in a) == pytest.approx(sorted(value for _, value in b), abs=2e-3)


def check(got: Collected, wanted: Collected, params: SamplingParams) -> None:
    reasons = {reason for reason, _ in got.ends.values()}
    if reasons & {"abort", "timeout"}:
        for index, text in got.tokens.items():
            if not params.use_beam_search and (params.best_of or params.n) <= params.n:
                assert text == wanted.tokens[index][: len(text)]
        return
    assert got.tokens == wanted.tokens
    assert got.text == wanted.text and got.ends == wanted.ends
    for index, lines in got.logprobs.items():
        if not params.use_beam_search and got.ends[index][0] != "error":
            assert len(lines) == len(got.tokens[index]), "each token has its log-probabilities"
        assert_scores(lines, wanted.logprobs[index])
    assert_scores(got.prompt_logprobs, wanted.prompt_logprobs)


def assert_at_rest(llm: LLM) -> None:
    """Nothing is held once no request runs."""
    core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
    scheduler = core.scheduler
    check_blocks(core)
    assert not len(scheduler) and not len(scheduler.rows) and not len(scheduler.waiting) and not core.results
    assert scheduler.rows.num_free == scheduler.limits.max_num_seqs
    assert scheduler.cache.pool.num_used == 0 and scheduler.cache.tier.num_used == 0
    assert not core.groups.keys and not core.pending.requests and not core.groups.beams.running
    assert not len(scheduler.resources) and not scheduler.resources.num_used and not scheduler.resources.is_busy
    assert not scheduler._new_rows and not scheduler._no_token_yet and not scheduler._started
    assert all(not getattr(observer, "_in_flight", ()) for observer in core.observers)
    assert core.reset_prefix_cache()


def run_alone(tiny: Tiny, asked: Asked) -> Collected | None:
    """None: the request is refused."""
    llm, got = tiny.alone(), Collected()
    try:
        llm.llm_engine.add_request("alone", **asked)
    except RequestError as error:
        assert any(words in str(error) for words in NEVER_POSSIBLE), error
        return None
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            got.take(output, asked["params"].output_kind)
    return got


def whole_texts(tiny: Tiny, asked: Asked, wanted: Collected) -> list[list[int]]:
    """A request's tokens as its rows have them."""
    lora, prompt = asked.get("lora_request"), asked["prompt"].get("prompt_token_ids", [])
    virtual = {"soft": 5, "prefix": 3}.get(lora.name, 0) if lora is not None else 0
    return [[VIRTUAL_TOKEN] * virtual + prompt + text for text in wanted.tokens.values() if prompt]


def lose_memory(llm: LLM, rng: random.Random) -> None:
    """Let two steps find no memory, before or after they have changed what the device keeps."""
    core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
    executor, left = core.executor, [rng.randrange(80), rng.randrange(20)]  # calls before each failure

    def losing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if left:
                left[0] -= 1
            fails = bool(left) and left[0] < 0
            if fails and left.pop(0) and rng.random() < 0.5:
                raise DeviceMemoryError("there is none")
            done = real(*given)
            if fails:
                raise DeviceMemoryError("there is none")
            return done

        return call

    executor.execute, executor.sample = losing(executor.execute), losing(executor.sample)


def lose_adapters(tiny: Tiny, llm: LLM, rng: random.Random) -> list[str]:
    """Ask for adapters whose files are gone before they are loaded. Returns the requests' names."""
    names = []
    for number in range(rng.randint(1, 2)):
        names.append(f"lost{number}")
        params = rng.choice(
            [{"n": 3}, {"use_beam_search": True, "n": 2, "temperature": 0}, {"thinking_token_budget": 0}]
        )
        if "thinking_token_budget" in params:
            params["reasoning_tokens"] = ReasoningTokens(7, token_id(THINK_END), begun=True)
        lora = tiny.vanishing(rng.randrange(1 << 20))
        sampling = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        llm.llm_engine.add_request(names[-1], {"prompt_token_ids": [5, 6, 7]}, sampling, lora_request=lora)
        shutil.rmtree(lora.lora_path)
    return names


def run_together(
    llm: LLM, asked: dict[str, Asked], rng: random.Random, disturbs: bool, lost: list[str] | None = None
) -> dict[str, Collected]:
    """Add requests over time, and abort some. `lost`: requests that must end with an error."""
    engine, got, waiting = llm.llm_engine, {}, list(asked)
    ends = dict.fromkeys(lost or (), "")
    for _ in range(6000):
        while waiting and rng.random() < 0.4:
            name = waiting.pop(0)
            more: dict[str, Any] = {"tenant": rng.choice(["", "a", "b"]), "weight": rng.choice([1.0, 2.0])}
            if disturbs and rng.random() < 0.08:
                more["timeout"] = rng.choice([0.0005, 0.02])
            try:
                engine.add_request(name, **asked[name], **more)
            except RequestError as error:
                assert any(words in str(error) for words in TOO_LARGE), error
            else:
                got[name] = Collected()
        if disturbs and rng.random() < 0.02:
            for output in engine.abort_request(rng.choice(list(asked))):
                got[output.request_id].take(output, asked[output.request_id]["params"].output_kind)
        if disturbs and rng.random() < 0.05:
            engine.reset_prefix_cache()
        for output in engine.step():
            if output.request_id in ends:
                ends[output.request_id] = " ".join(str(each.finish_reason) for each in output.outputs)
            else:
                got[output.request_id].take(output, asked[output.request_id]["params"].output_kind)
        if not waiting and not engine.client.has_work():
            break
    assert not engine.has_unfinished_requests() and not engine.client.has_work(), "it does not come to an end"
    assert all(each.finished for each in got.values())
    assert all(set(end.split()) == {"error"} for end in ends.values())
    return got


# What must have happened in a run of enough seeds, by the names of EngineStats.
HAPPENS = ("preemptions", "swapped_preemptions", "accepted_tokens", "jumps", "resource_evictions", "copied_blocks")


def check_seed(tiny: Tiny, seed: int, groups: int = 1, count: int = 14) -> Counter[str]:
    """Run requests of a seed together, twice, and each alone. Returns how often each of HAPPENS did."""
    rng = random.Random(seed)
    settings = some_settings(tiny, rng, groups)
    has_adapters = settings.get("enable_lora", True)
    stems = [[rng.randrange(2, VOCAB) for _ in range(24)] for _ in range(2)]
    requests = {str(i): some_request(tiny, rng, stems, has_adapters) for i in range(count)}
    wanted = {name: found for name, each in requests.items() if (found := run_alone(tiny, each)) is not None}
    asked = {name: each for name, each in requests.items() if name in wanted}
    Oracle.texts = [text for name, each in asked.items() for text in whole_texts(tiny, each, wanted[name])]
    with tiny.llm(**settings) as llm:
        if rng.random() < 0.3:
            lose_memory(llm, rng)
        lost = lose_adapters(tiny, llm, rng) if has_adapters and rng.random() < 0.4 else []
        got = run_together(llm, asked, rng, disturbs=True, lost=lost)
        assert_at_rest(llm)
        stats = llm.llm_engine.client.stats()
        again = dict(list(asked.items())[:3])  # what is left of the others changes nothing
        later = run_together(llm, again, rng, disturbs=False)
        assert_at_rest(llm)
    for found in (got, later):
        for name, each in found.items():
            try:
                check(each, wanted[name], asked[name]["params"])
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, request {name}, {settings}: {asked[name]}") from error
    return Counter({name: getattr(stats, name) for name in HAPPENS})


def test_texts_are_those_of_running_alone(models: Callable[[str], Tiny]) -> None:
    assert check_seed(models("llama"), 55, count=9)["accepted_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups", "seeds"),
    [("llama", 1, range(100 * i, 100 * i + 25)) for i in range(3)]
    + [("gemma3", 2, range(500, 520)), ("mistral_window", 1, range(600, 620))],
    ids=str,
)
def test_texts_are_those_of_running_alone_often(
    models: Callable[[str], Tiny], name: str, groups: int, seeds: range
) -> None:
    happened = sum((check_seed(models(name), seed, groups) for seed in seeds), Counter[str]())
    assert all(happened[each] for each in HAPPENS), happened
