"""Files of blocks that only grow: written behind the last block, read whole, checked every time, never changed.

    file     [ record | record | ... ]               a record is one block of all rows it was packed for
    record   [ checksum, place (16 bytes) | payload ]

The checksum is seeded with the record's own place, so a block that was moved or taken from another file is told from
the right one. Reading copies instead of mapping the file into memory: behind the end of a truncated file a mapping
kills the process, a read can say which block is gone. Files are opened for each call (a few microseconds beside a
mebibyte of data), so no number of them runs into a limit of open files.

Source of the checksum: xxHash (XXH3, 64 bits), https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

# Not every system reads into several places at once, nor into any number of them.
CAN_SCATTER = hasattr(os, "preadv")
MOST_PARTS = os.sysconf("SC_IOV_MAX") if CAN_SCATTER else 0
ADVICE_BYTES = 1 << 17
HEADER = struct.Struct("<QQ")
HEADER_BYTES = HEADER.size


class OffloadError(RuntimeError):
    """Offloaded states can't be written or read; the message says which block of which layer."""


class BlockError(Exception):
    """One record of a file can't be used.

    Args:
        record: Its number within the records that were asked for.
        reason: Why, in words.
    """

    def __init__(self, record: int, reason: str) -> None:
        super().__init__(reason)
        self.record, self.reason = record, reason


def import_xxhash() -> ModuleType:
    """Returns the package that computes checksums.

    Raises:
        ImportError: If it is missing.
    """
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise ImportError(
            'offloading to disk needs xxhash for its checksums; install it with `pip install "hf_kvplus[disk]"`, or '
            "offload to host memory (`offload:cpu`)"
        ) from error
    return xxhash


class Trash:
    """Removes files that nobody uses any more, at once or when the next index no longer names them."""

    def __init__(self) -> None:
        self.deferred = False
        self._paths: list[Path] = []
        self._process = os.getpid()
        self._lock = threading.Lock()

    def take(self, path: Path) -> None:
        """Takes a file; does nothing in a forked process, whose parent still reads it."""
        if os.getpid() != self._process:
            return
        if not self.deferred:
            path.unlink(missing_ok=True)
            return
        with self._lock:
            self._paths.append(path)

    def snapshot(self) -> list[Path]:
        """Hands over the files that were given up so far."""
        with self._lock:
            paths, self._paths = self._paths, []
        return paths


class BlockFile:
    """One file of records.

    Args:
        path: Where it is; made by the first `append`.
        number: Its number, part of every checksum.
        trash: Where the file goes when this object is gone.
        size: Bytes already there.
    """

    def __init__(self, path: Path, number: int, trash: Trash, size: int = 0) -> None:
        self.path, self.number, self.size = path, number, size
        self._lock = threading.Lock()
        self.hash = import_xxhash().xxh3_64_intdigest
        weakref.finalize(self, trash.take, path)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockFile:
        """Copies share a file: what is in it never changes."""
        return self

    def append(self, records: memoryview, record_bytes: int) -> int:
        """Fills in the checksums of records and writes them behind the last.

        Args:
            records: Whole records; their headers are overwritten.
            record_bytes: Bytes of each.

        Returns:
            The offset of the first one.

        Raises:
            OSError: If they can't be written; what was there stays as it was.
        """
        with self._lock:
            offset = self.size
            for start in range(0, len(records), record_bytes):
                place = self._place(offset + start)
                digest = self.hash(records[start + HEADER_BYTES : start + record_bytes], place)
                HEADER.pack_into(records, start, digest, place)
            with open(self.path, "r+b" if offset else "wb", buffering=0) as file:
                file.seek(offset)
                written = 0
                while written < len(records):
                    written += file.write(records[written:]) or 0
            self.size = offset + len(records)
        return offset

    def read(self, offset: int, into: memoryview, record_bytes: int, whole: int | None = None) -> None:
        """Reads records and checks them.

        Args:
            offset: Of the first record.
            into: Where they go; its length says how many.
            record_bytes: Bytes of each.
            whole: The checksum of all these bytes, if it is known: one call instead of one per record.

        Raises:
            BlockError: If a record is missing or damaged.
        """
        got = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(offset)
                while got < len(into):
                    count = file.readinto(into[got:])
                    if not count:
                        break
                    got += count
        except OSError as error:
            raise BlockError(0, f"{self.path} can't be read: {error.strerror}") from error
        if whole is not None and got == len(into) and self.hash(into) == whole:
            return
        for start in range(0, len(into), record_bytes):
            if got < start + record_bytes:
                raise BlockError(start // record_bytes, f"{self.path} is truncated: it ends at byte {offset + got}")
            digest, place = HEADER.unpack_from(into, start)
            expected = self._place(offset + start)
            if place != expected or digest != self.hash(into[start + HEADER_BYTES : start + record_bytes], expected):
                raise BlockError(
                    start // record_bytes, f"the checksum at byte {offset + start} of {self.path} differs"
                )
        if whole is not None:
            raise BlockError(0, f"from byte {offset} on, {self.path} holds blocks that this cache didn't write")

    def scatter(self, offset: int, parts: list[memoryview]) -> bool:
        """Reads into several places, one after the other, and checks nothing.

        Args:
            offset: Of the first byte.
            parts: The places.

        Returns:
            Whether all could be filled; `read` says what is wrong.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            for first in range(0, len(parts), MOST_PARTS):
                some = parts[first : first + MOST_PARTS]
                size = sum(map(len, some))
                if os.preadv(descriptor, some, offset) < size:
                    return False
                offset += size
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def advise(self, offset: int, size: int) -> None:
        """Lets the system begin to fetch a part of the file; does nothing if that can't be."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Linux cuts each request to what it reads ahead for a file at most.
                for begin in range(offset, offset + size, ADVICE_BYTES):
                    os.posix_fadvise(descriptor, begin, ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def _place(self, offset: int) -> int:
        """Returns the number that stands for one place in all files of a directory."""
        return self.number << 40 | offset

    def sync(self) -> None:
        """Makes what was written durable."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
