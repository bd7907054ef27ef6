"""Where the server listens, what it says about that, and why it cannot."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvasir.config.args import EngineArgs
from kvasir.errors import ConfigError, ModelError
from kvasir.server.config import ServerConfig
from kvasir.server.launch import listen, print_error, serve

SOCKET_PATH_LIMIT = 107  # bytes, of Linux


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on no such host:0: the name cannot be resolved\."):
        listen(ServerConfig(host="no such host", port=0))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/such/dir", "there is no such directory"),
        ("gone.gguf", "there is no such file"),
        ("empty", "is empty. A model needs config.json"),
        ("bare", "It holds x.gguf; give"),
        ("bare/x.gguf", "is a file, but not a GGUF file"),
        ("bare/text", "is a file, but not a GGUF file"),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_that_is_not_there_is_said_before_listening(
    name: str, why: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    for file in ("x.gguf", "text"):
        (tmp_path / "bare" / file).write_text("nothing")
    monkeypatch.setattr("kvasir.server.launch.listen", lambda config: pytest.fail("it listens"))
    asked = EngineArgs(model=str(tmp_path / name)).create_engine_config()
    with pytest.raises(ModelError, match=why):
        serve(asked, ServerConfig(api_server_count=processes))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use. Set another --port"):
            listen(ServerConfig(host="127.0.0.1", port=port))


def test_a_socket_file_left_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    in_use = pytest.raises(ConfigError, match=r"Address already in use\. Set another --uds\.")
    with listen(ServerConfig(uds=str(path))), in_use:
        listen(ServerConfig(uds=str(path)))
    assert path.is_socket(), "as after a kill"
    with listen(ServerConfig(uds=str(path))):
        assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * (SOCKET_PATH_LIMIT + 1), "the path is too long"),
        ("file", "Address already in use"),
        ("no/dir", "No such file or directory"),
    ],
)
def test_files_that_cannot_be_sockets(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match=f"{why}. Set another --uds"):
        listen(ServerConfig(uds=str(tmp_path / name)))
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "http://127.0.0.1"), ("0.0.0.0", "http://127.0.0.1"), ("::", "http://[::1]")]
)
def test_the_page_is_told_as_a_browser_takes_it(host: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    said: list[str] = []
    monkeypatch.setattr("kvasir.server.launch.logger.info", lambda text, *values: said.append(text % values))
    with listen(ServerConfig(host=host, port=0)) as sock:
        port = sock.getsockname()[1]
    assert said[-1] == f"playground at {told}:{port}/, engine view at {told}:{port}/engine"


def test_why_it_ended_names_flags(capfd: pytest.CaptureFixture[str]) -> None:
    print_error("out of memory: lower gpu_memory_utilization or max_request_bytes, or set enable_prefix_caching=False")
    shown = "out of memory: lower --gpu-memory-utilization or --max-request-bytes, or set --no-enable-prefix-caching"
    assert capfd.readouterr().err == f"kvasir: error: {shown}\n"
