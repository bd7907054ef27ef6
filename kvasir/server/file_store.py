"""Files and batches on local disk (--files-dir), one folder for each API key.

All API processes read and write the same folder, so everything that one of them must know of another's is in it. A
record is a JSON file that is replaced as a whole; a file's content is beside it. Names of files are made here: no text
of a client becomes a part of a path. The first process of a server sets right what a killed server has left.
"""

from __future__ import annotations

import fcntl
import math
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
from kvasir.server.schema.stored import BatchError, BatchErrors, BatchReply, FileReply

T = TypeVar("T", FileReply, BatchReply)
_MAX_RECORDS = 10_000  # of a key: a list of them reads them all
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_RESULTS = ("output", "error")  # files of a batch
_COUNT_SECONDS = 5.0  # after which files of other processes are counted, too
FINAL = ("failed", "completed", "expired", "cancelled")  # states of a batch


class FileStore:
    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--files-dir {folder} cannot be made: {error.strerror}.") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--files-dir {folder} cannot be written.")
        self._used, self._counted_at = 0, -math.inf
        self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)  # as long as this process lives
        with suppress(BlockingIOError):  # another process uses the folder
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._set_right()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

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
        return _register(self._of(key), file_id, filename, purpose)

    def check_room(self, key: ApiKey, num_bytes: int = 1) -> None:
        """Raise unless this key may have another record, and all keys together this many bytes more."""
        if sum(1 for _ in self._of(key).glob("*.json")) >= _MAX_RECORDS:
            raise too_large(f"A key may have {_MAX_RECORDS} files and batches: delete some files.", "file")
        self._counted_at = -math.inf
        self.take_room(num_bytes)

    def take_room(self, num_bytes: int) -> None:
        """Count bytes that are about to be written, or raise because all keys together have no room for them."""
        now = time.monotonic()
        if self._used + num_bytes > self.max_bytes or now - self._counted_at > _COUNT_SECONDS:
            self._used, self._counted_at = self._count(), now
        if self._used + num_bytes > self.max_bytes:
            allowed = f"{self.max_bytes} bytes (--max-files-bytes)"
            raise too_large(f"This server keeps {allowed} of files, and {self._used} are used: delete some.", "file")
        self._used += num_bytes

    def _count(self) -> int:
        used = 0
        for folder in self._folders():
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):  # it has just been deleted
                    used += entry.stat().st_size
        return used

    def _folders(self) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]

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
        _write(self._of(key), batch)

    def settle(self, key: ApiKey, batch: BatchReply) -> None:
        """Say how a batch has ended whose process has ended without saying it. Its results are kept."""
        _settle(self._of(key), batch)

    def find_batch(self, key: ApiKey, batch_id: str) -> BatchReply:
        return self._read(key, batch_id, "batch_", BatchReply)

    def batches(self, key: ApiKey) -> list[BatchReply]:
        """List a key's batches, the oldest first."""
        return self._all(key, "batch_", BatchReply)

    @contextmanager
    def running(self, key: ApiKey, batch_id: str) -> Iterator[bool]:
        """Hold a batch while it runs; False if another process holds it. A process that ends releases all."""
        place = self._of(key) / f"{batch_id}.lock"
        with open(place, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                place.unlink(missing_ok=True)
                place.with_suffix(".cancel").unlink(missing_ok=True)

    def ask_to_cancel(self, key: ApiKey, batch_id: str) -> None:
        (self._of(key) / f"{batch_id}.cancel").touch()

    def is_to_cancel(self, key: ApiKey, batch_id: str) -> bool:
        return (self._of(key) / f"{batch_id}.cancel").exists()

    # ------------------------------------------------------------ records

    def _read(self, key: ApiKey, record_id: str, prefix: str, kind: type[T]) -> T:
        try:
            if not record_id.startswith(prefix) or not _ID.fullmatch(record_id):
                raise FileNotFoundError
            return msgspec.json.decode((self._of(key) / f"{record_id}.json").read_bytes(), type=kind)
        except FileNotFoundError:
            what = "file" if prefix == "file-" else "batch"
            raise not_found(f"The {what} {record_id[:100]!r} does not exist here.") from None

    def _all(self, key: ApiKey, prefix: str, kind: type[T]) -> list[T]:
        return sorted(_records(self._of(key), prefix, kind), key=lambda each: (each.created_at, each.id))

    # ------------------------------------------------------------ what killed servers have left

    def _set_right(self) -> None:
        """End batches that nobody runs any more, and remove files that belong to nothing."""
        for folder in self._folders():
            for batch in _records(folder, "batch_", BatchReply):
                if batch.status not in FINAL:
                    _settle(folder, batch)
            for file in folder.iterdir():
                is_content = _ID.fullmatch(file.name) is not None
                if file.suffix != ".json" and not (is_content and file.with_suffix(".json").exists()):
                    file.unlink(missing_ok=True)


def result_id(batch_id: str, kind: str) -> str:
    """Id of a batch's output or error file: it is known to whoever finds the batch."""
    return f"file-{sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:32]}"


def _settle(folder: Path, batch: BatchReply) -> None:
    numbers = {kind: _register_results(folder, batch, kind) for kind in _RESULTS}
    counts = batch.request_counts
    counts.completed, counts.failed = numbers["output"], numbers["error"]
    now = int(time.time())
    if counts.total and sum(numbers.values()) == counts.total:
        batch.status, batch.completed_at = "completed", now
    elif (folder / f"{batch.id}.cancel").exists():
        batch.status, batch.cancelled_at = "cancelled", now
    else:
        batch.status, batch.failed_at = "failed", now
        batch.errors = BatchErrors(data=[BatchError(code="server_error", message="The server was stopped.")])
    _write(folder, batch)


def _register_results(folder: Path, batch: BatchReply, kind: str) -> int:
    """Make the results of a batch visible, without a line that was not written to its end. Returns their number."""
    file_id, number, size = result_id(batch.id, kind), 0, 0
    if not (folder / file_id).exists():
        return 0
    with open(folder / file_id, "r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                number, size = number + 1, size + len(line)
        file.truncate(size)
    if not number:
        (folder / file_id).unlink()
        return 0
    _register(folder, file_id, f"{batch.id}_{kind}.jsonl", "batch_output")
    if kind == "output":
        batch.output_file_id = file_id
    else:
        batch.error_file_id = file_id
    return number


def _register(folder: Path, file_id: str, filename: str, purpose: str) -> FileReply:
    size, now = (folder / file_id).stat().st_size, int(time.time())
    made = FileReply(id=file_id, bytes=size, created_at=now, filename=filename, purpose=purpose)
    _write(folder, made)
    return made


def _write(folder: Path, record: FileReply | BatchReply) -> None:
    place = folder / f"{record.id}.json"
    new = place.with_suffix(f".{new_id()}")
    new.write_bytes(encode(record))
    new.replace(place)  # a reader sees the old record or the new one


def _records(folder: Path, prefix: str, kind: type[T]) -> list[T]:
    found = []
    for place in folder.glob(f"{prefix}*.json"):
        with suppress(FileNotFoundError):  # it was deleted just now
            found.append(msgspec.json.decode(place.read_bytes(), type=kind))
    return found
