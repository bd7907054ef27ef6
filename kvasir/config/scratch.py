"""Directories of running processes in the system's temporary directory: sockets, shared files. Any process.

The process that makes one holds a lock on a file in it for as long as it lives. A directory whose lock nobody holds was
left by a process that was killed; the next one that makes a directory removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK = "lock"
_PREFIX = "kvasir-"
_held: dict[str, int] = {}  # descriptors of the locks of this process, by directory


def make_scratch(kind: str = "") -> str:
    """Make a directory that only this user may enter, and remove those of killed processes."""
    remove_stale()
    directory = tempfile.mkdtemp(prefix=_PREFIX + kind)
    descriptor = os.open(f"{directory}/.{LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(f"{directory}/.{LOCK}", f"{directory}/{LOCK}")  # nobody sees it before it is locked
    _held[directory] = descriptor
    return directory


def remove_scratch(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if (descriptor := _held.pop(directory, None)) is not None:
        os.close(descriptor)


def remove_stale() -> None:
    """Remove the directories of this user whose makers have ended without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{LOCK}"):
        with suppress(OSError):
            if path.parent.lstat().st_uid == os.getuid() and not path.parent.is_symlink() and _is_free(path):
                shutil.rmtree(path.parent, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
