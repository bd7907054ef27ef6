"""One server without a model for all tests of a worker that ask nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import load_tokenizer
from tests.server_process import LiveServer


@pytest.fixture(scope="session")
def tokenizer(starter_model: Path) -> Tokenizer:
    return load_tokenizer(starter_model)


@pytest.fixture(scope="session")
def fake_server(starter_model: Path) -> Iterator[LiveServer]:
    with LiveServer.fake(starter_model) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="session")
def locked_server(starter_model: Path) -> Iterator[LiveServer]:
    """The same, and its key is "sesame". A proxy may put /llm before its paths."""
    with LiveServer.fake(starter_model, server={"api_key": ["sesame"], "root_path": "/llm"}) as server:
        yield server.wait_until_ready()
