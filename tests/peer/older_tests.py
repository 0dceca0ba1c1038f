"""A pytest plugin that lets tests of an older transformers checkout run with the installed release.

Tests import helpers that have moved since. Those of `transformers.testing_utils` are taken from the checkout's own
file, which the environment variable `KVPLUS_PEER_TESTING_UTILS` names; any other name that is missing becomes a mock,
and is told at the end, since a test that needs it doesn't test anything. Steps: docs/transformers-tests.md.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from typing import Any
from unittest.mock import MagicMock

from transformers import testing_utils

import_as_is = builtins.__import__
missing: set[str] = set()


def add_helpers(path: str) -> None:
    """Gives the installed `testing_utils` the names that only the older file at `path` has."""
    spec = importlib.util.spec_from_file_location("transformers.older_testing_utils", path)
    older = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    for name, value in vars(older).items():
        if not hasattr(testing_utils, name):
            setattr(testing_utils, name, value)


def import_or_mock(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Imports like `__import__`; names that a test wants from transformers in vain become mocks."""
    module = import_as_is(name, globals, locals, fromlist, level)
    if level == 0 and name.startswith("transformers") and str((globals or {}).get("__name__")).startswith("tests."):
        for attribute in fromlist or ():
            if attribute != "*" and not hasattr(module, attribute):
                missing.add(f"{name}.{attribute}")
                setattr(module, attribute, MagicMock(name=attribute))
    return module


def pytest_configure(config: Any) -> None:
    """Puts both in place before tests are imported."""
    add_helpers(os.environ["KVPLUS_PEER_TESTING_UTILS"])
    builtins.__import__ = import_or_mock


def pytest_unconfigure(config: Any) -> None:
    """Takes the import back."""
    builtins.__import__ = import_as_is


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells what was mocked."""
    terminalreporter.write_line(f"mocked: {', '.join(sorted(missing)) or 'nothing'}")
