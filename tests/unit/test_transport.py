"""Messages between processes are decoded to what was encoded; addresses, errors and progress."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvasir.engine import transport
from kvasir.engine.liveness import Address, make_directory
from kvasir.engine.transport import Progress, client_of, identity, portable_error
from kvasir.entrypoints.async_llm import merge
from kvasir.errors import ConfigError, EngineError, ModelError
from kvasir.executor.fake import fake_config
from kvasir.frontend.clients.launch import _environment
from kvasir.messages import (
    BeamOutput,
    BeamSpec,
    EngineOutput,
    EngineRequest,
    Extras,
    Finished,
    FinishReason,
    Hypothesis,
    Part,
    RowSampling,
    Started,
    Terms,
)
from kvasir.outputs import CompletionOutput, FlatLogprobs, RequestOutput

ids = arrays.arrays(np.int32, st.integers(0, 5))


def tables(dtype: Any) -> st.SearchStrategy[Any]:
    return arrays.arrays(dtype, st.tuples(st.integers(0, 4), st.integers(1, 3)))


floats = arrays.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 3)), elements=st.floats(0, 1, width=32))
numbers = st.integers(0, 2**62)
extras = st.builds(Extras, numbers, extra_args=st.none() | st.dictionaries(st.text(), st.integers(0, 9)))
samplings = st.builds(RowSampling, extras=st.none() | extras)
forks = st.lists(st.builds(EngineRequest, numbers, ids, numbers), max_size=2).map(tuple)
requests = st.builds(
    EngineRequest, numbers, ids, numbers, samplings, cache_salt=st.binary(),
    beam=st.none() | st.builds(BeamSpec, numbers),
    terms=st.builds(Terms, deadline=st.none() | st.floats(0, 9)), forks=forks,
)  # fmt: skip
ends = st.builds(Finished, numbers, st.sampled_from(FinishReason), st.none(), st.none() | ids)
starts = st.builds(Started, numbers, st.floats(0, 9), numbers)
texts = st.lists(st.builds(Hypothesis, ids, st.just(0.5), st.just(-1.0)), max_size=2)
searches = st.builds(BeamOutput, numbers, texts, numbers, st.booleans())
columns = st.dictionaries(st.text(), ids | tables(np.int32), max_size=2)
parts = st.builds(Part, ids, columns, st.dictionaries(st.text(), floats, max_size=2))
outputs = st.builds(
    EngineOutput, arrays.arrays(np.int64, 3), tables(np.int32), ids,
    st.dictionaries(st.text(), parts, max_size=2),
    st.lists(ends, max_size=2),
    st.lists(searches, max_size=2),
    st.lists(starts, max_size=2),
)  # fmt: skip


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, arrays included; a list may come out for a tuple where either may stand."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if dataclasses.is_dataclass(left):
        pairs = ((getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
        return type(left) is type(right) and all(same(*pair) for pair in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


@settings(max_examples=60)
@given(requests)
def test_requests(request: EngineRequest) -> None:
    data = transport.encode(request)
    assert same(request, transport.decode_request(data))
    assert transport.key_of(data) == request.key


@settings(max_examples=60)
@given(outputs)
def test_outputs(output: EngineOutput) -> None:
    assert same(output, transport.decode_output(transport.encode(output)))


def test_what_cannot_cross() -> None:
    with pytest.raises(TypeError, match="function"):
        transport.encode(Extras(1, processors=(lambda: None,)))
    assert transport.key_of(b"\xc1") is None and transport.key_of(transport.encode([1])) is None


def test_every_field_of_a_request_is_written() -> None:
    """Somebody who adds a field of a kind that cannot cross should learn it here."""
    made = EngineRequest(1, np.zeros(1, np.int32), 2)
    assert same(made, transport.decode_request(transport.encode(made)))


def test_progress_is_seen_by_others(tmp_path: Path) -> None:
    writes = Progress(str(tmp_path / "progress"), create=True)
    reads = Progress(str(tmp_path / "progress"))
    assert reads.seconds_in_step() == 0 and reads.num_requests_of_others(0) == 0
    writes.begin_step({0: [1, 2, 3], 4: [1, 2]})
    time.sleep(0.01)
    assert reads.seconds_in_step() >= 0.01 and reads.num_steps == 1
    assert [reads.num_requests_of_others(client) for client in (0, 4, 7)] == [2, 3, 5]
    writes.remove_client(4)
    assert [reads.num_requests_of_others(client) for client in (0, 4, 7)] == [0, 3, 3]
    writes.set_idle()
    assert reads.seconds_in_step() == 0 and reads.num_requests_of_others(7) == 0 and reads.num_steps == 1


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path)[:40] if len(str(tmp_path)) < 40 else "/tmp")
    directory = make_directory(2)
    assert os.stat(directory).st_mode & 0o077 == 0, "nobody else may enter"
    Address(directory, 0).remove()
    assert os.path.isdir(directory)
    Address(directory, 1).remove()
    assert not os.path.exists(directory)
    for client in (0, 1, 255, 256, 70_000):
        assert client_of(identity(client)) == client and identity(client)[0] != 0
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        make_directory(1)
    assert not list(long.iterdir())


def test_errors_are_one_sentence() -> None:
    assert str(portable_error(ValueError("a\n  b"), "it failed")) == "it failed: ValueError: a b"
    assert str(portable_error(MemoryError(), "it failed")) == "it failed: MemoryError"
    error = ModelError("as it is")
    assert portable_error(error, "it failed") is error
    assert type(portable_error(EngineError("a\nb"), "it failed")) is EngineError


def test_an_engines_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.frontend.clients.launch.usable_cpus", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = {"data_parallel_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert _environment(fake_config(), 0) == {}
    assert _environment(fake_config(**two), 1) == {"OMP_NUM_THREADS": "8"}, "which its workers share"
    assert _environment(fake_config(**two, device="auto"), 1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whoever hides all GPUs means it
    assert _environment(fake_config(**two, device="auto"), 1)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert [_environment(fake_config(**two, device="cuda"), i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == [
        "7,5",
        "3,1",
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in _environment(fake_config(**two), 0)


def test_deltas_are_merged_branch_by_branch() -> None:
    def delta(*texts: tuple[int, str], finished: bool = False, logprobs: Any = None) -> RequestOutput:
        completions = [CompletionOutput(i, text, [ord(c) for c in text], logprobs=logprobs) for i, text in texts]
        return RequestOutput("r", None, [1], None, completions, finished)

    merged = merge(delta((0, "ab"), (2, "x")), delta((1, "q"), (2, "yz"), finished=True))
    assert [(each.index, each.text) for each in merged.outputs] == [(0, "ab"), (1, "q"), (2, "xyz")]
    assert merged.outputs[2].token_ids == [ord(c) for c in "xyz"] and merged.finished
    flat = FlatLogprobs()
    flat.append([(1, -0.5, 1, "a")])
    both = merge(delta((0, "a"), logprobs=flat), delta((0, "b"), logprobs=flat)).outputs[0].logprobs
    assert isinstance(both, FlatLogprobs) and len(both) == 2 and both[1] == flat[0] and len(flat) == 1


def test_directories_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    make = "from kvasir.engine.liveness import make_directory; print(make_directory(2), flush=True); input()"
    alive, killed = (
        subprocess.Popen([sys.executable, "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    kept, left = (process.stdout.readline().strip() for process in (alive, killed) if process.stdout is not None)
    other = tmp_path / "kvasir-notes"  # not made by a process that locks it
    other.mkdir()
    killed.kill()
    killed.wait()
    own = make_directory(1)
    assert not Path(left).exists() and Path(kept).exists() and Path(own).exists() and other.exists()
    alive.communicate("\n")
    Address(own, 0).remove()
    assert not Path(own).exists(), "nor is anything left of one that ends as it should"
