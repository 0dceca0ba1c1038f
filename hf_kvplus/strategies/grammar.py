"""The grammar of strategy strings.

    strategy  part [+ part]...              k4v4+window:1024,sinks=4
    part      name[:value][,key=value]...   window:1024,sinks=4

A list of strategies is separated by commas too, so a piece `key=value` belongs to the strategy before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One part of a strategy string.

    Args:
        name: What comes before the colon.
        value: What follows the colon, or `None`.
        options: The `key=value` pairs.
        text: The part as written.
    """

    name: str
    value: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    text: str = ""

    def require_options(self, *allowed: str) -> None:
        """Raises ValueError if there are options beyond `allowed`."""
        unknown = [key for key in self.options if key not in allowed]
        if unknown:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ValueError(f"strategy part `{self.text}` has unknown option {', '.join(unknown)}; {takes}")

    def require_no_value(self) -> None:
        """Raises ValueError if something follows a colon."""
        if self.value is not None:
            raise ValueError(f"strategy part `{self.text}` takes nothing after a colon; write `{self.name}`")

    def integer(self, key: str | None, default: int | None = None) -> int | None:
        """Returns an option, or the value if `key` is `None`, as an integer.

        Raises:
            ValueError: If it isn't one.
        """
        text = self.value if key is None else self.options.get(key)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            what = "the value" if key is None else f"`{key}`"
            raise ValueError(f"strategy part `{self.text}`: {what} must be an integer, got {text!r}") from None


def parse(strategy: str) -> list[Part]:
    """Splits a strategy string into its parts.

    Raises:
        TypeError: If `strategy` isn't a string.
        ValueError: If a part is empty or an option has no value.
    """
    if not isinstance(strategy, str):
        raise TypeError(f"`strategy` must be a string such as 'int4', got {strategy!r}")
    return [_parse_part(text.strip(), strategy) for text in strategy.split("+")]


def _parse_part(text: str, strategy: str) -> Part:
    head, *pieces = text.split(",")
    name, colon, value = head.partition(":")
    if not name:
        raise ValueError(f"strategy `{strategy}` has an empty part; write parts joined by `+`, for example `int4`")
    options = {}
    for piece in pieces:
        key, equals, setting = piece.partition("=")
        if not equals or not key or not setting:
            raise ValueError(f"strategy part `{text}`: options are written key=value, got {piece!r}")
        options[key.strip()] = setting.strip()
    return Part(name.strip(), value.strip() if colon else None, options, text)


def split_list(text: str) -> list[str]:
    """Splits a comma-separated list of strategies; `key=value` pieces stay with the strategy before them."""
    strategies: list[str] = []
    for piece in text.split(","):
        before_equals = piece.partition("=")[0]
        if "=" in piece and strategies and "+" not in before_equals and ":" not in before_equals:
            strategies[-1] += f",{piece}"
        elif piece.strip():
            strategies.append(piece.strip())
    return strategies
