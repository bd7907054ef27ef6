"""Heads that draft from the model's hidden states: their drafts are those of plain torch, and no text changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.worker.speculative.hidden_states import HeadDrafter
from tests.cpu.test_speculation import assert_same, mixed, repetitive
from tests.draft_head_builders import Shape, TorchHead
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric, tokens

DRAFTS = 3
EAGLE3 = Shape(vocab=64)


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


@pytest.fixture(scope="module")
def head(model: Model) -> TorchHead:
    """A head that is right now and then."""
    return learned(model, EAGLE3)


def learned(model: Model, shape: Shape) -> TorchHead:
    head = TorchHead(shape, model.hf)
    head.learn([prompt[:20] + model.greedy(prompt[:20], 40) for prompt in model.prompts[:6]], 40)
    return head


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """What was drafted after texts of each length, of a single request."""
    found: dict[int, list[int]] = {}
    propose = HeadDrafter.propose

    def watched(self: HeadDrafter, taken: Any, drafts: Any) -> None:
        propose(self, taken, drafts)
        found[int(taken.lengths[0])] = drafts.tokens[taken.rows[0], : taken.wanted].tolist()

    monkeypatch.setattr(HeadDrafter, "propose", watched)
    return found


def check_drafts(llm: LLM, model: Model, head: TorchHead, seen: dict[int, list[int]], count: int = 20) -> int:
    """Compare the drafts of some requests, one after the other; how many drafts were compared."""
    compared = 0
    for prompt in [each for each in model.prompts if len(each) > 1][:4]:
        seen.clear()
        (said,) = tokens(generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
        assert said == model.greedy(prompt, count)
        text = prompt + said
        for length, drafts in seen.items():
            if length <= len(text):
                assert drafts == head.drafts(text[:length], len(drafts)), f"after {length} tokens"
                compared += len(drafts)
    return compared


def test_drafts_are_those_of_plain_torch(
    model: Model, head: TorchHead, seen: dict[int, list[int]], tmp_path: Path
) -> None:
    drafting = {"method": "eagle3", "model": head.save(tmp_path), "num_speculative_tokens": DRAFTS, "adaptive": False}
    llm = model.llm(**SMALL, speculative_config=drafting, enable_prefix_caching=False)
    assert check_drafts(llm, model, head, seen) > 60
    assert metric(llm, "spec_decode_num_accepted_tokens") > 10
