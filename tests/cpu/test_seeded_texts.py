"""Seeded texts on the CPU library, bit by bit: a request's tokens and log-probabilities are the same alone, in a batch,
in chunks, after prefix hits, and when it is preempted with a short or a long text; of checkpoints and GGUF files, with
windows and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Kind

from kvasir import LLM, SamplingParams
from kvasir.engine.request import Request
from kvasir.engine.scheduler import Scheduler
from kvasir.kernels.cpu import library
from kvasir.outputs import RequestOutput
from tests.cpu.test_gguf import Written
from tests.engine_builders import generate, metric
from tests.model_builders import make_hf_model, save
from tests.native_builders import require_library

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2100,
}
SOFT_CAPS = {"head_dim": 64, "query_pre_attn_scalar": 64}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral_window": {"sliding_window": 90},
    "phi3": {"sliding_window": 90},
    "gemma2": {"sliding_window": 150, **SOFT_CAPS},  # in every second layer
}
# Windows that leave a long text so many blocks that others can take them.
WIDE: dict[str, dict[str, Any]] = {
    "mistral_window": {"sliding_window": 700},
    "phi3": {"sliding_window": 700},
    "gemma2": {"sliding_window": 700, **SOFT_CAPS},
}
KINDS = ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
SHORT, LONG = [20, 21, 40, 45, 60, 150, 260], [20, 21, 63, 130, 257, 600, 900, 2000, 100]
# Blocks that hold one request of the greatest length, and too few for all prompts.
TIGHT_SHORT = {"mistral_window": 24, "phi3": 24, "gemma2": 40}
TIGHT_LONG = {"mistral_window": 129, "phi3": 129, "gemma2": 257}
TIGHT_WITHOUT_WINDOWS = 135
SHARED = 16  # tokens that all prompts begin with: one block

Text = tuple[Any, Any]  # tokens and log-probabilities


@dataclass
class Way:
    """Settings under which requests meet each other."""

    name: str
    settings: dict[str, Any]
    counter: str | None = None  # shows that they did
    rounds: int = 1
    shorter_first: bool = False  # the longest prompt begins alone, and the shorter ones preempt it


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """The library divides keys over threads only if there are several."""
    require_library()
    before = library.num_threads()
    yield
    library.configure(before)


@pytest.fixture(autouse=True)
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that are preempted."""
    lengths, preempt = list[int](), Scheduler.preempt

    def record(self: Scheduler, request: Request) -> int:
        row = preempt(self, request)
        lengths.append(len(request.token_ids))
        return row

    monkeypatch.setattr(Scheduler, "preempt", record)
    return lengths


def checkpoint(name: str, path: Path, windows: dict[str, dict[str, Any]] = WINDOWS) -> str:
    return str(save(make_hf_model(name, **(SIZES | windows.get(name, {}))), path))


def gguf_file(name: str, kind: str, path: Path, windows: dict[str, dict[str, Any]] = WINDOWS) -> str:
    def change(writer: Any) -> None:
        if name in windows:
            writer.add_sliding_window(windows[name]["sliding_window"])
        if name == "phi3":
            writer.add_rope_dimension_count(64)
        if name == "gemma2":
            writer.add_attn_logit_softcapping(3.0)
            writer.add_final_logit_softcapping(5.0)

    path.mkdir(exist_ok=True)
    return Written(name, name, path / "m.gguf", Kind[kind], change, **(SIZES | windows.get(name, {}))).path


def opener(path: str, max_model_len: int) -> Callable[..., LLM]:
    fixed: Any = {"dtype": "bfloat16", "skip_tokenizer_init": True, "use_tqdm_on_load": False, "batch_invariant": True}
    usual: Any = {"kv_cache_memory_bytes": 64 << 20, "block_size": 16, "max_num_batched_tokens": 2048, "cpu_threads": 2}
    return lambda **settings: LLM(path, max_model_len=max_model_len, **usual | settings, **fixed)


MEETING = [
    Way("in a batch", {"enable_prefix_caching": False}),
    Way("in chunks", {"enable_prefix_caching": False, "max_num_batched_tokens": 48}),
    # The second round hits whole prompts.
    Way("after prefix hits", {"max_num_batched_tokens": 512}, "prefix_cache_hits", rounds=2),
]


def preempting(blocks: int, *, shorter_first: bool = False) -> list[Way]:
    """`blocks`: too few for all requests at once."""
    tight = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": False, "max_num_batched_tokens": 128}
    if shorter_first:
        tight |= {"scheduling_policy": "priority", "watermark": 0.0}
    swap = {"swap_space": 1, "preemption_mode": "swap"}
    return [
        Way("preempted and computed again", tight | {"swap_space": 0}, "num_preemptions", 1, shorter_first),
        Way("preempted and swapped", tight | swap, "num_preemptions_swapped", 1, shorter_first),
        Way("preempted and cached", tight | {"enable_prefix_caching": True}, "num_preemptions", 1, shorter_first),
    ]


def generate_shorter_first(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    """The longest prompt begins. When it generates, the others come, and the shorter a prompt, the higher its rank."""
    engine, done = llm.llm_engine, dict[str, RequestOutput]()
    *others, first = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))

    def add(i: int) -> None:
        engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, params[i], priority=len(prompts[i]))

    def generated() -> int:
        return int(metric(llm, "generation_tokens"))

    before = generated()
    add(first)
    while generated() == before:
        engine.step()
    for i in others:
        add(i)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    return [done[str(i)] for i in range(len(prompts))]


def check(open_llm: Callable[..., LLM], lengths: list[int], ways: list[Way], vocabulary: int = 96) -> None:
    """Each of the prompts alone, and all together in every way."""
    rng = np.random.default_rng(sum(lengths))
    shared = rng.integers(2, vocabulary, SHARED).tolist()
    prompts = [shared + rng.integers(2, vocabulary, n - SHARED).tolist() for n in lengths]
    common: Any = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2, "temperature": 1.0}
    params = [SamplingParams(seed=i, **common, **({"top_p": 0.9} if i % 3 == 2 else {})) for i in range(len(prompts))]

    def texts(outputs: Any) -> list[Text]:
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with open_llm(enable_prefix_caching=False) as llm:
        alone = [text for i in range(len(prompts)) for text in texts(generate(llm, prompts[i : i + 1], params[i]))]
    for way in ways:
        run = generate_shorter_first if way.shorter_first else generate
        with open_llm(**way.settings) as llm:
            for _ in range(way.rounds):
                for i, text in enumerate(texts(run(llm, prompts, params))):
                    assert text == alone[i], f"{way.name}: the prompt of {lengths[i]} tokens differs from alone"
            assert way.counter is None or metric(llm, way.counter) > 0, f"{way.name}: {way.counter} is 0"


def check_model(name: str, write: Callable[[str, dict[str, dict[str, Any]]], str], preempted: list[int]) -> None:
    """`write` makes a model in a folder of this name, with these windows."""
    if name not in WINDOWS:
        path = write("model", {})
        check(opener(path, 2048), LONG, MEETING + preempting(TIGHT_WITHOUT_WINDOWS))
        tight = TIGHT_WITHOUT_WINDOWS
    else:
        path = write("narrow", WINDOWS)
        check(opener(path, 2048), LONG, MEETING)
        check(opener(path, 300), SHORT, MEETING + preempting(TIGHT_SHORT[name]))
        path, tight = write("wide", WIDE), TIGHT_LONG[name]
    preempted.clear()
    check(opener(path, 2048), LONG, [MEETING[0], *preempting(tight, shorter_first=True)])
    assert sum(n >= max(LONG) for n in preempted) >= 3, f"the longest was not preempted: {preempted}"


def test_short_prompts(tmp_path: Path) -> None:
    path = gguf_file("gemma2", "Q4_K", tmp_path)
    check(opener(path, 300), SHORT, MEETING + preempting(TIGHT_SHORT["gemma2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", *WINDOWS])
def test_checkpoints(name: str, tmp_path: Path, preempted: list[int]) -> None:
    check_model(name, lambda folder, windows: checkpoint(name, tmp_path / folder, windows), preempted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in KINDS),
        *((name, kind) for name in ("phi3", "gemma2") for kind in ("BF16", "Q8_0", "Q6_K")),
    ],
)
def test_gguf_files(name: str, kind: str, tmp_path: Path, preempted: list[int]) -> None:
    check_model(name, lambda folder, windows: gguf_file(name, kind, tmp_path / folder, windows), preempted)


@pytest.mark.slow
def test_a_real_model(starter_model: Path) -> None:
    check(opener(str(starter_model), 1024), [900, 64, 20, 257], MEETING + preempting(67), vocabulary=40_000)
