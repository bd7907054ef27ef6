"""How kernels are launched: compiled ahead, all at once, and overlapping with the kernel before.

Compiled one after the other, kernels take half a second each, and the first steps need some thirty of them.
`precompile` gathers the variants that a step launches and compiles them on all cores before the step runs for real.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import build

from kvasir.log import get_logger
from kvasir.platforms.limits import usable_cpus

logger = get_logger(__name__)
PACKAGE = Path(__file__).parent.parent.parent

THREADS = "compile"  # prefix of the threads' names
_ONE_AT_A_TIME = threading.Lock()  # the hook is one for the whole process
_THIS_THREAD = threading.local()  # `precompiles`: whether it is in `precompile`
_EMPTY: dict[Any, Callable[..., Any]] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}


class _Zeros(TorchFunctionMode):
    """Replaces empty tensors by zeros: a number that a skipped kernel did not write may be used as an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _EMPTY.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def precompile() -> Iterator[None]:
    """Within this context, this thread skips launches of kernels that are not compiled yet, so that its results mean
    nothing. On leaving, all kernels that it skipped are compiled, in parallel.
    """
    assert not getattr(_THIS_THREAD, "precompiles", False), "precompile within precompile would wait for itself"
    here = threading.get_ident()
    missing: dict[tuple[Any, str], str] = {}  # kernel and variant -> how to compile it

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton calls this before it compiles. True: it neither compiles nor launches."""
        if threading.get_ident() != here:
            return False
        missing[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return True

    with _ONE_AT_A_TIME:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = skip
        _THIS_THREAD.precompiles = True
        try:
            with _Zeros():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
            _THIS_THREAD.precompiles = False
    _compile_all([(kernel, how) for (kernel, _), how in missing.items()])


def _compile_all(variants: Sequence[tuple[Any, str]]) -> None:
    if not variants:
        return
    with ThreadPoolExecutor(usable_cpus(), THREADS, torch.cuda.set_device, (torch.cuda.current_device(),)) as pool:
        for _compiled in pool.map(_compile, *zip(*variants, strict=True)):
            pass  # raises what the compiler did


def _compile(kernel: Any, specialization: str) -> Any:
    """Compile a kernel and its launcher."""
    return kernel.preload(specialization).run


_LOADING = threading.Lock()
_load_module: Callable[[str, str], Any] = build._load_module_from_path


def _load_launcher(name: str, path: str) -> Any:
    """Load a launcher. All have the same module name, and Python may give a module that it loads again the functions of
    another one of that name, while a second thread is about to read them. So one is loaded at a time, and its functions
    are taken out at once."""
    with _LOADING:
        return SimpleNamespace(**vars(_load_module(name, path)))


build._load_module_from_path = _load_launcher


# ------------------------------------------------------------ lists of kernels, from one start to the next

_known: dict[tuple[str, str, str], None] = {}  # module, name and variant of the kernels that this process compiled


def compile_listed(list_name: str) -> bool:
    """Load the kernels of this list, which an earlier start kept; those that are not on disk any more are compiled.
    False: there is no such list."""
    try:
        entries = json.loads(_list_path(list_name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    missing = [entry for entry in map(tuple, entries) if entry not in _known]
    _compile_all([(getattr(import_module(module), name), how) for module, name, how in missing])
    return True


def keep_list(list_name: str) -> None:
    """Write down which kernels were compiled, beside Triton's own files. Kernels of other engines of this process are
    among them, since they may be shared."""
    path = _list_path(list_name)
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(list(_known)), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        logger.info("the list of kernels is not kept, so that the next start takes longer: %s", error)


def _list_path(list_name: str) -> Path:
    """The list is valid for one version of the code and of the compiler, on one kind of device."""
    digest = hashlib.sha256()
    for part in (list_name, torch.__version__, triton.__version__, torch.cuda.get_device_name()):
        digest.update(part.encode() + b"\0")
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return Path(knobs.cache.dir) / f"kvasir-{digest.hexdigest()[:32]}.json"


# ------------------------------------------------------------ sizes of grids and blocks

# Triton's own functions of these names may be called in kernels too, and take five microseconds on the host.


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Numbers of a head that a tile holds: tensor cores take no less than 16."""
    return max(16, next_power_of_2(dim))


# ------------------------------------------------------------ late compilations

_late: int | None = None  # kernels compiled, or loaded from disk, since `watch_compilations`; None: nobody watches


def watch_compilations() -> None:
    """Count the kernels that are compiled or loaded from now on, and log each: requests wait for them."""
    global _late
    _late = 0


def expect_compilations() -> None:
    """An engine starts, perhaps beside others in this process: until `watch_compilations` nothing counts as late."""
    global _late
    _late = None


def _compiled(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
    """Triton calls this when it has compiled a kernel, or loaded it from disk."""
    global _late
    if fn.module.startswith("kvasir."):
        _known[fn.module, fn.name, compile["specialization_data"]] = None
    if _late is not None and not threading.current_thread().name.startswith(THREADS):  # no launch waits for those
        _late += 1
        logger.warning("the kernel %s was compiled while requests waited", fn.name)


knobs.runtime.jit_post_compile_hook = _compiled


def late_compilations() -> int:
    return _late or 0


# ------------------------------------------------------------ programmatic dependent launch

# Between two kernels of a graph the device idles for about a microsecond. A kernel launched with `early` is already in
# place when its predecessor ends. Until `await_previous` it must not touch anything that the predecessor writes, and
# each of its programs must reach `await_previous`: the next kernel relies on all earlier ones being done once this one
# is. It may read earlier what was there before the predecessor began: weights, and a step's inputs (lengths, tables).
# Those inputs must be read past the processor's own cache, which may hold the values of an earlier step.


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until everything that earlier kernels wrote is visible, and let the next kernel be placed."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def early(x: torch.Tensor) -> dict[str, bool]:
    """How to launch a kernel that calls `await_previous` on x's device."""
    return {"PDL": True, "launch_pdl": True} if is_hopper_or_newer(x) else {"PDL": False}


def is_hopper_or_newer(x: torch.Tensor) -> bool:
    """Whether x is on an NVIDIA GPU of compute capability 9.0 or more."""
    return x.is_cuda and _is_hopper_or_newer(x.device.index)


@cache
def _is_hopper_or_newer(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)


# ------------------------------------------------------------ Gluon

NEWEST = (3, 9)  # newest Triton that our kernels in Gluon were compiled with


@cache
def gluon_is_known() -> bool:
    """Whether Gluon is a version that our kernels were written for: unlike Triton, it changes from version to version.
    Modules with such kernels are imported only then."""
    if tuple(int(number) for number in triton.__version__.split(".")[:2]) <= NEWEST:
        return True
    logger.warning(
        "Triton %s is newer than %d.%d, the last that the kernels for Hopper GPUs were tried with (prompts, latent "
        "caches, a few rows with quantized matrices): others are used, which take 10 %% longer or more. Install an "
        "older Triton to have them.",
        triton.__version__, *NEWEST,
    )  # fmt: skip
    return False
