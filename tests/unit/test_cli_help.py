"""--help of a part of a command."""

from __future__ import annotations

import pytest

from kvasir.config.engine import all_settings
from kvasir.entrypoints.cli import main as cli
from kvasir.entrypoints.cli.main import help_on

WITH_ENGINE_FLAGS = [
    *(["serve"], ["chat"], ["complete"], ["run-batch"]),
    *(["bench", name] for name in ("throughput", "latency", "startup")),
]


def shown(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert (ended.value.code or 0) == status
    assert (out == "") == bool(status) and (err == "") == (not status)
    return out or err


def section(name: str) -> set[str]:
    return {f"--{key.replace('_', '-')}" for key, known in all_settings().items() if known.section == name}


@pytest.mark.parametrize("command", WITH_ENGINE_FLAGS, ids=" ".join)
@pytest.mark.parametrize("word", ["scheduler", "Scheduler", "SchedulerConfig", "schedulerconfig"])
def test_a_group(command: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *command, f"--help={word}")
    assert text.startswith("scheduler:\n")
    assert all(flag in text for flag in section("scheduler"))
    assert not any(f"{flag} " in text for flag in section("model") - {"--model"})


def test_vllms_other_names_and_titles_with_articles(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--port" in shown(capsys, "serve", "--help=Frontend")
    assert shown(capsys, "run-batch", "--help=batch").startswith("batch:\n")
    assert "--attention-backend" in shown(capsys, "serve", "--help=AttentionConfig"), "no group here, but a flag"


@pytest.mark.parametrize("word", ["scheduling", "--scheduling-policy", "scheduling_policy", "SCHEDULING"])
def test_a_word(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "serve", f"--help={word}")
    assert text.startswith("scheduler:\n") and "--scheduling-policy" in text
    assert "--port" not in text and "--max-num-seqs" not in text


def test_a_word_in_several_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "serve", "some/model", "--port", "7", "--help=max")
    assert "server:\n" in text and "--max-request-bytes" in text
    assert "model:\n" in text and "--max-model-len" in text


@pytest.mark.parametrize("command", WITH_ENGINE_FLAGS, ids=" ".join)
def test_groups_are_listed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *command, "--help=listgroup")
    assert text.startswith(f"Groups of kvasir {' '.join(command)}'s flags")
    for name in ("model", "cache", "scheduler", "parallel", "device", "load"):
        assert f"\n  {name} " in text


def test_all_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "serve", "--help=all") == shown(capsys, "serve", "--help") == shown(capsys, "serve", "-h")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("schedular", "has no group 'schedular' and no flag with that word. Did you mean scheduler"),
        ("max-modle-len", "Did you mean max-model-len"),
        ("qwertzuiop", "--help=listgroup lists the groups."),
        ("", "has no group ''"),
        ("lora-dtype", "--lora-dtype is a flag of vLLM that Kvasir does not have yet."),
    ],
)
def test_an_unknown_word(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "serve", f"--help={word}", status=2)
    assert text.startswith("kvasir: error: ") and said in text and text.count("\n") == 1


def test_commands_without_many_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--version" in shown(capsys, "--help=version")
    assert "--json" in shown(capsys, "collect-env", "--help=json")
    assert "has no group 'json'" in shown(capsys, "bench", "--help=json", status=2)


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (["serve"], "usage: kvasir serve [MODEL] [FLAGS]\n"),
        (["run-batch"], "usage: kvasir run-batch -i FILE -o FILE [MODEL] [FLAGS]\n"),
        (["bench", "latency"], "usage: kvasir bench latency [MODEL] [FLAGS]\n"),
    ],
)
def test_the_usage_line_is_short(command: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, *command, "--help").startswith(usage)


def test_older_names_stay_hidden() -> None:
    parser = cli._parser(["serve"])
    (commands,) = (action for action in parser._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    status, text = help_on(commands.choices["serve"], "rope-scaling")
    assert status == 2 and "rope-scaling" in text
