"""The index of an offloaded cache: what a later process needs to go on from the files that one left behind.

Layers pack blocks one after the other within a forward pass. As soon as the last of them has, all hold as many packed
tokens; that state is written down: which records of which files make up each layer, its sinks, its padding. The files
are synchronized first and the index replaces the last one in one step, on a thread of its own, so a step doesn't wait
for the disk. Files that the last index names are kept until the new one is there. So whenever the process is
killed, some index is whole, and everything that it names is there.

Left out: the recent tokens of each layer, which are only in memory; they are read again by the model.
"""

from __future__ import annotations

import json
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_kvplus.cachefile import write_file
from hf_kvplus.fingerprint import plain_json
from hf_kvplus.layer import KVLayer
from hf_kvplus.stores.blockfile import BlockFile, OffloadError
from hf_kvplus.stores.directory import BlockDirectory
from hf_kvplus.stores.offloaded import OffloadedStore
from hf_kvplus.stores.runs import Entry, Layout, Run
from hf_kvplus.stores.space import DISK, Shelves, Space

if TYPE_CHECKING:
    from hf_kvplus.caches import KVPlusCache

INDEX_FORMAT = "hf_kvplus offloaded cache"
INDEX_VERSION = "1"


class IndexWriter:
    """Writes the index of a cache.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: KVPlusCache) -> None:
        # The space holds this object; held in turn, its files would outlive the cache until the next collection.
        self.cache, self._space = weakref.ref(cache), weakref.ref(cache.space)
        self.tokens = 0
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @property
    def space(self) -> Space:
        """The space whose index this is; it's there as long as anybody calls."""
        return self._space()

    def attach(self) -> None:
        """Begins to write, if the tier keeps blocks for a later process and every layer is on it."""
        if self.space.options.tier == DISK and all(_is_shelved(layer) for layer in self.cache().layers):
            self.space.index, self.space.trash.deferred = self, True

    def changed(self, shelves: Shelves) -> None:
        """Writes an index when all layers have packed as many tokens, and more or fewer than the last one tells."""
        cache = self.cache()
        if cache is None or cache.layers[0].shelf.shelves is not shelves:
            return
        tokens = min(layer.shelf.packed_tokens for layer in cache.layers)
        if tokens == self.tokens:
            return
        self.wait()
        self.tokens = tokens
        tensors: dict[str, torch.Tensor] = {}
        content = json.dumps(describe_cache(cache, tensors))
        # What is given up from now on may be named by this index.
        outdated, unsynced = self.space.trash.snapshot(), set(self.space.unsynced)
        self.space.unsynced.clear()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvplus-index")
            weakref.finalize(self, self._thread.shutdown, wait=True)
        # The directory goes along, so that it isn't removed while this is written.
        self._writing = self._thread.submit(write_index, self.space.directory, tensors, content, unsynced, outdated)

    def wait(self) -> None:
        """Waits for the index that is being written.

        Raises:
            OffloadError: If it couldn't be.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            self.space.broken = OffloadError(
                f"the index of {self.space.directory.path} can't be written: {error.strerror}. This cache can't go "
                "on: free some room and `reset()` it, or use another `directory`"
            )
            raise self.space.broken from error

    def belongs_to(self, cache: object) -> bool:
        """Whether this is the index of `cache`; copies have none."""
        return self.cache() is cache

    def remove(self) -> None:
        """Removes the index and the files that only it named."""
        if self._writing is not None:
            self._writing.exception()
            self._writing = None
        self.tokens = 0
        self.space.directory.index_path.unlink(missing_ok=True)
        for path in self.space.trash.snapshot():
            path.unlink(missing_ok=True)


def _is_shelved(layer: Any) -> bool:
    """Whether all that a layer holds can be reopened: hybrids keep a recurrent state beside."""
    hybrid = isinstance(layer, LinearAttentionCacheLayerMixin)
    return isinstance(layer, KVLayer) and not hybrid and layer.shelf is not None


def write_index(
    directory: BlockDirectory,
    tensors: dict[str, torch.Tensor],
    content: str,
    unsynced: set[BlockFile],
    outdated: list[Path],
) -> None:
    """Makes the files durable, replaces the index and removes the files that it no longer names.

    Raises:
        OSError: If something can't be written; the last index is still there then.
    """
    for file in unsynced:
        file.sync()
    strings = {"format": INDEX_FORMAT, "format_version": INDEX_VERSION, "content": content}
    write_file(directory.index_path, tensors, strings)
    for old in outdated:
        old.unlink(missing_ok=True)


def describe_cache(cache: KVPlusCache, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns what an index tells of a cache as plain values; tensors are put aside under their names."""
    layers = []
    for index, layer in enumerate(cache.layers):
        sinks = {f"sinks.{index}.{name}": tensor.clone() for name, tensor in layer.sinks.fields().items()}
        tensors |= sinks
        layers.append(
            {
                "class": type(layer).__name__,
                "batch_size": layer.batch_size,
                "packed_tokens": layer.packed_tokens,
                "dtype": str(layer.dtype).removeprefix("torch."),
                "shapes": layer.shapes,
                "padding": asdict(layer.padding),
                "sinks": list(sinks),
                "stores": {name: describe_store(store) for name, store in layer.packed.items()},
            }
        )
    return plain_json({"config": cache.config_fields, "options": cache.options(), "layers": layers})


def describe_store(store: OffloadedStore) -> dict[str, Any]:
    """Returns which records of which files a store consists of."""
    files = {entry.run.file.number: (entry.run.file.path.name, entry.run.file.size) for entry in store.entries}
    return {
        "row_elements": store.row_elements,
        "files": [[number, *what] for number, what in files.items()],
        "entries": [
            [entry.run.file.number, entry.run.offset, entry.run.batch, entry.first, entry.count, entry.rows]
            for entry in store.entries
        ],
        "fields": [
            [name, shape, str(dtype).removeprefix("torch.")]
            for name, shape, dtype in (store.layout.fields if store.layout else ())
        ],
    }


def restore_store(store: OffloadedStore, described: dict[str, Any], files: dict[int, BlockFile]) -> None:
    """Fills an empty store with what `describe_store` told.

    Args:
        store: The store.
        described: What was told.
        files: Files that are open already, by number; others are added.
    """
    for number, name, size in described["files"]:
        if number not in files:
            files[number] = store.shelves.space.old_file(name, number, size)
    store.layout = Layout(
        tuple((name, tuple(shape), getattr(torch, kind)) for name, shape, kind in described["fields"])
    )
    store.row_elements = described["row_elements"]
    runs: dict[tuple[int, int], Run] = {}
    for number, offset, batch, first, count, rows in described["entries"]:
        run = runs.setdefault(
            (number, offset), Run(store.key, store.layout, batch, 0, None, files[number], offset, sealed=True)
        )
        run.count = max(run.count, first + count)
        store.entries.append(Entry(run, first, count, rows))
        store.length += count
