"""Tiny models that many files ask for: each is made once in a process, and so is transformers' word on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engine_builders import Model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """The model of a name. Tests leave its files as they are."""
    return cache(lambda name: Model(name, tmp_path_factory.mktemp(name)))
