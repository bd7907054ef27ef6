"""`kvasir collect-env`: describes the machine and the installation for a bug report.

torch is queried in a separate process, so this works even if torch is missing or crashes. Secrets are not shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvasir import __version__
from kvasir.errors import ConfigError

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numpy", "jinja2"),
    *("msgspec", "pyzmq", "fastapi", "pydantic", "uvicorn", "uvloop", "httptools", "websockets", "httpx"),
    *("prometheus_client", "flashinfer-python", "flash-attn", "vllm"),
)
# Instruction sets that determine the choice of kernels, by Linux's names.
INSTRUCTION_SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
VARIABLES = re.compile(r"(KVASIR|VLLM|CUDA|NVIDIA|HIP|ROCR|TRITON|TORCH|PYTORCH|OMP|MKL|ONEDNN|HF|NCCL|GLOO)_\w+")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECONDS = 120

_TORCH_QUERY = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "threads": torch.get_num_threads(), "cuda available": torch.cuda.is_available()}
if torch.cuda.is_available():
    found["devices"] = ["%s, compute capability %d.%d" % (torch.cuda.get_device_name(i),
                        *torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())]
    found["cudnn"] = torch.backends.cudnn.version()
print(json.dumps(found))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE as JSON")


def run(namespace: argparse.Namespace) -> int:
    found = collect()
    print(render(found))
    if namespace.json:
        try:
            Path(namespace.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {namespace.json}: {error.strerror}.") from None
    return 0


def collect() -> dict[str, dict[str, Any]]:
    return {
        "kvasir": {"version": __version__, "commit": _commit(), "path": str(Path(__file__).parents[1])},
        "system": _system(),
        "cpu": _cpu(),
        "memory": _memory(),
        "gpu": _gpu(),
        "torch": _torch(),
        "packages": {name: _version(name) for name in PACKAGES},
        "settings": shown_variables(os.environ),
    }


def render(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for section, entries in found.items():
        lines.append(f"{section}:")
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"  {name.ljust(width)}  {'-' if shown in (None, '') else shown}")
        lines.append("")
    return "\n".join(lines).rstrip()


# ---------------------------------------------------------------- sections


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that affect Kvasir and its dependencies, without the values of secrets."""
    chosen = {name: value for name, value in sorted(environment.items()) if VARIABLES.fullmatch(name)}
    return {name: "(set, not shown)" if SECRET.search(name) else _masked(value) for name, value in chosen.items()}


def _masked(value: str) -> str:
    """Hide credentials in URLs."""
    return re.sub(r"://[^/@\s]+@", "://***@", value)


def _system() -> dict[str, Any]:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return {
        "os": name,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "in container": Path("/.dockerenv").exists() or bool(os.environ.get("KUBERNETES_SERVICE_HOST")),
    }


def _cpu() -> dict[str, Any]:
    from kvasir.bench.report import cpu_name
    from kvasir.platforms.cpu import amx_lacks_description, cpu_flags, cpuid

    flags = cpu_flags()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "name": cpu_name(),
        "architecture": platform.machine(),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "instruction sets": [name for name in INSTRUCTION_SETS if name in flags],
    }
    if amx_lacks_description(flags, cpuid):
        found["note"] = "AMX is announced but not described (CPUID leaf 0x1D), so oneDNN does not use it"
    return found


def _memory() -> dict[str, Any]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {"total": None}
    sizes = {name: int(rest.split()[0]) / 2**20 for name, _, rest in (line.partition(":") for line in lines)}
    return {
        "total": f"{sizes.get('MemTotal', 0):.1f} GiB",
        "available": f"{sizes.get('MemAvailable', 0):.1f} GiB",
        "swap": f"{sizes.get('SwapTotal', 0):.1f} GiB",
        "shared (/dev/shm)": _space("/dev/shm"),
    }


def _space(path: str) -> str | None:
    return f"{shutil.disk_usage(path).total / 2**30:.1f} GiB" if os.path.isdir(path) else None


def _gpu() -> dict[str, Any]:
    """GPUs as the drivers report them, independently of torch."""
    query = "--query-gpu=name,memory.total,driver_version"
    nvidia = _output(["nvidia-smi", query, "--format=csv,noheader"])
    rocm = _output(["rocm-smi", "--showproductname", "--csv"])
    found: dict[str, Any] = {"nvidia": nvidia.splitlines() if nvidia else "none found (nvidia-smi)"}
    if rocm:
        found["amd"] = rocm.splitlines()
    return found


def _torch() -> dict[str, Any]:
    """Query torch in another process, because a torch that does not match its driver may crash on import."""
    try:
        ran = subprocess.run([sys.executable, "-c", _TORCH_QUERY], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": str(error)}
    if ran.returncode == 0:
        try:
            answer: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
            return answer
        except (ValueError, IndexError):
            pass
    last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    ended = f"signal {-ran.returncode}" if ran.returncode < 0 else f"exit status {ran.returncode}"
    return {"problem": f"cannot be imported ({ended}): {last}"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    from kvasir.bench.report import commit

    return commit()


def _output(command: list[str]) -> str | None:
    """The output of a command; None if it is missing or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip() or None
