"""Named collections of options: what `--suite quick` stands for, and how the command line overrides it.

A suite is a YAML file in `suites/` with any options of `kvplus eval`, written as there; a path to a file of one's own
works too. What the command line gives wins over the suite, and the suite over the defaults. Left out: suites that
build on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hf_kvplus.registry import unknown_name
from kvplus_eval.protocol import Protocol

# In the wheel beside this file, in a checkout one folder up
FOLDERS = (Path(__file__).parent / "suites", Path(__file__).parent.parent / "suites")
DEFAULT_STRATEGIES = "dynamic,fp,int8,k8v4,int4,int2,hf-quanto4,hf-hqq4,hf-hqq2"
LISTS = {"contexts": int, "tasks": str, "task_lengths": int, "task_depths": float, "noise": str}
PROTOCOL_OPTIONS = tuple(field.name for field in fields(Protocol))
OPTIONS = ("strategies", "text", *PROTOCOL_OPTIONS)


@dataclass(frozen=True)
class Settings:
    """What an evaluation does, after suite and command line were put together.

    Args:
        suite: Name of the suite, None without one.
        strategies: Comma-separated strategies.
        text: As for `load_text`.
        protocol: The rest.
    """

    suite: str | None
    strategies: str
    text: str | None
    protocol: Protocol


def suite_names() -> list[str]:
    """Returns the names of the suites that come with this package."""
    return sorted(path.stem for folder in FOLDERS if folder.is_dir() for path in folder.glob("*.yaml"))


def read_suite(choice: str) -> dict[str, Any]:
    """Reads a suite.

    Args:
        choice: A name, or the path of a `.yaml` file.

    Returns:
        Its options.

    Raises:
        ValueError: If there is none, or it has an unknown option; the message lists what exists.
    """
    places = [Path(choice)] if choice.endswith((".yaml", ".yml")) else [f / f"{choice}.yaml" for f in FOLDERS]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(unknown_name("suite", choice, suite_names()))
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(options, dict):
        raise ValueError(f"suite `{choice}` must be a list of options, `windows: 4` a line")
    options.pop("description", None)
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"suite `{choice}`: {unknown_name('option', str(option), list(OPTIONS))}")
    return options


def settle(suite: str | None, given: Mapping[str, Any]) -> Settings:
    """Puts suite and command line together.

    Args:
        suite: Name or path of a suite, None for the defaults.
        given: Options of the command line by name, None for those that weren't given.

    Returns:
        The settings.

    Raises:
        ValueError: If an option is unknown or out of range.
    """
    options: dict[str, Any] = {} if suite is None else read_suite(suite)
    options.update({name: value for name, value in given.items() if value is not None})
    for name, kind in LISTS.items():
        if name in options:
            options[name] = _read_list(name, options[name], kind)
    strategies = options.pop("strategies", DEFAULT_STRATEGIES)
    strategies = ",".join(strategies) if isinstance(strategies, list) else str(strategies)
    text = options.pop("text", None)
    return Settings(suite and Path(suite).stem, strategies, text, Protocol(**options))


def _read_list(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """Reads comma-separated values, a YAML list, or one value; the word `none` is the empty list."""
    pieces = value if isinstance(value, list | tuple) else str(value).split(",")
    pieces = [piece for piece in pieces if str(piece).strip() not in ("", "none")]
    try:
        return tuple(kind(piece.strip() if isinstance(piece, str) else piece) for piece in pieces)
    except ValueError:
        words = {int: "integers", float: "numbers", str: "names"}[kind]
        raise ValueError(f"`{name}` must be {words} separated by commas, got {value!r}") from None
