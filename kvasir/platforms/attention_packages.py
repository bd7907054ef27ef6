"""Optional packages with attention kernels: which there are, on what devices and for what shapes they run.

Any process. Only `load`, which the worker calls, imports a package.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType

from kvasir.errors import ConfigError
from kvasir.platforms import Platform

DTYPES = ("float16", "bfloat16")
_TO_256 = frozenset(range(8, 257, 8))


@dataclass(frozen=True, slots=True)
class Package:
    """A package that computes paged attention, and its limits."""

    title: str
    module: str
    install: str  # how to install it
    majors: tuple[int, ...]  # major versions of the compute capabilities it runs on
    head_dims: frozenset[int]
    head_dims_in_words: str
    block_size: int | None = None  # the only one it supports; None: any
    distribution: str | None = None  # must be installed too, where another package has a module of this name


FA2 = Package(
    "FlashAttention 2", "flash_attn", "pip install flash-attn", (8, 9, 10, 11, 12), _TO_256, "multiples of 8 up to 256",
    block_size=256,  # multiples of it are possible too, but not offered
)  # fmt: skip
FA3 = Package(
    "FlashAttention 3", "flash_attn_interface", "the hopper folder of FlashAttention's sources", (9,), _TO_256,
    "multiples of 8 up to 256",
)  # fmt: skip
# flash-attn 2.8 has an early `flash_attn.cute` with other arguments: only the distribution's name tells them apart.
FA4_HOPPER = Package(
    "FlashAttention 4", "flash_attn.cute", "pip install flash-attn-4", (9,), _TO_256, "multiples of 8 up to 256",
    distribution="flash-attn-4",
)  # fmt: skip
FA4_BLACKWELL = Package(
    "FlashAttention 4", "flash_attn.cute", "pip install flash-attn-4", (10,), frozenset(range(8, 129, 8)) | {256},
    "multiples of 8 up to 128, and 256", distribution="flash-attn-4",
)  # fmt: skip
FLASHINFER_PYTHON = Package(
    "FlashInfer", "flashinfer", "pip install flashinfer-python", (8, 9, 10, 11, 12), frozenset((64, 128, 256)),
    "64, 128 and 256",
)  # fmt: skip

# By attention backend, in the order of preference.
PACKAGES = {"flash_attn": (FA3, FA4_HOPPER, FA4_BLACKWELL, FA2), "flashinfer": (FLASHINFER_PYTHON,)}


def require(backend: str, platform: Platform) -> Package:
    """The best installed package of a backend that runs on the device."""
    capability = platform.compute_capability
    if capability is None:
        raise ConfigError(
            f"attention_backend={backend!r} runs on NVIDIA GPUs, and the device is {platform.device}; leave it at auto."
        )
    suited = [package for package in PACKAGES[backend] if capability[0] in package.majors]
    if not suited:
        raise ConfigError(
            f"attention_backend={backend!r} does not run on {platform.device}, whose compute capability is "
            f"{capability[0]}.{capability[1]}; leave it at auto."
        )
    installed = next((package for package in suited if is_installed(package)), None)
    if installed is None:
        ways = " or ".join(f"{package.title} ({package.install})" for package in suited)
        raise ConfigError(
            f"attention_backend={backend!r} needs a package that is not installed: {ways}. Install it, or leave "
            f"attention_backend at auto."
        )
    return installed


def is_installed(package: Package) -> bool:
    if package.distribution is not None:
        try:
            metadata.version(package.distribution)
        except metadata.PackageNotFoundError:
            return False
    # Only the outermost package is looked up: for a dotted name find_spec would import the outer package.
    outer, _, inner = package.module.partition(".")
    try:
        spec = find_spec(outer)
    except ValueError:  # a module of this name has no spec
        return False
    # With only FlashAttention 4 installed, `flash_attn` is a folder without __init__.py, and not FlashAttention 2.
    return spec is not None and (bool(inner) or spec.origin is not None)


def load(package: Package) -> ModuleType:
    """Import the package."""
    try:
        return import_module(package.module)
    except (ImportError, OSError, AttributeError) as error:  # raised by libraries built for another torch or CUDA
        raise ConfigError(
            f"{package.title} is installed, but importing {package.module} fails: {error}. Install it for this version "
            f"of torch ({package.install}), or leave attention_backend at auto."
        ) from error
