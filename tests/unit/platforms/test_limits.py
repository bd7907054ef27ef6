"""Limits of containers and services, as Linux writes them into files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir import platforms
from kvasir.config.engine import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig
from kvasir.errors import ConfigError
from kvasir.frontend.clients import launch
from kvasir.platforms import limits

Write = Callable[..., None]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Puts files into a tree of control groups in which this process is in the group /outer/inner."""
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_OWN", tmp_path / "own")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "own").write_text("4:cpu,cpuacct:/outer/inner\n3:memory:/outer/inner\n0::/outer/inner\n")

    def put(group: str, **files: str) -> None:
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / group / name.replace("__", ".")).write_text(text)

    return put


@pytest.mark.parametrize("group", ["", "outer", "outer/inner"])
def test_memory_is_bounded_by_every_group(write: Write, group: str) -> None:
    platform = platforms.select("cpu")
    unlimited = platform.memory_bytes()
    write("outer/inner", memory__max="max\n", memory__current="5\n")
    write(group, memory__max="300000\n", memory__current="200000\n", memory__stat="anon 5\ninactive_file 50000\n")
    assert (platform.memory_bytes(), platform.memory_free()) == (300000, 150000)
    write(group, memory__max="max\n")
    assert platform.memory_bytes() == unlimited


@pytest.mark.parametrize("group", ["memory", "memory/outer/inner"])
def test_memory_by_version_1(write: Write, group: str) -> None:
    write(group, memory__limit_in_bytes="300000\n", memory__usage_in_bytes="100000\n")
    assert (limits.memory_limit(), limits.memory_left()) == (300000, 200000)


def test_cpus(write: Write) -> None:
    assert limits.cpu_quota() is None
    write("cpu/outer", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert limits.cpu_quota() == 1.5
    write("outer/inner", cpu__max="max 100000")
    assert limits.cpu_quota() == 1.5
    write("outer", cpu__max="50000 100000")
    assert limits.cpu_quota() == 0.5
    assert limits.usable_cpus() == 1, "half a CPU is one thread"


def test_fewer_threads_by_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for text, threads in (("3", 3), ("100", 8), ("", 8), ("many", 8), ("2,1", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert limits.usable_cpus() == threads
        assert limits.allowed_cpus() == 8, "the variable bounds threads that compute a model, not all threads"


def test_lists_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(10)))
    assert limits.parse_cpus("0-3, 8") == [0, 1, 2, 3, 8]
    for wrong in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(ConfigError, match="no list of CPUs"):
            limits.parse_cpus(wrong)
    with pytest.raises(ConfigError, match="names CPU 10, which this process may not use"):
        limits.parse_cpus("9-11")
    with pytest.raises(ConfigError, match="names a CPU twice"):
        limits.parse_cpus("0-2,1")


def test_several_engines_share_the_cpus(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that this process may use, which are fewer than the machine has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    asked = EngineConfig(
        model=ModelConfig(model="m"), parallel=parallel, device=DeviceConfig(device="cpu", cpu_bind="0-7")
    )
    assert launch._environment(asked, 1)["OMP_NUM_THREADS"] == "4", "for the two workers of each engine"
    assert [launch._with_own_cpus(asked, i).device.cpu_bind for i in range(2)] == ["0,1,2,3", "4,5,6,7"]
    assert limits.share([0, 1, 2, 3], 1, 2) == [2, 3]
    one = EngineConfig(model=ModelConfig(model="m"), parallel=parallel, device=DeviceConfig(cpu_bind="3"))
    with pytest.raises(ConfigError, match="names 1 CPUs for 2 engines"):
        launch._with_own_cpus(one, 0)
