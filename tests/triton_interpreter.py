"""Makes Triton's interpreter quicker: it looks for the language's builtins before every launch, and they do not change.

Imported by the helpers of tests that launch kernels. Without an interpreter of this form it changes nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None

_NAMES: dict[Any, list[str]] = {}


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As in Triton, but the names of builtins are found once."""
    is_builtin = interpreter.tl.core.is_builtin
    if package not in _NAMES:
        _NAMES[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
    for name in _NAMES[package]:
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


if interpreter is not None and hasattr(interpreter, "_patch_attr"):
    wanted = list(inspect.signature(getattr(interpreter, "_patch_builtin", print)).parameters)
    if wanted == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
