"""docs/models.md: written from the registry, and every proof it names is there and is of that architecture."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from kvasir.models import architectures
from tests.conftest import ROOT
from tests.cpu import test_engine
from tests.model_builders import TINY, make_hf_model


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts" / "models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `make docs`"


def test_every_architecture_has_its_proof(script: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \|$", script.page(), re.MULTILINE)
    encoders = re.findall(r"^\| `(\w+Model)` \|[^|]*\|$", script.page(), re.MULTILINE)
    assert "BertModel" in encoders and "GPT2LMHeadModel" not in encoders  # tests/cpu/test_pooling_models.py has those
    assert sorted([*encoders, *(name for name, _ in rows)]) == sorted(architectures.supported())
    assert hasattr(test_engine, script.TEST)
    for name, proof in rows:
        assert proof in TINY
        if proof != "internlm2":  # whose checkpoint is rewritten from a Llama's
            assert type(make_hf_model(proof)).__name__ == name
