"""Prompts of embeddings against transformers' inputs_embeds: alone, mixed, chunked, preempted, cached, forked."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_safetensors

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError, RequestError
from kvasir.frontend.requests.embeddings import checked
from kvasir.sampling_params import BeamSearchParams
from tests.model_builders import make_hf_model, save
from tests.pairwise import few

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "attention_backend": "torch", "block_size": 4,
    "kv_cache_memory_bytes": 1 << 22, "use_tqdm_on_load": False, "generation_config": "kvasir",
    "enable_prompt_embeds": True,
}  # fmt: skip
SMALL = {"max_model_len": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 24, "watermark": 0.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(2 + 5 * (i % 4))] for i in range(8)]


class Reference:
    """A tiny model and what transformers generates from embeddings with it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = make_hf_model(name).eval()
        self.path = save(self.model, folder / name)
        self.model.generation_config.eos_token_id = None

    def embed(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.get_input_embeddings()(torch.tensor(ids)).clone()

    def vague(self, ids: list[int], seed: int = 0) -> torch.Tensor:
        """Embeddings between those of tokens, so that no ids stand for them."""
        found = self.embed(ids)
        return found + 0.5 * found.std() * torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))

    @torch.inference_mode()
    def generate(self, rows: torch.Tensor, count: int = 10) -> list[int]:
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        made = self.model.generate(inputs_embeds=rows[None], attention_mask=torch.ones(1, len(rows)), **options)
        assert made.shape == (1, count)
        return [int(token) for token in made[0]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(llama: Reference) -> Iterator[LLM]:
    with LLM(str(llama.path), **ENGINE) as made:
        yield made


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in outputs]


def ask(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return tokens(llm.generate(prompts, params, use_tqdm=False))


KINDS = ["llama", "gemma2", "gpt2", "phi3", "opt", "qwen3", "mistral_window", "gptj"]


@pytest.mark.parametrize("name", few(KINDS, fast=["llama", "gemma2"]))
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = Reference(name, tmp_path)
    prompts = [reference.vague(ids, i) for i, ids in enumerate(PROMPTS[:4])]
    with LLM(str(reference.path), **ENGINE) as llm:
        assert ask(llm, [{"prompt_embeds": rows} for rows in prompts]) == [reference.generate(rows) for rows in prompts]


@pytest.mark.parametrize(
    "settings",
    few(
        [
            {},
            {**SMALL, "max_num_batched_tokens": 11},
            {**SMALL, "swap_space": 0.01, "preemption_mode": "swap"},
            {"async_scheduling": True, "enable_prefix_caching": False},
        ],
        fast=[],
    ),
)
def test_mixed_with_tokens_under_every_kind_of_load(llama: Reference, settings: dict[str, Any]) -> None:
    """Half of the prompts are embeddings of ids, so that both must give the same."""
    vague = [llama.vague(ids, i) for i, ids in enumerate(PROMPTS)]
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    prompts += [{"prompt_embeds": llama.embed(ids)} for ids in PROMPTS] + [{"prompt_embeds": rows} for rows in vague]
    plain = [llama.generate(llama.embed(ids)) for ids in PROMPTS]
    with LLM(str(llama.path), **{**ENGINE, **settings}) as llm:
        expected = plain + plain + [llama.generate(rows) for rows in vague]
        assert ask(llm, prompts) == expected
        assert ask(llm, prompts[::-1]) == expected[::-1]
        stats = llm.llm_engine.client.stats()
    assert "num_gpu_blocks_override" not in settings or stats.preemptions, "the cache was to be too small"


def test_cached_blocks_are_found_by_content(llm: LLM, llama: Reference) -> None:
    rows = llama.vague(PROMPTS[3])
    first, second, other, salted = (
        llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        for prompt in (
            {"prompt_embeds": rows},
            {"prompt_embeds": rows.clone()},
            {"prompt_embeds": rows + 0.5},
            {"prompt_embeds": rows, "cache_salt": "x"},
        )
    )
    assert not first.num_cached_tokens and second.num_cached_tokens and not other.num_cached_tokens
    assert not salted.num_cached_tokens
    assert tokens([first]) == tokens([second]) == tokens([salted]) == [llama.generate(rows)]
    assert tokens([other]) == [llama.generate(rows + 0.5)]


def test_forks_and_beams(llm: LLM, llama: Reference) -> None:
    """The same as with the ids, whose embeddings they are."""
    ids = PROMPTS[2]
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    by_ids, by_rows = (
        [list(each.token_ids) for each in llm.generate(prompt, params, use_tqdm=False)[0].outputs]
        for prompt in ({"prompt_token_ids": ids}, {"prompt_embeds": llama.embed(ids)})
    )
    assert by_ids == by_rows and len({tuple(each) for each in by_rows}) > 1
    search = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    found = [
        [each.tokens[-6:] for each in llm.beam_search([prompt], search)[0].sequences]  # type: ignore[list-item]
        for prompt in ({"prompt_token_ids": ids}, {"prompt_embeds": llama.embed(ids)})
    ]
    assert found[0] == found[1]


def test_no_rule_counts_the_ids_in_their_places(llm: LLM, llama: Reference) -> None:
    rows = llama.vague(PROMPTS[3])
    likely = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "logit_bias": {0: 50}}
    (output,) = ask(llm, [{"prompt_embeds": rows}], SamplingParams(repetition_penalty=1e6, **likely))
    assert output[0] == 0, "a penalty on the prompt's tokens would make 0 unlikely"


def test_files_equal_tensors(llm: LLM, llama: Reference) -> None:
    rows = llama.vague(PROMPTS[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = rows.to(dtype)
        file = io.BytesIO()
        torch.save(given, file)
        prompts = [given, given.float().numpy(), file.getvalue(), save_safetensors({"x": given}), given[None]]
        expected = llama.generate(given.float())
        assert ask(llm, [{"prompt_embeds": each} for each in prompts]) == [expected] * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_embeds": torch.zeros(3, 31)}, r"shape \[tokens, 32\]"),
        ({"prompt_embeds": torch.zeros(32)}, r"shape \[tokens, 32\]"),
        ({"prompt_embeds": torch.zeros(0, 32)}, "at least one token"),
        ({"prompt_embeds": torch.zeros(3, 32, dtype=torch.int64)}, "float32, float16 or bfloat16"),
        ({"prompt_embeds": torch.zeros(3, 32).to_sparse()}, "plain tensor"),
        ({"prompt_embeds": torch.full((3, 32), float("nan"))}, "finite"),
        ({"prompt_embeds": np.full((3, 32), np.inf, np.float32)}, "finite"),
        ({"prompt_embeds": torch.zeros(5000, 32)}, "maximum context length"),
        ({"prompt_embeds": "text"}, "a tensor of"),
        ({"prompt_embeds": torch.zeros(3, 32), "prompt": "x"}, "has no prompt"),
    ],
)
def test_wrong_tensors(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_what_it_does_not_go_with(llm: LLM, llama: Reference, tmp_path: Path) -> None:
    rows = llama.vague(PROMPTS[1])
    with pytest.raises(RequestError, match="prompt_embeds has no tokens"):
        llm.generate({"prompt_embeds": rows}, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    off = {**ENGINE, "enable_prompt_embeds": False}
    with LLM(str(llama.path), **off) as other, pytest.raises(RequestError, match="--enable-prompt-embeds"):
        other.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
    for name, reason in {"granite": "multiplies its embeddings", "opt_norms_last": "projects its embeddings"}.items():
        with pytest.raises(ConfigError, match=reason):
            LLM(str(Reference(name, tmp_path).path), **ENGINE)


# ---------------------------------------------------------------- files of strangers


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archive(pickled: bytes, numbers: bytes = b"\0" * 128, how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as made:
        made.writestr("x/data.pkl", pickled)
        made.writestr("x/data/0", numbers)
    return file.getvalue()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for file in (archive(pickle.dumps(Evil(mark))), saved(Evil(mark)), saved({"x": Evil(mark)})):
        with pytest.raises(RequestError, match="other things, which are not loaded"):
            checked(file, 32)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (saved(torch.zeros(32, 3).T), "view"),
        (saved(torch.zeros(3, 32)[:, ::2]), "view"),
        (saved([torch.zeros(3, 32)]), "one tensor"),
        (saved(torch.zeros(3, 32, dtype=torch.int64)), "LongStorage"),
        (saved(torch.zeros(3, 32, dtype=torch.float64)), "DoubleStorage"),
        (saved(torch.zeros(3, 32).to_sparse()), "other things"),
        (archive(b"", bytes(1 << 24), zipfile.ZIP_DEFLATED), "compressed"),
        (archive(b"\x80\x02" + b"N0" * 100_000 + b"N."), "too long"),
        (archive(pickle.dumps(5)), "one tensor"),
        (save_safetensors({"x": torch.zeros(3, 32), "y": torch.zeros(3, 32)}), "one tensor"),
        (save_safetensors({"x": torch.zeros(3, 32, dtype=torch.int8)}), "not I8"),
        (save_safetensors({"x": torch.zeros(3, 32)})[:-1], "no tensor"),
        ((1 << 60).to_bytes(8, "little"), "no tensor"),
        (b"", "no tensor"),
        (b"PK", "no tensor"),
        (b"rubbish" * 100, "no tensor"),
    ],
)
def test_files_that_are_no_plain_tensor(file: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked(file, 32)


def test_a_slice_of_rows_is_plain() -> None:
    rows = torch.randn(9, 32)
    assert np.array_equal(checked(saved(rows[2:5]), 32), rows[2:5].numpy())


def test_damaged_files_are_refused_or_read() -> None:
    rng = random.Random(1)
    for whole in (saved(torch.zeros(3, 32)), save_safetensors({"x": torch.zeros(3, 32)})):
        for _ in range(400):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(RequestError):
                assert checked(bytes(data), 32).shape[1] == 32
