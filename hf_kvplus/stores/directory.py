"""The folder that a cache keeps its files in: one owner at a time, emptied when the owner is gone, however it went.

An owner holds an operating-system lock on a file in its folder. The system drops the lock when the process ends, also
when it is killed; so a folder whose lock can be had belongs to nobody, and what lies in it is left over.

    named folder      given by the user: locked; leftovers are removed when a new cache takes it, or reopened
    unnamed folder    one of its own under the system's temporary folder; taking one removes the leftovers of others

Left out: systems without `flock` (Windows).
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_kvplus.stores.blockfile import OffloadError

LOCK_NAME = "kvplus.lock"
INDEX_NAME = "kvplus-index.safetensors"
BLOCKS_PATTERN = "kvplus-layer-*.blocks"
# Everything that a cache may leave behind, with the names that an index has while it's written.
PATTERNS = (BLOCKS_PATTERN, INDEX_NAME, f".{INDEX_NAME}.*.tmp")


def import_fcntl() -> Any:
    """Returns the module that locks files.

    Raises:
        NotImplementedError: If the system has none.
    """
    try:
        import fcntl
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            "offloading to disk needs file locks as POSIX systems have them; use `offload:cpu` here"
        ) from error
    return fcntl


class BlockDirectory:
    """A locked folder.

    Args:
        path: A folder, made if it isn't there; `None` takes a new one under the system's temporary folder.
        keep: Whether files left there by a process that ended are kept, to be reopened; otherwise they are removed.

    Raises:
        OffloadError: If another cache uses the folder, or it can't be made or written to.
    """

    def __init__(self, path: Path | None, keep: bool = False) -> None:
        try:
            if path is None:
                self.path, self._lock = _take_unnamed()
                made = True
            else:
                self.path = Path(path).absolute()
                made = not self.path.exists()
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(self.path)
            try:
                self.leftover = (self.path / INDEX_NAME).exists()
                if not keep:
                    remove_files(self.path)
            except OSError:
                os.close(self._lock)
                raise
        except OSError as error:
            where = error.filename or path or tempfile.gettempdir()
            raise OffloadError(
                f"`directory`: {where} can't be used for offloading: {error.strerror}; name a folder that can be "
                "written to"
            ) from error
        self._finalizer = weakref.finalize(self, _release, self.path, self._lock, made, os.getpid())

    @property
    def index_path(self) -> Path:
        """Where the index is."""
        return self.path / INDEX_NAME

    def give_up(self) -> None:
        """Unlocks the folder and leaves everything in it."""
        if self._finalizer.detach():
            os.close(self._lock)

    def close(self) -> None:
        """Removes the files and gives the folder up."""
        self._finalizer()


def remove_files(path: Path) -> None:
    """Removes everything that a cache may have left in a folder, and nothing else."""
    for pattern in PATTERNS:
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)


def _release(path: Path, lock: int, made: bool, process: int) -> None:
    """Removes an owner's files; in a forked process, whose parent still has them, only closes the lock's file."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            remove_files(path)
            (path / LOCK_NAME).unlink(missing_ok=True)
            if made:
                path.rmdir()
    os.close(lock)


def _lock(path: Path) -> int:
    """Locks a folder and returns the descriptor that holds the lock.

    Raises:
        OffloadError: If somebody else has it.
    """
    descriptor = _try_lock(path)
    if descriptor is None:
        gc.collect()  # a cache of this process that nobody uses any more gives its folder up
        descriptor = _try_lock(path)
    if descriptor is None:
        with contextlib.suppress(OSError):
            owner = (path / LOCK_NAME).read_text().strip()
            raise OffloadError(
                f"`directory`: {path} is used by another cache, of process {owner or 'unknown'}; give each cache a "
                "folder of its own, or `close()` the other one"
            )
        raise OffloadError(f"`directory`: {path} is used by another cache; give each cache a folder of its own")
    return descriptor


def _try_lock(path: Path) -> int | None:
    """Locks a folder, or returns `None` if it is locked."""
    fcntl = import_fcntl()
    while True:
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have removed the file between the two calls; then another one counts.
            if _is_same(descriptor, path / LOCK_NAME):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)  # held, it would lock out whoever tries again
            raise
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether `path` is the file that `descriptor` has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _take_unnamed() -> tuple[Path, int]:
    """Makes and locks a new folder under the temporary one, and removes those whose owners are gone."""
    root = Path(tempfile.gettempdir()) / f"hf_kvplus-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    with _serialized(root):
        for folder in root.glob("cache-*"):
            with contextlib.suppress(FileNotFoundError):  # its owner may be removing it
                lock = _try_lock(folder)
                if lock is not None:
                    _release(folder, lock, True, os.getpid())
        path = root / f"cache-{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir()
        lock = _try_lock(path)
    if lock is None:
        raise OffloadError(f"{path} was locked by another process as soon as it was made; try again")
    return path, lock


@contextlib.contextmanager
def _serialized(root: Path) -> Iterator[None]:
    """Lets one process at a time make and remove folders."""
    fcntl = import_fcntl()
    descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
