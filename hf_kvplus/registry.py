"""Named collections of parts (codecs, strategies, metrics), filled by decorators.

A part registers itself where it is defined, so adding one means adding one file. Left out on purpose: instances,
options and lazy imports; a registry holds classes or functions and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to classes or functions of one kind.

    Args:
        kind: The word used in error messages, for example `"codec"`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that stores what it decorates under `name`.

        Raises:
            ValueError: If `name` is taken.
        """

        def decorate(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} `{name}` is already registered by {self._entries[name]!r}")
            self._entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Returns the entry called `name`.

        Raises:
            ValueError: If there is none; the message lists near matches and what exists.
        """
        if name not in self._entries:
            raise ValueError(unknown_name(self.kind, name, self.names()))
        return self._entries[name]

    def names(self) -> list[str]:
        """Returns the registered names in order of registration."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """Words the error for a name that nobody registered: near matches first, then everything there is."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(f'`{match}`' for match in near)}? " if near else ""
    return f"unknown {kind} `{name}`: {hint}available: {', '.join(known)}"
