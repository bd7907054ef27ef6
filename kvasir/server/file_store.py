"""Files and batches on local disk (--files-dir), one folder for each API key.

All API processes read and write the same folder, so everything that one of them must know of another's is in it. A
record is a JSON file that is replaced as a whole; a file's content is beside it. Names of files are made here: no text
of a client becomes a part of a path.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from kvasir.errors import ConfigError
from kvasir.server.api_keys import ApiKey
from kvasir.server.errors import not_found, too_large
from kvasir.server.http import new_id
from kvasir.server.schema.base import encode
from kvasir.server.schema.stored import BatchReply, FileReply

T = TypeVar("T", FileReply, BatchReply)
_MAX_RECORDS = 10_000  # of a key: a list of them reads them all
_MEASURED = 64 << 20  # bytes that batches write between two looks at the size of all files
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class FileStore:
    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self._unmeasured = 0  # bytes that batches have written since
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--files-dir {folder} cannot be made: {error.strerror}.") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--files-dir {folder} cannot be written.")

    def _of(self, key: ApiKey) -> Path:
        found = self.folder / sha256(key.name.encode()).hexdigest()[:32]
        found.mkdir(mode=0o700, exist_ok=True)
        return found

    # ------------------------------------------------------------ files

    def add_file(self, key: ApiKey, filename: str, purpose: str, content: bytes) -> FileReply:
        self.check_room(key, len(content))
        file_id = f"file-{new_id()}"
        self.content_path(key, file_id).write_bytes(content)
        return self.register(key, file_id, filename, purpose)

    def register(self, key: ApiKey, file_id: str, filename: str, purpose: str) -> FileReply:
        """Make the written content visible as a file."""
        size = self.content_path(key, file_id).stat().st_size
        made = FileReply(id=file_id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
        self._write(key, made)
        return made

    def check_room(self, key: ApiKey, num_bytes: int = 1) -> None:
        """Raise unless this key may have another record, and all keys together this many bytes more."""
        if sum(1 for _ in self._of(key).glob("*.json")) >= _MAX_RECORDS:
            raise too_large(f"A key may have {_MAX_RECORDS} files and batches: delete some files.", "file")
        self._check_bytes(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Count bytes that a batch writes. Now and then, raise if all files together are too large."""
        self._unmeasured += num_bytes
        if self._unmeasured >= min(_MEASURED, self.max_bytes // 8):
            self._unmeasured = 0
            self._check_bytes(num_bytes)

    def _check_bytes(self, num_bytes: int) -> None:
        used = sum(map(_size, self.folder.glob("*/*")))
        if used + num_bytes > self.max_bytes:
            allowed = f"{self.max_bytes} bytes (--max-files-bytes)"
            raise too_large(f"This server keeps {allowed} of files, and {used} are used: delete some.", "file")

    def content_path(self, key: ApiKey, file_id: str) -> Path:
        assert _ID.fullmatch(file_id), "the id was made here"
        return self._of(key) / file_id

    def find_file(self, key: ApiKey, file_id: str) -> FileReply:
        return self._read(key, file_id, "file-", FileReply)

    def delete_file(self, key: ApiKey, file_id: str) -> None:
        self.find_file(key, file_id)
        (self._of(key) / f"{file_id}.json").unlink(missing_ok=True)
        self.content_path(key, file_id).unlink(missing_ok=True)

    def files(self, key: ApiKey) -> list[FileReply]:
        """List a key's files, the oldest first."""
        return self._all(key, "file-", FileReply)

    # ------------------------------------------------------------ batches

    def save_batch(self, key: ApiKey, batch: BatchReply) -> None:
        self._write(key, batch)

    def find_batch(self, key: ApiKey, batch_id: str) -> BatchReply:
        return self._read(key, batch_id, "batch_", BatchReply)

    def batches(self, key: ApiKey) -> list[BatchReply]:
        """List a key's batches, the oldest first."""
        return self._all(key, "batch_", BatchReply)

    @contextmanager
    def running(self, key: ApiKey, batch_id: str) -> Iterator[bool]:
        """Hold a batch while it runs; False if another process holds it. A process that ends releases all."""
        with open(self._of(key) / f"{batch_id}.lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def ask_to_cancel(self, key: ApiKey, batch_id: str) -> None:
        (self._of(key) / f"{batch_id}.cancel").touch()

    def is_to_cancel(self, key: ApiKey, batch_id: str) -> bool:
        return (self._of(key) / f"{batch_id}.cancel").exists()

    # ------------------------------------------------------------ records

    def _write(self, key: ApiKey, record: FileReply | BatchReply) -> None:
        place = self._of(key) / f"{record.id}.json"
        new = place.with_suffix(f".{new_id()}")
        new.write_bytes(encode(record))
        new.replace(place)  # a reader sees the old record or the new one

    def _read(self, key: ApiKey, record_id: str, prefix: str, kind: type[T]) -> T:
        try:
            if not record_id.startswith(prefix) or not _ID.fullmatch(record_id):
                raise FileNotFoundError
            return msgspec.json.decode((self._of(key) / f"{record_id}.json").read_bytes(), type=kind)
        except FileNotFoundError:
            what = "file" if prefix == "file-" else "batch"
            raise not_found(f"The {what} {record_id[:100]!r} does not exist here.") from None

    def _all(self, key: ApiKey, prefix: str, kind: type[T]) -> list[T]:
        found = []
        for place in self._of(key).glob(f"{prefix}*.json"):
            with suppress(FileNotFoundError):  # it was deleted just now
                found.append(msgspec.json.decode(place.read_bytes(), type=kind))
        return sorted(found, key=lambda each: (each.created_at, each.id))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it was deleted or replaced just now
        return 0
