"""Two worker processes over Gloo: the logits of one rank, an error when one dies, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir import LLM
from kvasir.errors import ConfigError, EngineDeadError, EngineError
from kvasir.executor import multiproc
from kvasir.executor.multiproc import MultiprocExecutor
from kvasir.messages import NewRow, RowSampling, SampleInputs, StepPlan
from tests.conftest import ROOT
from tests.cpu.test_engine import GREEDY, TIGHT, Model, check_logprobs, generate, metric
from tests.cpu.test_fallback import PARAMS
from tests.pairwise import few
from tests.process_builders import PATIENCE, gone


def processes(llm: LLM) -> list[subprocess.Popen[bytes]]:
    return [rank.process for rank in llm.llm_engine.client.core.executor._workers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", few(["llama", "mixtral", "olmo2", "gpt2"], fast=["llama"]))
def test_two_ranks_say_what_transformers_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc, "CLOSE_SECONDS", PATIENCE)
    model = Model(name, tmp_path)
    settings: dict[str, Any] = {**TIGHT, "tensor_parallel_size": 2, "async_scheduling": True}
    with model.llm(**settings) as llm:
        workers = processes(llm)
        assert len(workers) == 2
        outputs = generate(llm, model.prompts[:8], PARAMS)
        assert metric(llm, "partial_prefills") > 0
        check_inputs_for_sampling(llm)
    check_logprobs(model, outputs)
    assert [worker.returncode for worker in workers] == [0, 0], "closing ends the workers, and in peace"


def check_inputs_for_sampling(llm: LLM) -> None:
    """They reach every rank: a row that may say one token, one that must say another, one that is dropped; then what
    they said is computed."""
    nothing = np.zeros(0, np.int32)
    executor = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
    rows = np.arange(3, dtype=np.int32)
    plan = StepPlan(
        rows=rows, num_tokens=np.ones(3, np.int32), samples=np.ones(3, np.bool_), token_ids=rows + 5,
        bounds=np.ones(3, np.int32), num_decodes=3, new_rows=[NewRow(row, 0, RowSampling()) for row in range(3)],
        table_index=nothing, table_block=nothing, copies=nothing.reshape(0, 2), waits_for_host=True,
    )  # fmt: skip
    one = np.array([0], np.int32)
    mask = np.zeros((1, 2), np.int32)
    mask[0, 1] = 1 << 5
    executor.execute(plan)
    result = executor.sample(SampleInputs(one, mask, one + 1, one + 41, one + 2)).result()
    assert result.token_ids[:2, 0].tolist() == [37, 41] and result.counts.tolist() == [1, 1, 0]
    said = []
    for ids in (np.full(2, -1, np.int32), np.array([37, 41], np.int32)):
        new = [] if ids[0] < 0 else [NewRow(row, 1, RowSampling()) for row in range(2)]
        executor.execute(
            replace(plan, rows=rows[:2], num_tokens=np.ones(2, np.int32), samples=np.ones(2, np.bool_),
                    token_ids=ids, bounds=np.full(2, 2, np.int32), num_decodes=2, new_rows=new)
        )  # fmt: skip
        said.append(executor.sample(None).result().token_ids[:, 0].tolist())
    assert said[0] == said[1], "the next step began with other tokens than those it was given"


@pytest.mark.parametrize("victim", few([0, 1], fast=[1]))
def test_a_dead_rank_is_an_error_and_takes_the_others_along(victim: int, tmp_path: Path) -> None:
    model = Model("llama", tmp_path)
    llm = model.llm(tensor_parallel_size=2)
    workers = processes(llm)
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": model.prompts[0]}, GREEDY.clone())
    engine.step()
    os.kill(workers[victim].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"worker {victim} ended \(exit code -9\)"):
        while True:
            engine.step()
    assert not engine.has_unfinished_requests(), "nobody will answer them any more"
    with pytest.raises(EngineDeadError):
        generate(llm, model.prompts, GREEDY)
    llm.close()
    assert all(gone(worker.pid) for worker in workers)


DYING = """
import os, signal, sys, time
from multiprocessing.connection import Connection
core = Connection(int(sys.argv[1]))
core.send("started")
_, (how, failed, seconds, ends) = core.recv()
time.sleep(seconds)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
core.send(("error", (failed, how)))
if not ends:  # as a process may take its time to end after its last word
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        # A rank that is killed says nothing; the other says that its peer is gone, and may be heard first.
        ([("connection reset", 1.0, 0.0, True), ("killed", 0.0, 0.2, True)], r"worker 1 ended \(exit code -9\)"),
        ([("killed", 0.0, 0.2, True), ("connection reset", 1.0, 0.0, True)], r"worker 0 ended \(exit code -9\)"),
        # What counts is when it failed, not when that was said, nor whether the process has ended yet.
        ([("first", 1.0, 0.3, True), ("second", 2.0, 0.0, True)], "worker 0: first"),
        ([("second", 2.0, 0.0, True), ("first", 1.0, 0.3, False)], "worker 1: first"),
    ],
)
def test_the_rank_that_failed_first_is_blamed(
    ends: list[tuple[str, float, float, bool]], blamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiproc, "_SERVE", DYING)
    monkeypatch.setattr(multiproc, "REPORT_SECONDS", PATIENCE)  # long enough for all of them to report
    executor = object.__new__(MultiprocExecutor)
    executor._workers = [multiproc.WorkerProcess(rank, 2) for rank in range(2)]
    for rank in executor._workers:
        assert rank.socket.recv() == "started"
    for rank, end in zip(executor._workers, ends, strict=True):
        rank.socket.send(("start", end))
    try:
        with pytest.raises(EngineError, match=blamed):
            executor._answers()
    finally:
        for rank in executor._workers:
            rank.process.kill()
            rank.process.wait()


def test_workers_end_when_the_engine_is_killed(tmp_path: Path) -> None:
    model = Model("llama", tmp_path)
    program = (
        "import sys, time; from kvasir import LLM\n"
        "llm = LLM(sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=64, "
        "kv_cache_memory_bytes=1 << 24, use_tqdm_on_load=False)\n"
        "print(*[r.process.pid for r in llm.llm_engine.client.core.executor._workers], flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    engine = subprocess.Popen([sys.executable, "-c", program, model.path], stdout=subprocess.PIPE, env=environment)
    assert engine.stdout is not None
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    assert len(pids) == 2
    engine.kill()
    engine.wait()
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
def test_a_model_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    model = Model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="cannot be split over 3 ranks"):
        model.llm(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="model_impl='transformers' runs on one device"):
        model.llm(tensor_parallel_size=2, model_impl="transformers")


def test_one_process_for_two_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="distributed_executor_backend='uni' is one process"):
        Model("qwen3", tmp_path).llm(tensor_parallel_size=2, distributed_executor_backend="uni")
