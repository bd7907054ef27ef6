"""Fewer log lines while a command shows something else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from kvasir import env


def hush(name: str = "kvasir") -> Callable[[], None]:
    """Log warnings only, unless the environment names a level. What is returned undoes it."""
    logger = logging.getLogger(name)
    before = logger.level
    if not any(os.environ.get(variable) for variable in (env.LOG_LEVEL.name, *env.LOG_LEVEL.aliases)):
        logger.setLevel("WARNING")
    return lambda: logger.setLevel(before)
