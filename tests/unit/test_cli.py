"""The command line: instant where it can be, one line where something is wrong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kvasir
from kvasir.config import args, vllm_names
from kvasir.config.args import EngineArgs
from kvasir.config.engine import SettingField, all_settings
from kvasir.entrypoints.cli import main as cli
from kvasir.errors import ConfigError, did_you_mean
from kvasir.server.config import server_settings

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
    monkeypatch.setattr("kvasir.models.hub.find_starter_model", lambda: Path("/no/such/starter.gguf"))
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
        (["trial", "m", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization=2.0 is too large"),
        (["trial", "m", "--gpu-memory-utilization", "lots"], "'lots' is not a number"),
        (["trial", "m", "--max-model-len", "1q"], "is not a whole number"),
        (["trial", "m", "--hf-overrides", "{"], "takes JSON"),
        (["trial", "m", "--hf-overrides", "[]"], "takes a mapping"),
        (["trial", "m", "--logits-processors", "x"], '--logits-processors takes JSON, such as \'["a", "b"]\''),
        (["trial", "m", "--dtype", "int3"], "Possible: auto"),
        (["trial", "m", "--disable-custom-all-reduce"], "--disable-custom-all-reduce is a flag of vLLM"),
        (["trial", "m", "--tokenizer-mode", "slow"], "--tokenizer-mode is a flag of vLLM"),
        (["trial", "--task", "embed", "m"], "--task was vLLM's; use --runner='pooling'"),
        (["trial", "m", "--num-scheduler-steps", "8"], "--num-scheduler-steps was vLLM's; leave it out: "),
        (["trial", "m", "--use_v2_block_manager"], "--use-v2-block-manager was vLLM's; leave it out"),
        (["trial", "m", "--worker-use-ray"], "--worker-use-ray was vLLM's; leave it out"),
        (["trial", "m", "--max-seq-len-to-capture=9"], "--max-seq-len-to-capture was vLLM's; leave it out"),
        (["trial", "m", "--disable-async-output-proc"], "or set --no-async-scheduling"),
        (["trial", "m", "--override-pooler-config", "{}"], "--override-pooler-config was vLLM's; use --pooler-config."),
        (["trial", "m", "--tusk"], "--tusk is not a flag of this command.\n"),
        (["trial", "m", "--num-plumber-steps"], "--num-plumber-steps is not a flag of this command.\n"),
        (["trial", "m", "other"], "'other' is one too many"),
        (["trial", "m", "--no-such-flag"], "--no-such-flag is not a flag of this command."),
        (["trial", "--modle", "m"], "--modle is not a flag of this command. Did you mean --model"),
        (["trial", "m", "--lora-dtype", "4"], "--lora-dtype is a flag of vLLM that Kvasir does not have yet.\n"),
        (["trial", "m", "--no_moe_backend"], "--no-moe-backend is a flag of vLLM that Kvasir does not"),
        (["trial", "m", "--compilation-config.mode=3"], "--compilation-config.mode is a flag of vLLM that Kvasir does"),
        (["bench", "latency", "--num-prompts", "1"], "flag of this command. Did you mean --num-iters"),
        (["bench", "throughput", "--goodput", "ttft:1"], "--goodput is not a flag of this command.\n"),
        (["quantize", "/no/such/model", "--to", "int8", "--out", "/no/out"], "MODEL='/no/such/model': there is no"),
        (["merge-lora", "/no/such/model", "x", "--out", "/no/out"], "base='/no/such/model': there is no such"),
        (["merge-lora", str(ROOT), "/no/such/one", "--out", "/no/out"], "adapter='/no/such/one': there is no such"),
        (["merge-lora", str(ROOT), str(ROOT), "--out", "/no/out"], "has no config.json"),
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


# ---------------------------------------------------------------- errors name flags

TAKING_SETTINGS = [
    *(["serve"], ["chat"], ["complete", "-q", "hi"], ["warm"], ["run-batch", "-i", "in", "-o", "out"]),
    *(["bench", name] for name in ("throughput", "latency", "startup")),
]


def wrong_values(known: SettingField) -> list[str]:
    """Values of a flag that cannot be right; none for texts and plain switches."""
    if bool in known.types:
        return []
    numbers = ["lots", *(["-7"] if known.setting.minimum is not None or known.setting.above is not None else [])]
    if int in known.types or float in known.types:
        return numbers
    if list in known.types and known.section == "server":  # several words, or a JSON list
        return ["[7"]
    if dict in known.types or list in known.types:
        return ["{", "7"]
    return ["bogus"] if known.setting.choices else []


@pytest.mark.parametrize("command", TAKING_SETTINGS, ids=" ".join)
def test_errors_name_the_flag(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = all_settings() | server_settings()
    if command != ["serve"]:  # the others share its way to report errors
        settings = {name: settings[name] for name in ("max_model_len", "seed", "dtype", "hf_overrides", "enable_lora")}
    for name, known in settings.items():
        flag = "--" + name.replace("_", "-")
        given = [[flag, value] for value in wrong_values(known)]
        if known.setting.refused and known.types == (bool,):
            given.append([flag])
        for arguments in given:
            shown = error_of([*command, "--model", "m", *arguments], capsys)
            assert shown.startswith(f"kvasir: error: {flag}"), shown
            assert not re.search(rf"(?<![\w-]){name}(?![\w-])", shown.replace("the model", "")), shown
        if given and len(given[0]) == 2 and "_" in name and given[0][1] != "[7":
            file = tmp_path / "settings.yaml"
            file.write_text(f"{name}: {given[0][1]!r}\n")
            shown = error_of([*command, "--model", "m", "--config", str(file)], capsys)
            assert flag in shown and name not in shown.replace(str(file), ""), shown


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = cli.main(argv)
    except SystemExit as ended:
        status = int(ended.code or 0)
    shown = capsys.readouterr().err
    assert status == 2 and shown.count("\n") == 1, shown
    return shown


def test_errors_in_python_name_the_argument() -> None:
    for name, known in all_settings().items():
        for value in wrong_values(known)[:1]:
            with pytest.raises(ConfigError, match=rf"^{name}=") as error:
                EngineArgs(**({"model": "m"} | {name: value}))
            assert "--" not in str(error.value)


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_errors_name_sampling_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, shown in [
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--top-p", "7"], "--top-p must be above 0"),
        (["--top-k", "-7"], "--top-k must be"),
        (["--max-tokens", "0"], "--max-tokens must be"),
        (["--stop", ""], "--stop contains an empty string"),
    ]:
        assert error_of([command, "no/such/model", "-q", "hi", *given], capsys).startswith(f"kvasir: error: {shown}")


RAISED = ("ConfigError", "ModelError", "EngineError", "DeviceMemoryError")


def messages_in(file: Path) -> Iterator[str]:
    """The texts that a module raises as errors of settings and models, with x for what is filled in."""
    for node in ast.walk(ast.parse(file.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) in RAISED:
            parts = call.args[0].values if isinstance(call.args[0], ast.JoinedStr) else call.args[:1]
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)


def test_every_message_of_the_package_is_put_into_flags() -> None:
    flags = cli._flags(cli._parser(["serve"]))
    names = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    found = 0
    for file in (ROOT / "kvasir").rglob("*.py"):
        for message in messages_in(file):
            words = set(re.findall(r"[a-z]+(?:_[a-z]+)+|\b[a-z]+(?==)", message)) & names
            found += bool(words)
            shown = args.with_flags(message, flags)
            left = set(re.findall(r"(?<![\w-])[a-z]+(?:_[a-z]+)+|\b(?<!-)[a-z]+(?==)", shown)) & names
            assert not left, f"{file.name}: {shown}"
    assert found > 50


def test_only_names_are_put_into_flags() -> None:
    flags = ["--model", "--device", "--seed", "--max-model-len", "--enforce-eager", "--no-enforce-eager", "--dtype"]
    for message, shown in {
        "max_model_len=4 is less than max_model_len.": "--max-model-len=4 is less than --max-model-len.",
        "Turn enforce_eager=True off: enforce_eager=False": "Turn --enforce-eager off: --no-enforce-eager",
        "device='x' is no device of this model": "--device='x' is no device of this model",
        "seed must be a seed; set seed, or set dtype to x": "--seed must be a seed; set --seed, or set --dtype to x",
        "Pass it as `model`; the model has a seed": "Pass it as `--model`; the model has a seed",
    }.items():
        assert args.with_flags(message, flags) == shown
    paths = "/max_model_len/x, max_model_len.json, 'max_model_len'"
    assert args.with_flags(paths, flags) == paths


def test_what_kvasir_has_is_not_said_to_be_missing() -> None:
    flags = {flag for name in cli.COMMANDS for flag in cli._flags(cli._parser([name]))}
    names = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags if flag.startswith("--")}
    assert not names & vllm_names.VLLM_NAMES and not flags & vllm_names.VLLM_SHORT_FLAGS
    assert not all_settings().keys() & vllm_names.VLLM_NAMES


@pytest.mark.parametrize(
    ("name", "possible", "near"),
    [
        ("--task", ["-asc", "-t", "--tasks"], " Did you mean --tasks?"),
        ("--a", ["-a", "-h", "--a"], ""),
        ("--num-scheduler-steps", ["--max-header-bytes", "--max-num-seqs"], ""),
        ("--num-prompts", ["--num-iters", "--max-prompt-tokens"], " Did you mean --num-iters?"),
        ("max_model_length", ["max_model_len", "max_num_seqs"], " Did you mean max_model_len?"),
        ("--modle", ["--model", "-m"], " Did you mean --model?"),
    ],
)
def test_suggestions_are_near(name: str, possible: list[str], near: str) -> None:
    assert did_you_mean(name, possible, by_words=True) == near


def test_flags_of_vllm_that_ask_for_nothing(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = "--tokenizer_mode auto --no_enable_sleep_mode --compilation-config={} --nnodes 1 --disable-cascade-attn"
    assert cli.main(["trial", *nothing.split(), "some/model", "--no-trust-remote-code", "--trust-remote-code"]) == 0
    assert capsys.readouterr().out == "some/model\n"
    kept = ["--moe-backend", "x", "--nnodes=2", "--enable-eplb", "auto", "--", "--tokenizer-mode", "auto"]
    assert list(vllm_names.without_empty_flags(kept)) == kept


def test_names_of_vllm_stand_in_one_list() -> None:
    removed = vllm_names.REMOVED.keys()
    assert not removed & vllm_names.VLLM_NAMES and not removed & (all_settings() | server_settings()).keys()
    assert server_settings().keys() >= vllm_names.SERVER_NAMES
    assert vllm_names._DEFAULTS.keys() <= vllm_names.VLLM_NAMES


def test_settings_of_vllm_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^lora_dtype is a setting of vLLM that Kvasir does not have yet.$"):
        EngineArgs("m", lora_dtype="half")
    (tmp_path / "config.yaml").write_text("lora-dtype: half\n")
    with pytest.raises(ConfigError, match="config.yaml: lora-dtype is a setting of vLLM that Kvasir does not"):
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
