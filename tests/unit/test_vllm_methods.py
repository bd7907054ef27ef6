"""Methods of vLLM that are missing raise errors that name an alternative."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from kvasir import LLM, AsyncLLM, LLMEngine
from kvasir.entrypoints import MISSING_METHODS

KINDS = [LLM, LLMEngine, AsyncLLM]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MISSING_METHODS)
def test_a_missing_method_says_so(kind: type, name: str) -> None:
    engine = kind.__new__(kind)
    assert not hasattr(engine, name) and getattr(engine, name, None) is None
    with pytest.raises(AttributeError) as caught:
        getattr(engine, name)
    said = str(caught.value)
    assert said.startswith(f"{kind.__name__}.{name} is a method of vLLM that Kvasir does not have yet: ")
    assert said.endswith(".") and "\n" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_not_said_to_be_missing(kind: type) -> None:
    assert not [name for name in MISSING_METHODS if hasattr(kind, name)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_name_is_an_error_as_ever(kind: type) -> None:
    engine = kind.__new__(kind)
    with pytest.raises(AttributeError, match=f"^'{kind.__name__}' object has no attribute 'genrate'$") as caught:
        engine.genrate()  # type: ignore[attr-defined]
    assert caught.value.name == "genrate" and caught.value.obj is engine
    copy.copy(engine)  # which looks for methods that are not there


def test_what_is_named_instead_is_there() -> None:
    assert hasattr(LLM, "generate") and hasattr(AsyncLLM, "generate") and hasattr(AsyncLLM, "pause_generation")
    said = " ".join(MISSING_METHODS.values())
    assert "LLM.generate" in said and "pause_generation(mode='wait')" in said


def test_the_number_of_workers() -> None:
    llm = LLM.__new__(LLM)
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=3)
    llm.llm_engine = SimpleNamespace(config=SimpleNamespace(parallel=parallel))  # type: ignore[assignment]
    assert (llm.get_world_size(), llm.get_world_size(include_dp=False)) == (6, 2)
