"""What a run has found so far, on disk, so that an interruption costs no more than the piece in flight.

Each piece (one window through one strategy, one round of times, one planted fact) is a file of its own, written whole
or not at all. A run that asks the same question again finds the pieces, takes them as they are, and goes on; once its
rows are written the pieces are deleted. The same question means the same fingerprint, which holds the code as well:
pieces that other code measured are never mixed in. Left out: pieces of a strategy that failed, which is tried anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import hf_kvplus

FINGERPRINT_LETTERS = 16
FOLDER = "unfinished"


@dataclass(frozen=True)
class Journal:
    """The pieces of one run.

    Args:
        folder: Where the files lie; its name ends with the fingerprint.
        run: Name of the run, the same after an interruption.
        date: UTC time of its first start.
    """

    folder: Path
    run: str
    date: str

    @classmethod
    def open(cls, root: Path, question: dict[str, object], *, fresh: bool = False) -> Journal:
        """Finds what an interrupted run left of the same question, or begins anew.

        Args:
            root: Folder of the results.
            question: Everything that the figures depend on, as plain JSON values.
            fresh: Whether to throw away what is there.

        Returns:
            The journal.
        """
        folder = root / FOLDER / fingerprint(question)
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "run.json"
        if not note.is_file():
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            write_whole(note, json.dumps({"run": uuid.uuid4().hex[:12], "date": date}).encode())
        return cls(folder, **json.loads(note.read_text()))

    def has(self, *key: object) -> bool:
        """Tells whether a piece is there."""
        return self._path(key).is_file()

    def load(self, *key: object) -> Any:
        """Returns a piece: tensors, numbers and strings in dicts and lists."""
        return torch.load(self._path(key), weights_only=True)

    def save(self, value: Any, *key: object) -> None:
        """Keeps a piece; a reader sees all of it or none."""
        path = self._path(key)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        torch.save(value, partial)
        os.replace(partial, path)

    def count(self) -> int:
        """Returns how many pieces there are."""
        return sum(1 for _ in self.folder.glob("*.piece"))

    def close(self) -> None:
        """Deletes the pieces, once the rows made of them are written."""
        shutil.rmtree(self.folder, ignore_errors=True)  # another process on the same disk may have been faster
        with contextlib.suppress(OSError):  # what others keep there stays
            self.folder.parent.rmdir()

    def _path(self, key: tuple[object, ...]) -> Path:
        """Returns a piece's file, named readably; strategies may hold characters that file names can't."""
        text = "-".join(map(str, key))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=_-]', '_', text)[:80]}-{digest}.piece"


def fingerprint(question: dict[str, object]) -> str:
    """Names a question, which is everything that figures depend on, as plain JSON values."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:FINGERPRINT_LETTERS]


def code_digest() -> str:
    """Names the code that measures by a digest of the source files of both packages."""
    digest = hashlib.sha256()
    for package in (Path(hf_kvplus.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:FINGERPRINT_LETTERS]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees all of it or none."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_bytes(content)
    os.replace(partial, path)
