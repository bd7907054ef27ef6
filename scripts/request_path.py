"""Trace one streamed chat request through the server and the engine, and list the files it runs through.

The ASGI application runs in this process and the engine in its own, with an executor that has no model. Both processes
record which modules' code is called while the request is served, not during start-up; the server's background tasks do
not run. The list is in the order of first calls, with the lines of each file and, of those, the lines of functions that
the request runs. The fake executor stands in for the worker, which is not listed.

usage: request_path.py
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # run it from a checkout; the engine imports this file too

FLAG = "KVASIR_REQUEST_PATH"  # names the folder in which both processes leave what they recorded
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "ignore_eos": True, "stream": True}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class Recorder:
    """Notes which functions of kvasir are called, and when first, while the flag, a byte shared by both processes, is
    set."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "flag", "r+b") as file:
            self.flag = mmap.mmap(file.fileno(), 1)
        self.first: dict[str, float] = {}  # by module: time of the first call
        self.functions: dict[str, dict[str, int]] = {}  # by module: first line of a function -> its last line

    def start(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        # By the module's name, because the methods that dataclasses generate have no file.
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not self.flag[0] or not name.startswith("kvasir."):
            return
        if name not in self.first:
            self.first[name], self.functions[name] = time.time(), {}
        code, known = frame.f_code, self.functions[name]
        if not code.co_filename.startswith("<") and str(code.co_firstlineno) not in known:
            known[str(code.co_firstlineno)] = max(line for _, _, line in code.co_lines() if line is not None)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps([self.first, self.functions]))


def traced_echo(config: Any) -> Any:
    """The executor of the engine's process, which begins to record there."""
    from kvasir.executor.fake import echo

    folder = Path(os.environ[FLAG])
    recorder = Recorder(folder)
    executor = echo(config)
    close = executor.close

    def close_and_write() -> None:
        sys.setprofile(None)
        recorder.write(folder / "engine.json")
        close()

    executor.close = close_and_write  # type: ignore[method-assign]
    recorder.start()
    return executor


async def _serve(folder: Path, recorder: Recorder) -> int:
    """Send the request to the application; return how many chunks came back."""
    from kvasir.entrypoints.async_llm import AsyncLLM
    from kvasir.executor.fake import fake_config
    from kvasir.server.app import make_app
    from kvasir.server.config import ServerConfig
    from kvasir.server.state import READY, ServerState

    config = fake_config(vocab_size=256, max_model_len=512, tokenizer=str(_make_tokenizer(folder)))
    engine = AsyncLLM(config, "request_path:traced_echo")
    try:
        state = ServerState(ServerConfig(), "fake")
        state.set_engine(engine)
        state.phase.enter(READY)
        app = make_app(state)
        await _ask(app)  # compiles the chat template, builds FastAPI's middleware
        recorder.flag[0] = 1
        recorder.start()
        chunks = await _ask(app)
        sys.setprofile(None)
        recorder.flag[0] = 0
        return chunks
    finally:
        engine.shutdown()


async def _ask(app: Any) -> int:
    """One request, as uvicorn would bring it."""
    body, sent = json.dumps(BODY).encode(), bytearray()
    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "root_path": "", "query_string": b""},
        **{"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message
        sent.extend(message.get("body", b""))

    await app(scope, receive, send)
    assert sent.endswith(b"data: [DONE]\n\n"), bytes(sent)
    return sent.count(b"data: ")


def _make_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are bytes, with a chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def trace() -> list[tuple[str, int, int]]:
    """The files in the order of their first call, with their lines and the lines of functions that ran."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flag").write_bytes(b"\0")
        os.environ[FLAG] = name
        os.environ.setdefault("KVASIR_LOG_LEVEL", "WARNING")
        recorder = Recorder(folder)
        assert asyncio.run(_serve(folder, recorder)) > 1, "the reply was not streamed"
        first, functions = recorder.first, recorder.functions
        engine_first, engine_functions = json.loads((folder / "engine.json").read_text())
    for module, at in engine_first.items():
        first[module] = min(at, first.get(module, at))
        functions.setdefault(module, {}).update(engine_functions[module])
    found = []
    for module in sorted(first, key=first.__getitem__):
        file = _file_of(module)
        ran = {line for start, end in functions[module].items() for line in range(int(start), end + 1)}
        found.append((str(file.relative_to(ROOT)), len(file.read_text().splitlines()), len(ran)))
    return found


def _file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def main() -> None:
    found = trace()
    for number, (file, lines, ran) in enumerate(found, start=1):
        print(f"{number:>3}  {file:<45} {lines:>5} {ran:>5}")
    whole, ran = sum(lines for _, lines, _ in found), sum(ran for _, _, ran in found)
    print(f"\n{len(found)} files, {whole:,} lines, {ran:,} of them in functions that the request runs")


if __name__ == "__main__":
    main()
