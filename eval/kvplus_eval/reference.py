"""Reference log-probabilities on disk, computed once and reused by every later run that asks the same question.

The same question means the same fingerprint: model, text, windows, chunks, number type, device and library versions.
A window counts as present when its JSON file is, which is written last, so a run that was stopped leaves nothing
half-trusted. Left out: compression; float32 keeps divergences below 1e-6 meaningful.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from kvplus_eval.journal import write_whole

FORMAT_VERSION = 1
FINGERPRINT_LETTERS = 16


@dataclass(frozen=True)
class ReferenceStore:
    """The reference's log-probabilities, a memory-mapped file a window.

    Args:
        folder: Where the files lie; its name ends with the fingerprint.
        positions: Predicted tokens in a window.
        own: If these are another model's, the store of the full cache of the model under test, first window alone;
            `None` if they're its own.
    """

    folder: Path
    positions: int
    own: ReferenceStore | None = None

    @property
    def itself(self) -> ReferenceStore:
        """The store that compares a model with itself."""
        return self.own or self

    @classmethod
    def open(cls, root: Path, question: dict[str, object], positions: int) -> ReferenceStore:
        """Opens the store that belongs to a question, making its folder if it is new.

        Args:
            root: Folder of all references.
            question: Everything that the log-probabilities depend on, as plain JSON values.
            positions: Predicted tokens in a window.

        Returns:
            The store.
        """
        text = json.dumps({"format": FORMAT_VERSION, **question}, sort_keys=True)
        folder = root / f"reference-{hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_LETTERS]}"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "question.json", text.encode())
        return cls(folder, positions)

    def has(self, window: int) -> bool:
        """Tells whether a window is complete."""
        return self._note(window).is_file() and self._array(window).is_file()

    def full_bytes(self, window: int) -> int:
        """Returns the bytes of the reference cache at the end of a window."""
        return int(json.loads(self._note(window).read_text())["full_bytes"])

    def full_elements(self, window: int) -> int:
        """Returns the elements of keys and values in it, 0 where an earlier version left the window."""
        return int(json.loads(self._note(window).read_text()).get("full_elements", 0))

    def stored_bytes(self) -> int:
        """Returns the size of the files on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def read(self, window: int, start: int, stop: int) -> torch.Tensor:
        """Reads positions `start` to `stop` of a window, shape (stop - start, vocab), float32."""
        rows = numpy.load(self._array(window), mmap_mode="r")[start:stop]
        return torch.from_numpy(numpy.array(rows))

    @contextmanager
    def recording(self, window: int, vocab: int) -> Iterator[numpy.memmap]:
        """Opens a window for writing; it counts once `finish` was called.

        Args:
            window: Which window.
            vocab: Size of the vocabulary.

        Yields:
            A memory map to fill, shape (positions, vocab), float32.

        Raises:
            OSError: If the disk has too little room.
        """
        needed_bytes = self.positions * vocab * 4
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < needed_bytes:
            raise OSError(
                f"the reference needs {needed_bytes} bytes a window in {self.folder}, {free_bytes} are free; "
                "give another --out or fewer --window-tokens"
            )
        partial = self._array(window).with_suffix(f".partial-{os.getpid()}")
        rows = numpy.lib.format.open_memmap(partial, mode="w+", dtype=numpy.float32, shape=(self.positions, vocab))
        yield rows
        rows.flush()
        del rows
        os.replace(partial, self._array(window))

    def finish(self, window: int, full_bytes: int, full_elements: int = 0) -> None:
        """Marks a recorded window as complete.

        Args:
            window: Which window.
            full_bytes: Bytes of the reference cache at its end.
            full_elements: Elements of keys and values in it.
        """
        write_whole(
            self._note(window), json.dumps({"full_bytes": full_bytes, "full_elements": full_elements}).encode()
        )

    def _array(self, window: int) -> Path:
        return self.folder / f"window-{window:04d}.npy"

    def _note(self, window: int) -> Path:
        return self.folder / f"window-{window:04d}.json"
