"""A live server in processes of its own, with an engine that has no model (its text is computable) or a real one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvasir.executor.fake import echo_next
from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web

ROOT = Path(__file__).parent.parent
VOCAB = 49152

FAKE = """
import json, sys
from functools import partial
from kvasir.executor.fake import delayed, echo, fake_config
from kvasir.server.config import ServerConfig
from kvasir.server.launch import serve
options = json.loads(sys.argv[1])
executor = options["executor"]
if isinstance(executor, dict):
    import importlib
    module, _, name = executor.pop("make").partition(":")
    executor = partial(getattr(importlib.import_module(module), name), **executor)
config = fake_config(vocab_size=49152, **options["engine"])
sys.exit(serve(config, ServerConfig(**options["server"]), executor))
"""


class LiveServer:
    """Started by `fake` or `real`; use as a context manager."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str] | None = None, pipe: int | None = None
    ) -> None:
        """`pipe`: a descriptor for its output, which `log` then does not show."""
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})}
        output = self._log if pipe is None else pipe
        self.process = subprocess.Popen(command, stderr=output, stdout=output, env=env, cwd=ROOT)
        self._url: str | None = None

    @classmethod
    def fake(
        cls,
        tokenizer: Path | str,
        *,
        engine: Mapping[str, Any] | None = None,
        server: Mapping[str, Any] | None = None,
        executor: Any = "kvasir.executor.fake:echo",
        environment: Mapping[str, str] | None = None,
        pipe: int | None = None,
    ) -> LiveServer:
        options = {
            "engine": {"max_model_len": 2048, "max_num_seqs": 512, "tokenizer": str(tokenizer), **(engine or {})},
            "server": {"host": "127.0.0.1", "port": 0, **(server or {})},
            "executor": executor,
        }
        server = cls([sys.executable, "-c", FAKE, json.dumps(options)], environment, pipe)
        if options["server"]["port"]:
            server._url = f"http://127.0.0.1:{options['server']['port']}"
        return server

    @classmethod
    def real(cls, model: Path | str, *flags: str) -> LiveServer:
        command = [sys.executable, "-m", "kvasir", "serve", str(model), "--host", "127.0.0.1", "--port", "0"]
        return cls([*command, *flags])

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ asking it

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")  # the end may be half a character

    @property
    def url(self) -> str:
        """Where it listens, as soon as it does."""
        if self._url is None:
            self._url = self.wait_for_log(r"listening on (https?://\S+?)[\s\"]").group(1)
        return self._url

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/chat/completions"

    def wait_until_ready(self) -> LiveServer:
        until(lambda: self._answers_ready(), f"/ready of {self.url}", self)
        return self

    def _answers_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended:\n{self.log}"
        try:
            return web.get(f"{self.url}/ready", verify=False, timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        found = until(lambda: re.search(pattern, self.log), f"{pattern!r} in the log", self)
        assert isinstance(found, re.Match)
        return found

    def metrics(self) -> str:
        return web.get(f"{self.url}/metrics").text

    def metric(self, name: str, **labels: str) -> float:
        return metric_in(self.metrics(), name, **labels)

    def engine_pid(self) -> int:
        engines = self.children("engine.process")
        assert len(engines) == 1, f"one engine is expected, not {engines}"
        return engines[0]

    def children(self, word: str) -> list[int]:
        """Processes that it has started, by a word of their command line."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far: other programs stretch it less than time on the clock."""
        process = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    # ------------------------------------------------------------ ending it

    def wait(self, seconds: float = web.PATIENCE) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            self._log.close()
            Path(self._log.name).unlink(missing_ok=True)


def until(check: Any, what: str, server: LiveServer | None = None, seconds: float = web.PATIENCE) -> Any:
    """Poll until `check` gives something true, and give that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := check():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s\n{server.log if server is not None else ''}")


def metric_in(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    total, seen = 0.0, False
    for line in page.splitlines():
        match = re.fullmatch(r"([^{ ]+)(?:\{(.*)\})? (\S+)", line)
        if match and match.group(1) == name:
            has = dict(re.findall(r'(\w+)="([^"]*)"', match.group(2) or ""))
            if labels.items() <= has.items():
                total, seen = total + float(match.group(3)), True
    assert seen, f"no metric {name} {labels}"
    return total


def echoed_ids(prompt_ids: Iterable[int], count: int, vocab: int = VOCAB) -> list[int]:
    """What the fake engine generates."""
    tokens = list(prompt_ids)
    start = len(tokens)
    for _ in range(count):
        tokens.append(echo_next(tokens, vocab))
    return tokens[start:]


def echoed(tokenizer: Tokenizer, prompt_ids: Iterable[int], count: int) -> str:
    return tokenizer.decode(echoed_ids(prompt_ids, count), skip_special_tokens=True)


def events(text: str) -> list[Any]:
    """The JSON objects of an event stream that ended as it should."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(item) for item in data[:-1]]
