"""Who may import whom. The table below is the package's order: a folder imports what its line names, and the base.

Imports inside functions count as much as those at the top of a file, except where a line says "by name".
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MOST_ROOT_NAMES = 24
PACKAGE = Path(__file__).parent.parent.parent / "kvasir"

# Everything may import these; they import only each other.
BASE = {"kvasir", "errors", "log", "sampling_params", "outputs", "messages"}
BASE |= {"config.startup", "config.engine", "config.args", "config.env", "config.scratch"}
BASE |= {"config.speculative", "config.pooling", "config.quantized", "config.vllm_names"}


@dataclass(frozen=True)
class Line:
    """What a folder (or a file at the root) may import, besides the base and itself."""

    may: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()  # only inside functions
    halves: bool = False  # the host half (host.py) imports none of `may`


# In order: what stands lower never imports what stands higher.
ORDER = {
    "__main__": Line(("entrypoints",)),
    "entrypoints.openai": Line(("entrypoints.cli",)),
    "entrypoints.cli": Line(("entrypoints", "frontend", "models.hub"), by_name=("anything",)),
    "bench": Line(("entrypoints", "frontend", "models.hub")),
    "server": Line(
        (
            *("entrypoints.async_llm", "parsers", "frontend", "engine.transport", "engine.stats", "models.hub", "host"),
            "platforms.limits",  # how much memory a process may use
        )
    ),
    "server.routes": Line(
        ("server", "entrypoints.async_llm", "parsers", "frontend", "engine.transport", "engine.stats", "host")
    ),
    "server.schema": Line(("server.body_limits",)),  # for JSON that stands in texts
    "entrypoints": Line(("config.resolve", "frontend", "engine.transport", "engine.stats", "host")),
    "engine.process": Line(("config.resolve", "engine", "sampling.startup_processors"), by_name=("frontend.requests",)),
    "parsers": Line(("frontend.text",)),
    "frontend.clients": Line(("frontend", "engine", "host", "platforms.limits")),
    "frontend": Line(
        (
            *("host", "engine.transport", "engine.stats", "platforms.limits", "sampling.startup_processors"),
            *("engine.grammar_compile", "engine.grammar_guide", "engine.guides", "quantization.gguf_file"),
        )
    ),
    "engine": Line(("executor", "host", "sampling.startup_processors")),
    "engine.cache": Line(),
    "engine.transport": Line(),
    "engine.stats": Line(),
    # platforms.cpu has what must be done before the worker, and with it torch, is imported.
    "executor": Line(("platforms.cpu", "platforms.limits"), by_name=("worker", "layers.mesh")),
    "worker": Line(
        (
            *("models", "layers", "sampling", "worker.speculative", "lora", "attention", "kernels", "platforms"),
            "device",
        )
    ),
    "worker.speculative": Line(("sampling", "attention", "kernels")),
    "structured": Line(("kernels",), halves=True),
    "transfer": Line(("kernels", "layers.mesh"), halves=True),
    "multimodal": Line(("models",), halves=True),
    # host.py finds adapters on the Hub; device.py finds the modules of a model and is a feature of its rows;
    # expert_factors.py cuts a rank's share of an expert as quantization.base does
    "lora.host": Line(("models.hub",)),
    "lora": Line(("models", "sampling", "layers", "attention", "quantization", "kernels", "host")),
    "config.resolve": Line(
        ("models.hub", "quantization.gguf_file", "platforms"),
        by_name=("models.architectures", "models.gguf", "kernels.cpu"),
    ),
    "models.hub": Line(),
    # kernels: transformers' own layers, in models.fallback, bring keys and values to store
    "models": Line(("layers", "attention", "quantization", "kernels", "platforms")),
    "layers": Line(("attention", "quantization", "kernels")),
    "attention": Line(("kernels", "platforms")),
    "quantization": Line(("kernels",)),
    "sampling.startup_processors": Line(),
    "sampling": Line(("kernels", "platforms")),
    "kernels": Line(("platforms",)),
    "platforms": Line(),
}

NO_TORCH = (
    *sorted(BASE - {"kvasir"}),
    "config",
    "models.hub",
    "quantization.gguf_file",
    "sampling.startup_processors",
    "entrypoints",
    "engine",
    "frontend",
    "parsers",
    "server",
)
HEAVY = ("torch", "numpy", "transformers")


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    hidden: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line} imports {self.module}"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    """engine/cache/__init__.py -> engine.cache; kvasir/__init__.py -> kvasir."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "kvasir"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(file: Path, tree: ast.AST | None = None, hidden: bool = False) -> Iterator[Import]:
    """Every import statement in a file, by the full name of what it imports."""
    for node in ast.iter_child_nodes(tree or parsed(file)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name, hidden) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield Import(file, node.lineno, _module_in(node.module or "", alias.name), hidden)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(file, node, hidden or inside)


@cache
def _module_in(package: str, name: str) -> str:
    """The module that `from package import name` imports: package.name where that is a module, else package."""
    path = PACKAGE.parent.joinpath(*package.split("."), name)
    ours = package.split(".")[0] == "kvasir"
    return f"{package}.{name}" if ours and (path.is_dir() or path.with_suffix(".py").is_file()) else package


def line_for(module: str) -> tuple[str, Line]:
    """The most specific entry of the table for a module."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in ORDER:
            return name, ORDER[name]
    raise AssertionError(f"kvasir/{module} has no line in the table of tests/unit/test_imports.py")


def covers(allowed: tuple[str, ...], target: str) -> bool:
    """Whether a target such as models.loader is meant by a name such as models; `host` means any */host.py."""
    parts = target.split(".")
    halves = {"host", "device"} & set(allowed) & set(parts[1:2])
    return (
        "anything" in allowed
        or bool(halves)
        or any(target == name or target.startswith(name + ".") for name in allowed)
    )


def is_allowed(found: Import) -> bool:
    target = found.module.removeprefix("kvasir.")
    source = module_name(found.file)
    if covers(tuple(BASE), target):
        return True
    if source == "kvasir":
        return True  # its imports are for type checkers; test_import_is_light watches the rest
    if source in BASE:
        return False
    name, line = line_for(source)
    host = line.halves and source.split(".")[1:2] == ["host"]
    if covers((name,), target):
        return not (host and "device" in target.split("."))
    return (not host and covers(line.may, target)) or (found.hidden and covers(line.by_name, target))


def test_order_is_kept() -> None:
    everything = [found for file in sources() for found in imports_of(file)]
    ours = [found for found in everything if found.module.split(".")[0] == "kvasir"]
    assert len(ours) > 500
    wrong = [str(found) for found in ours if not is_allowed(found)]
    assert not wrong, "The order of the package does not allow this:\n" + "\n".join(wrong)


def test_the_table_is_in_order() -> None:
    names = list(ORDER)
    for position, (name, line) in enumerate(ORDER.items()):
        for allowed in line.may + line.by_name:
            target = next((n for n in names if covers((n,), allowed)), name)
            inside = covers((target,), name)  # a folder's own files may know each other
            assert inside or names.index(target) > position, f"{name} stands below {allowed}"


def test_no_torch_above_the_worker() -> None:
    names = {file: module_name(file) for file in sources()}
    above = [file for file, name in names.items() if covers(NO_TORCH, name) or name.split(".")[-1] == "host"]
    assert len(above) > 50
    wrong = [str(found) for file in above for found in imports_of(file) if found.module.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


def test_public_class_names_are_unique() -> None:
    """A class name means one thing in the whole package."""
    places: dict[str, list[str]] = {}
    for file in sources():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_name(file))
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_the_root_is_small() -> None:
    """A reader sees the package at a glance; a loose module belongs into some folder."""
    names = [path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert len(names) <= MOST_ROOT_NAMES, sorted(names)


def loaded_by(*modules: str, of: tuple[str, ...] = HEAVY) -> set[str]:
    """Which of these libraries a fresh process has after importing these modules."""
    program = f"import sys, {', '.join(modules)}; print(*[name for name in {of} if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(ran.stdout.split())


def test_import_is_light() -> None:
    assert loaded_by("kvasir", "kvasir.config.args", "kvasir.entrypoints.cli.main") == set()


def test_who_runs_offline_needs_nothing_of_a_server() -> None:
    assert loaded_by("kvasir.entrypoints.llm", of=("zmq", "msgspec", "fastapi", "pydantic", "uvicorn")) == set()


def test_the_api_side_runs_without_torch() -> None:
    assert loaded_by("kvasir.entrypoints.async_llm") == {"numpy"}


def test_engine_and_frontend_run_without_torch() -> None:
    # What stands in their way may be something they import, so the modules are really imported.
    modules = [module_name(f) for f in sources() if covers(("engine", "frontend", "messages"), module_name(f))]
    assert "torch" not in loaded_by(*(f"kvasir.{m}" for m in modules))


def test_the_checker_sees_a_wrong_import() -> None:
    def allowed(source: str, target: str, hidden: bool = False) -> bool:
        return is_allowed(Import(PACKAGE / source, 1, target, hidden))

    assert not allowed("engine/scheduler.py", "kvasir.worker.worker")
    assert not allowed("engine/scheduler.py", "kvasir.worker.worker", hidden=True)
    assert not allowed("engine/cache/manager.py", "kvasir.engine.scheduler")
    assert not allowed("config/engine.py", "kvasir.platforms", hidden=True)
    assert not allowed("frontend/requests/input.py", "kvasir.engine.core")
    assert not allowed("executor/__init__.py", "kvasir.worker.worker")
    assert not allowed("structured/host.py", "kvasir.kernels")
    assert allowed("structured/device.py", "kvasir.kernels")
    assert allowed("executor/__init__.py", "kvasir.worker.worker", hidden=True)
    assert allowed("frontend/clients/inproc_client.py", "kvasir.engine.core")
    assert allowed("frontend/clients/inproc_client.py", "kvasir.frontend.requests.input")
    assert allowed("engine/scheduler.py", "kvasir.structured.host")
    assert allowed("engine/scheduler.py", "kvasir.engine.cache.manager")
