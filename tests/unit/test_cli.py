"""The command line: instant where it can be, one line where something is wrong."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import pytest

import kvasir
from kvasir.config import vllm_settings
from kvasir.config.args import EngineArgs
from kvasir.config.engine import all_settings
from kvasir.entrypoints.cli import main as cli
from kvasir.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
HEAVY = {"torch", "numpy", "transformers", "huggingface_hub", "yaml"}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvasir", argument]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in ran.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & HEAVY
    assert (f"kvasir {kvasir.__version__}" if argument == "--version" else "bench") in ran.stdout


@pytest.mark.parametrize(
    "command", [*([name] for name in cli.COMMANDS), ["bench", "serve"], ["bench", "startup"]], ids=" ".join
)
def test_no_commands_help_is_slow(command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvasir", *command, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    imported = {line.split("|")[-1].strip().split(".")[0] for line in ran.stderr.splitlines()}
    assert not imported & (HEAVY | {"httpx", "fastapi", "pydantic", "msgspec", "zmq", "uvicorn", "rich"})
    assert f"usage: kvasir {' '.join(command)}" in ran.stdout


def test_bench_help_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in ("throughput", "latency", "serve", "startup"))


@pytest.mark.parametrize("benchmark", ["throughput", "latency", "startup"])
def test_bench_uses_the_starter_model_where_none_is_named(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvasir.models.starter.find_starter_model", lambda: Path("/no/such/starter.gguf"))
    assert cli.main(["bench", benchmark]) == 2
    assert "/no/such/starter.gguf" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A subcommand that takes every setting and prints the model."""
    module = ModuleType("kvasir.entrypoints.cli.trial")

    def add_arguments(parser: ArgumentParser) -> None:
        EngineArgs.add_cli_args(parser)

    def run(namespace: Namespace) -> int:
        print(EngineArgs.from_cli_args(namespace).model)
        return 0

    module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvasir.entrypoints.cli.trial", module)
    monkeypatch.setitem(cli.COMMANDS, "trial", ("kvasir.entrypoints.cli.trial", "try it"))
    return module


def test_a_subcommand_runs(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trial", "some/model", "--max-model-len", "1k"]) == 0
    assert capsys.readouterr().out == "some/model\n"


def test_a_subcommands_help_shows_every_setting(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["trial", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"--{name.replace('_', '-')}" in shown for name in all_settings())
    assert "--rope-scaling" not in shown, "older names are taken, not advertised"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trial"], "No model was given"),
        (["trial", "m", "--gpu-memory-utilization", "2"], "gpu_memory_utilization=2.0 is too large"),
        (["trial", "m", "--gpu-memory-utilization", "lots"], "'lots' is not a number"),
        (["trial", "m", "--max-model-len", "1q"], "is not a whole number"),
        (["trial", "m", "--hf-overrides", "{"], "takes JSON"),
        (["trial", "m", "--hf-overrides", "[]"], "takes a mapping"),
        (["trial", "m", "--dtype", "int3"], "Possible: auto"),
        (["trial", "m", "--trust-remote-code"], "trust_remote_code=True is not available"),
        (["trial", "m", "other"], "'other' is one too many"),
        (["trial", "m", "--no-such-flag"], "--no-such-flag is not a flag of this command."),
        (["trial", "--modle", "m"], "--modle is not a flag of this command. Did you mean --model"),
        (["trial", "m", "--max-loras", "4"], "--max-loras is a flag of vLLM that Kvasir does not have yet.\n"),
        (["trial", "m", "--no_enable_sleep_mode"], "--no-enable-sleep-mode is a flag of vLLM that Kvasir does not"),
        (["trial", "m", "--compilation-config.mode=3"], "--compilation-config.mode is a flag of vLLM that Kvasir does"),
        (["trial", "m", "-O3"], "-O3 is a flag of vLLM that Kvasir does not have yet.\n"),
        (["trial", "m", "--config", "absent.yaml"], "absent.yaml cannot be read"),
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "required: COMMAND"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    argv: list[str], message: str, command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(argv)
    except SystemExit as ended:
        status = int(ended.code or 0)
    shown = capsys.readouterr().err
    assert status == 2
    assert shown.startswith("kvasir: error: ") and shown.count("\n") == 1 and message in shown


def test_what_kvasir_has_is_not_said_to_be_missing() -> None:
    flags = {flag for name in cli.COMMANDS for flag in cli._flags(cli._parser([name]))}
    names = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags if flag.startswith("--")}
    assert not names & vllm_settings.NAMES and not flags & vllm_settings.SHORT_FLAGS
    assert not all_settings().keys() & vllm_settings.NAMES


def test_settings_of_vllm_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^max_loras is a setting of vLLM that Kvasir does not have yet.$"):
        EngineArgs("m", max_loras=4)
    (tmp_path / "config.yaml").write_text("max-loras: 4\n")
    with pytest.raises(ConfigError, match="config.yaml: max-loras is a setting of vLLM that Kvasir does not"):
        EngineArgs.add_cli_args(ArgumentParser()).parse_args(["--config", str(tmp_path / "config.yaml")])


def test_a_bad_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVASIR_LOG_LEVEL", "LOUD")
    assert cli.main(["--version"]) == 2
    assert "KVASIR_LOG_LEVEL=LOUD is not possible. Possible: INFO, DEBUG" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="KVASIR_LOG_LEVEL=LOUD"):
        EngineArgs("m")


def in_a_process(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from kvasir.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "", **environment},
    )


def test_a_traceback_only_for_debugging() -> None:
    wrong = {"KVASIR_LOG_LEVEL": "nonsense"}
    assert in_a_process("--version", **wrong).stderr.startswith("kvasir: error: KVASIR_LOG_LEVEL=nonsense")
    raising = "import kvasir.entrypoints.cli.main as m, kvasir.config.env as e, kvasir.errors as r\n"
    raising += "def fail(): raise r.ConfigError('no')\ne.validate = fail\nm.main([])"
    shown = {}
    for level in ("DEBUG", "INFO"):
        environment = {"PATH": "", "KVASIR_LOG_LEVEL": level}
        ran = subprocess.run([sys.executable, "-c", raising], capture_output=True, text=True, cwd=ROOT, env=environment)
        shown[level] = ran.stderr
    assert shown["INFO"] == "kvasir: error: no\n"
    assert "Traceback" in shown["DEBUG"] and shown["DEBUG"].endswith("kvasir: error: no\n")


def test_log_level_under_vllms_name() -> None:
    ran = in_a_process("--version", VLLM_LOGGING_LEVEL="debug")
    assert ran.returncode == 0
    assert ran.stderr.count("VLLM_LOGGING_LEVEL is vLLM's name; use KVASIR_LOG_LEVEL.") == 1
    assert in_a_process("--version", VLLM_LOGGING_LEVEL="debug", KVASIR_LOG_LEVEL="info").stderr == ""
