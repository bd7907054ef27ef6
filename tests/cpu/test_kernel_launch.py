"""Kernels that are compiled ahead: lists of them, launchers, and what counts as late. No kernel is launched here."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvasir import kernels
from kvasir.kernels.triton import launch, pointwise
from kvasir.kernels.triton.experts import ExpertTile, choose_expert_tile, each_pair_alone
from kvasir.kernels.triton.launch import cdiv, next_power_of_2
from kvasir.worker.memory import LARGEST_GRAPH
from kvasir.worker.profiling import steps_to_compile


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(launch, "_known", {})
    return tmp_path


def test_launchers_of_one_name_do_not_get_each_others_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may return one module for all of them, with the functions of the one that was loaded last."""
    shared = ModuleType("__triton_launcher")

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        return shared

    monkeypatch.setattr(launch, "_load_module", load)
    paths = [str(number) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: launch.build._load_module_from_path("__triton_launcher", path), paths))
    assert [each.launch for each in found] == paths


def test_a_list_of_kernels_is_kept_and_read(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[Any, str]] = []
    monkeypatch.setattr(launch, "_compile_all", compiled.extend)
    assert not launch.compile_listed("a model"), "there is none yet"
    noted = SimpleNamespace(module=pointwise.__name__, name="_rms_norm_kernel")
    launch._compiled(fn=noted, compile={"specialization_data": "as before"})
    launch._compiled(fn=SimpleNamespace(module="mine", name="own"), compile={"specialization_data": "x"})
    launch.keep_list("a model")
    launch._known.clear()  # another process
    assert launch.compile_listed("a model") and compiled == [(pointwise._rms_norm_kernel, "as before")]
    assert not launch.compile_listed("another model")
    compiled.clear()
    launch._compiled(fn=noted, compile={"specialization_data": "as before"})
    assert launch.compile_listed("a model") and not compiled, "it is here already"


def test_a_damaged_list_is_no_list(lists: Path) -> None:
    launch.keep_list("a model")
    (file,) = lists.glob("kvasir-*.json")
    assert json.loads(file.read_text()) == []
    file.write_text("[[")
    assert not launch.compile_listed("a model")


def test_a_list_that_cannot_be_kept_does_no_harm(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lists / "file").write_text("")
    monkeypatch.setattr(launch.knobs.cache, "dir", str(lists / "file" / "below"))
    launch.keep_list("a model")


def test_only_what_a_launch_waits_for_is_late(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_late", None)
    noted = SimpleNamespace(module=pointwise.__name__, name="_rms_norm_kernel")
    compile = lambda: launch._compiled(fn=noted, compile={"specialization_data": "x"})  # noqa: E731
    compile()
    assert launch.late_compilations() == 0, "before the start is over"
    launch.watch_compilations()
    compile()
    ahead = threading.Thread(target=compile, name=f"{launch.THREADS}_0")
    ahead.start()
    ahead.join()
    assert launch.late_compilations() == 1
    kernels.expect_compilations()
    compile()
    assert launch.late_compilations() == 0, "another engine starts in this process"


@pytest.mark.parametrize("number", [1, 2, 3, 16, 17, 1023])
def test_sizes(number: int) -> None:
    import triton

    assert next_power_of_2(number) == triton.next_power_of_2(number) and cdiv(number, 16) == triton.cdiv(number, 16)


@pytest.mark.parametrize(("max_rows", "alone"), [(256, {1, 2}), (1, {1})])
def test_decodes_alone_are_compiled_where_no_graph_runs_them(max_rows: int, alone: set[int]) -> None:
    """One row, and up to eight with quantized matrices, have kernels of their own."""

    def decodes(has_graphs: bool) -> set[int]:
        steps = steps_to_compile(max_rows, 2048, 4096, has_graphs=has_graphs)
        return {len(step.rows) for step in steps if step.num_decodes == len(step.rows)}

    assert decodes(has_graphs=False) == alone and not decodes(has_graphs=True)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "max_model_len"), [(256, 8192, 4096), (8, 1500, 128), (64, 16896, 600)]
)
def test_tiles_of_experts_are_compiled(max_rows: int, max_tokens: int, max_model_len: int, has_graphs: bool) -> None:
    """Whatever number of tokens a step has that is no graph."""
    steps = list(steps_to_compile(max_rows, max_tokens, max_model_len, has_graphs=has_graphs))
    most = min(max_tokens, max_rows * max_model_len)
    assert all(step.total_tokens <= most and step.num_tokens.max() <= max_model_len for step in steps)
    for experts, top_k in ((8, 2), (64, 6), (128, 8), (256, 8), (512, 10)):

        def tile(tokens: int, experts: int = experts, top_k: int = top_k) -> ExpertTile | None:
            return None if each_pair_alone(tokens * top_k, experts) else choose_expert_tile(tokens * top_k, experts)

        served = {tile(tokens) for tokens in range(LARGEST_GRAPH + 1 if has_graphs else 1, most + 1)}
        assert served <= {tile(step.total_tokens) for step in steps}
