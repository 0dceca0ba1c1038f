"""The text that is evaluated: a file, a data set by name, or what every Python carries; always named by its SHA-256.

Without a choice, the text is wikitext-2 where the hub answers and CPython's own help topics elsewhere; the command
says which, and numbers from different texts never meet in one table. Left out: shuffling, packing and padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hf_kvplus.loading import HUB_ANSWERS, hub_status

DEFAULT_DATASET = "wikitext-2-raw"
TOPICS = "pydoc-topics"
LEAST_CHARACTERS = 1_000_000
DATASET_ALIASES = {
    DEFAULT_DATASET: ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "wikitext-103-raw": ("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
    "pg19": ("emozilla/pg19", "default", "test"),
    "c4": ("allenai/c4", "en", "validation"),
}
# Too large to be fetched whole: documents are read one by one until there is enough text
STREAMED = ("pg19", "c4")
STREAM_PREFIX = "stream:"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".json")


@dataclass(frozen=True)
class EvalText:
    """A text and where it came from.

    Args:
        name: File name, data set, or `pydoc-topics`.
        text: The text, with line ends as newlines.
        file_sha256: SHA-256 of the file's bytes, None where it wasn't a file.
    """

    name: str
    text: str
    file_sha256: str | None = None

    @property
    def sha256(self) -> str:
        """Names the text as it is tokenized: decoded, line ends made newlines, encoded as UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def facts(self) -> dict[str, str | int | None]:
        """Returns what a result row says of the text."""
        characters = len(self.text)
        return {"name": self.name, "sha256": self.sha256, "file_sha256": self.file_sha256, "characters": characters}

    def describe(self) -> str:
        """Says which text this is: by the digest that `sha256sum` prints, and that of the text where it differs."""
        if self.file_sha256 is None:
            return f"text: {self.name}, SHA-256 {self.sha256} of {len(self.text)} characters"
        also = "" if self.file_sha256 == self.sha256 else f"; of its text with newlines as line ends {self.sha256}"
        return f"text: {self.name}, SHA-256 of the file {self.file_sha256}{also}"


def load_text(choice: str | None, least_characters: int = LEAST_CHARACTERS) -> EvalText:
    """Finds the text to evaluate.

    Args:
        choice: Path of a text or `.jsonl` file (its `text` fields), a data set as `name`, `name:config` or
            `name:config:split`, `pydoc-topics`, or None for the default. `stream:` before a data set reads only its
            first documents, as is always done of `pg19` and `c4`.
        least_characters: How much of a streamed data set is enough; whole documents are taken.

    Returns:
        The text, not empty.

    Raises:
        FileNotFoundError: If a file is missing or a data set can't be had.
        ValueError: If the text is empty or isn't text.
        ImportError: If a data set is asked for and `datasets` isn't installed.
    """
    if choice is None:
        repo_id = DATASET_ALIASES[DEFAULT_DATASET][0]
        choice = DEFAULT_DATASET if hub_status(repo_id, "dataset") == "answers" else TOPICS
    path = Path(choice).expanduser()
    if path.exists() or path.suffix in TEXT_SUFFIXES:
        found = _read_file(path)
    elif choice == TOPICS:
        found = _python_topics()
    else:
        found = _read_dataset(choice, least_characters)
    if not found.text.strip():
        raise ValueError(f"text `{choice}` is empty; give a file or data set with at least one window of text")
    return found


def cut_windows(
    text: EvalText, tokenizer: PreTrainedTokenizerBase, *, windows: int, window_tokens: int
) -> list[torch.Tensor]:
    """Tokenizes the text once and cuts windows from its beginning.

    Each window starts with the begin-of-text token where the tokenizer sets one itself, since such models are
    lost without it; it counts as one of the window's tokens.

    Args:
        text: The text.
        tokenizer: The model's tokenizer.
        windows: How many windows.
        window_tokens: Tokens in a window.

    Returns:
        `windows` tensors of token ids, shape (window_tokens,), int64.

    Raises:
        ValueError: If the text is too short; the message says how many windows it has.
    """
    prefix = _bos(tokenizer)
    body_tokens = window_tokens - len(prefix)
    # The limit that a tokenizer warns about is the model's context, which windows respect
    token_ids = tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    whole = len(token_ids) // body_tokens
    if whole == 0:
        raise ValueError(
            f"text `{text.name}` has {len(token_ids)} tokens, shorter than one window of {window_tokens}; "
            f"use a longer text or --window-tokens {len(token_ids) + len(prefix)} or less"
        )
    if whole < windows:
        raise ValueError(f"text `{text.name}` has {whole} windows of {window_tokens} tokens, {windows} were asked for")
    return [
        torch.tensor(prefix + token_ids[start : start + body_tokens])
        for start in range(0, windows * body_tokens, body_tokens)
    ]


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the begin-of-text token as a list of one id where the tokenizer adds it on its own, else no id."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


def _read_file(path: Path) -> EvalText:
    """Reads a UTF-8 file, or the `text` fields of a JSON-lines file."""
    if not path.is_file():
        raise FileNotFoundError(f"text `{path}`: no such file")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"text `{path}` isn't UTF-8 text: {error.reason} at byte {error.start}") from error
    if path.suffix == ".jsonl":
        # Strings in JSON may hold other line ends as they are, of Unicode
        lines = enumerate(text.split("\n"), 1)
        text = "\n\n".join(_json_text(path, number, line) for number, line in lines if line.strip())
    return EvalText(path.name, text, hashlib.sha256(content).hexdigest())


def _json_text(path: Path, number: int, line: str) -> str:
    """Returns the `text` field of one JSON line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"text `{path}`, line {number}: not JSON ({error.msg})") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f"text `{path}`, line {number}: an object with a string field `text` is expected")
    return record["text"]


def _python_topics() -> EvalText:
    """Joins the help topics that come with CPython: prose on programming, present on every machine."""
    from pydoc_data.topics import topics

    return EvalText(TOPICS, "\n\n".join(topics[name] for name in sorted(topics)))


def _read_dataset(choice: str, least_characters: int) -> EvalText:
    """Reads the `text` column of a data set from the hub or its local cache."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ImportError(f'text `{choice}` is a data set and needs: pip install "hf_kvplus[eval]"') from error
    name = choice.removeprefix(STREAM_PREFIX)
    streamed = name in STREAMED or choice != name
    repo_id, *rest = DATASET_ALIASES.get(name, name.split(":"))
    config_name = rest[0] if rest else None
    split = rest[1] if len(rest) > 1 else "test"
    status = hub_status(repo_id, "dataset")
    missing = (
        f"text `{choice}`: no such file, and as a data set the hub {HUB_ANSWERS.get(status, 'lacks it')}; "
        f"give a file, or `{TOPICS}`, which needs no network"
    )
    if status in ("absent", "denied"):
        raise FileNotFoundError(missing)
    try:
        # Without a hub this still finds what an earlier run left in the local cache
        rows = datasets.load_dataset(repo_id, config_name, split=split, streaming=streamed)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(missing) from error
    if rows.column_names is not None and "text" not in rows.column_names:
        raise ValueError(f"text `{choice}`: the data set has no column `text`, only {', '.join(rows.column_names)}")
    full_name = f"{repo_id}:{config_name}:{split}"
    if not streamed:
        return EvalText(full_name, "\n\n".join(rows["text"]))
    documents = take_documents((row["text"] for row in rows), least_characters)
    return EvalText(f"{full_name} (first {len(documents)} documents)", "\n\n".join(documents))


def take_documents(documents: Iterable[str], least_characters: int) -> list[str]:
    """Returns the first documents that together have at least so many characters, or all of them."""
    taken, characters = [], 0
    for document in documents:
        taken.append(document)
        characters += len(document)
        if characters >= least_characters:
            break
    return taken
