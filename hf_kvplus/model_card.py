"""A memory section for a model card, from measured rows: a table, two pictures, and results in the card's metadata.

The section stands between two markers in the text, the results between two comments in the front matter. Everything
else of a card stays as it is, byte for byte, and writing twice changes nothing. huggingface_hub makes the results and
checks the card. Left out: rows without a text hash, versions, device and date, which nobody could repeat.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import yaml_dump
from transformers import PretrainedConfig

from hf_kvplus.estimate import estimate_memory
from hf_kvplus.plots import plot_bytes, plot_loss
from hf_kvplus.registry import Registry
from hf_kvplus.report import BYTES_PICTURE, LOSS_PICTURE, markdown_table, require_comparable
from hf_kvplus.units import format_bytes, format_count, format_number, format_percent

Row = Mapping[str, Any]

BEGIN, END = "<!-- kvplus: begin -->", "<!-- kvplus: end -->"
YAML_BEGIN, YAML_END = "# kvplus: begin", "# kvplus: end"
PICTURES = "kvplus"
# What tells how to repeat a row; the first three may differ between the rows of a report, the others never do.
OF_A_ROW, SHARED = ("date", "device", "versions"), ("text", "model", "protocol")
PROVENANCE = OF_A_ROW + SHARED
CARD_NAME = "README.md"
TITLE = "## Cache memory"

COLUMNS = {
    "strategy": "",
    "stored_bits_per_element": "bits",
    "cache_bytes": "bytes",
    "share_of_full_cache": "",
    "perplexity": "",
    "kl_mean_nats": "nats",
    "top1_agreement": "",
    "decode_ms_per_token": "ms",
}
# Figure -> name in the metadata; these say something of the model with the cache, not of the machine.
RESULT_METRICS = {"perplexity": "Perplexity", "kl_mean_nats": "KL to the full cache", "cache_bytes": "Cache bytes"}

FORMATS: Registry[Callable[[MemoryReport], str]] = Registry("report format")


@dataclass(frozen=True)
class MemoryReport:
    """Measured rows of one evaluation, ready to be written somewhere.

    Args:
        rows: One row a strategy, all with figures.
        estimates: Rows (strategy, tokens, bytes) that were computed and not measured.
    """

    rows: tuple[Row, ...]
    estimates: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> MemoryReport:
        """Takes the latest row of each strategy; rows without figures are left out.

        Raises:
            ValueError: If no row has figures, one lacks what is needed to repeat it, or they belong to different
                evaluations.
        """
        latest: dict[str, Row] = {}
        for row in rows:
            if row["status"] == "ok":
                lacking = [key for key in PROVENANCE if not row.get(key)]
                if lacking or not row["text"].get("sha256"):
                    what = ", ".join(lacking) or "the text's SHA-256"
                    raise ValueError(f"row of `{row['strategy']}` lacks {what}, so it can't be reported as measured")
                latest.pop(row["strategy"], None)
                latest[row["strategy"]] = row
        if not latest:
            raise ValueError("no row has figures; run `kvplus eval` first")
        require_comparable(list(latest.values()))
        return cls(tuple(latest.values()))

    def with_estimates(self, config: PretrainedConfig, context_lengths: Sequence[int]) -> MemoryReport:
        """Adds what the same strategies would take at other lengths, marked as estimated."""
        dtype = self.rows[0]["model"]["dtype"]
        sizes = [
            (row["strategy"], length, estimate_memory(config, length, 1, row["strategy"], dtype).cache_bytes)
            for row in self.rows
            for length in context_lengths
        ]
        return replace(self, estimates=tuple(sizes))

    def figures(self) -> list[dict[str, Any]]:
        """Returns the table's figures as plain values, a dictionary a strategy."""
        return [
            {name: row["strategy"] if name == "strategy" else row["metrics"].get(name) for name in COLUMNS}
            for row in self.rows
        ]

    def render(self, output_format: str = "markdown") -> str:
        """Returns the report in one of `FORMATS`.

        Raises:
            ValueError: If there is no such format.
        """
        return FORMATS.get(output_format)(self)

    def eval_results(self) -> list[EvalResult]:
        """Returns the figures that belong into a card's `model-index`."""
        text = self.rows[0]["text"]
        results = []
        for row in self.rows:
            for figure, name in RESULT_METRICS.items():
                if row["metrics"].get(figure) is None:
                    continue
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=re.sub(r"[^a-z0-9]+", "-", text["name"].lower()).strip("-"),
                        dataset_name=text["name"],
                        dataset_args={"sha256": text["sha256"]},
                        metric_type=figure,
                        metric_name=f"{name}, cache {row['strategy']}",
                        metric_value=row["metrics"][figure],
                    )
                )
        return results

    def push(self, card: Path, repo_id: str) -> str:
        """Uploads a card and its pictures with huggingface_hub's own login.

        Args:
            card: The card's file; it must be called README.md.
            repo_id: The model's repository.

        Returns:
            The address of the commit.

        Raises:
            ValueError: If the file has another name.
        """
        if card.name != CARD_NAME:
            raise ValueError(f"`model_card` must be called {CARD_NAME} to be uploaded, got {card.name}")
        commit = HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=card.parent,
            allow_patterns=[CARD_NAME, f"{PICTURES}/{BYTES_PICTURE}", f"{PICTURES}/{LOSS_PICTURE}"],
            commit_message="Add measured cache memory",
        )
        return str(commit.commit_url)


@FORMATS.register("markdown")
def markdown(report: MemoryReport) -> str:
    """Writes head and tables."""
    return f"{_head(report.rows)}\n\n{_table(report)}\n{_estimates(report)}"


@FORMATS.register("json")
def as_json(report: MemoryReport) -> str:
    """Writes figures with all that is needed to repeat them."""
    facts = {key: report.rows[0].get(key) for key in (*SHARED, "reference_model")}
    pairs = zip(report.figures(), report.rows, strict=True)
    measured = [figures | {key: row[key] for key in OF_A_ROW} for figures, row in pairs]
    estimates = [dict(zip(("strategy", "tokens", "cache_bytes"), one, strict=True)) for one in report.estimates]
    return json.dumps({**facts, "measured": measured, "estimated": estimates}, indent=2) + "\n"


@FORMATS.register("csv")
def as_csv(report: MemoryReport) -> str:
    """Writes the measured figures, and in each line what is needed to repeat it."""
    lines = [figures | _origin(row) for figures, row in zip(report.figures(), report.rows, strict=True)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


@FORMATS.register("latex")
def latex(report: MemoryReport) -> str:
    """Writes a table for the booktabs package, below comments that tell what was measured."""
    head = [f"{name.replace('_', ' ')}{f' ({unit})' if unit else ''}" for name, unit in COLUMNS.items()]
    said = _head(report.rows).removeprefix(f"{TITLE}\n\n").splitlines()
    lines = [
        *(f"% {line}".rstrip() for line in said),
        "\\begin{tabular}{l" + "r" * (len(COLUMNS) - 1) + "}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]
    for figures in report.figures():
        cells = [value if isinstance(value, str) else format_number(value) for value in figures.values()]
        lines.append(f"{' & '.join(cell.replace('_', chr(92) + '_').replace('–', '--') for cell in cells)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _head(rows: Sequence[Row]) -> str:
    """Writes what was measured, on what, when; of rows that differ in that, which was measured where."""
    model, text, protocol = (rows[0][key] for key in ("model", "text", "protocol"))
    other = rows[0].get("reference_model")
    against = f"; compared with the full cache of {other['name']}, revision {other['revision']}" if other else ""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        places.setdefault((row["date"][:10], _machine(row)), []).append(f"`{row['strategy']}`")
    (date, machine), *more = places
    where = f" {machine}."
    if more:
        date = f"{len(places)} occasions"
        where = "".join(f" {', '.join(names)}: {day}, {found}." for (day, found), names in places.items())
    return (
        f"{TITLE}\n\n"
        f"What key/value caches of this model take and cost, measured with hf_kvplus on {date}: "
        f"{model['name']}, revision {model['revision']}, {model['dtype']}; "
        f"{format_count(protocol['windows'], 'window')} of {protocol['window_tokens']} tokens of {text['name']} "
        f"(SHA-256 `{text['sha256']}`), fed in chunks of "
        f"{protocol['chunk_tokens']} through the cache{against}.{where}"
    )


def _machine(row: Row) -> str:
    """Writes what a row was measured on, and with what."""
    device = row["device"]
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    return f"{device['name']}, {device['threads']} threads; {versions}"


def _origin(row: Row) -> dict[str, Any]:
    """Returns what is needed to repeat a row, as plain values."""
    model, text, protocol = row["model"], row["text"], row["protocol"]
    return {
        "model": model["name"],
        "revision": model["revision"],
        "dtype": model["dtype"],
        "text": text["name"],
        "text_sha256": text["sha256"],
        "windows": protocol["windows"],
        "window_tokens": protocol["window_tokens"],
        "chunk_tokens": protocol["chunk_tokens"],
        "date": row["date"],
        "measured_on": _machine(row),
    }


def _table(report: MemoryReport) -> str:
    """Writes the measured table."""
    head = ("cache", "stored bits", "bytes", "of full", "perplexity", "KL to full", "same top token", "a token")
    return markdown_table(head, [_cells(figures) for figures in report.figures()])


def _cells(figures: Mapping[str, Any]) -> list[str]:
    """Writes one line of the table."""
    share, agreement = figures["share_of_full_cache"], figures["top1_agreement"]
    milliseconds = figures["decode_ms_per_token"]
    return [
        f"`{figures['strategy']}`",
        format_number(figures["stored_bits_per_element"]),
        format_bytes(figures["cache_bytes"]),
        format_percent(None if share is None else 100 * share),
        format_number(figures["perplexity"], digits=5),
        format_number(figures["kl_mean_nats"]),
        format_percent(None if agreement is None else 100 * agreement),
        format_number(milliseconds) + ("" if milliseconds is None else " ms"),
    ]


def _estimates(report: MemoryReport) -> str:
    """Writes the computed table, or nothing."""
    if not report.estimates:
        return ""
    lengths = sorted({length for _, length, _ in report.estimates})
    names = list(dict.fromkeys(name for name, *_ in report.estimates))
    sizes = {(name, length): size for name, length, size in report.estimates}
    body = [[f"`{name}`", *(format_bytes(sizes[name, length]) for length in lengths)] for name in names]
    table = markdown_table(("cache", *(f"{length} tokens" for length in lengths)), body)
    return f"\nEstimated from the configuration, one row, not measured:\n\n{table}\n"


def update_card(path: Path, report: MemoryReport, *, pictures: bool = True) -> bool:
    """Writes the section and the results into a model card, which is made if there is none.

    Args:
        path: The card.
        report: What is written.
        pictures: Whether two pictures are drawn beside the card, in a folder `kvplus`.

    Returns:
        Whether the card has changed.

    Raises:
        ValueError: If the card isn't valid, has one marker without the other, or a `model-index` on one line.
    """
    before = path.read_bytes().decode("utf-8") if path.exists() else ""
    newline = "\r\n" if "\r\n" in before else "\n"
    section = report.render("markdown")
    if pictures:
        section += (
            f"\n![Cache bytes against context length]({PICTURES}/{BYTES_PICTURE})\n"
            f"![KL divergence against stored bits]({PICTURES}/{LOSS_PICTURE})\n"
        )
    if before.lstrip().startswith("---"):
        _check(before)
    index = yaml_dump(eval_results_to_model_index(report.rows[0]["model"]["name"], report.eval_results()))
    card = _put_results(before, index, newline)
    card = _put_section(card, f"{BEGIN}\n{section}{END}\n".replace("\n", newline), newline)
    _check(card)
    if pictures:
        folder = path.parent / PICTURES
        folder.mkdir(parents=True, exist_ok=True)
        plot_bytes(report.rows, folder / BYTES_PICTURE)
        plot_loss(report.rows, folder / LOSS_PICTURE)
    if card == before:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(card.encode("utf-8"))
    return True


def _check(card: str) -> None:
    """Has huggingface_hub read the metadata.

    Raises:
        ValueError: If it isn't valid.
    """
    try:
        ModelCard(card)
    except yaml.YAMLError as error:
        raise ValueError(f"the card's front matter isn't valid YAML: {error}") from error


def _put_section(card: str, section: str, newline: str) -> str:
    """Replaces the section of a card, or appends it."""
    lines = card.splitlines(keepends=True)
    places = _marker_lines(lines, BEGIN, END, fenced=True)
    if places is None:
        gap = "" if not card or card.endswith(2 * newline) else newline if card.endswith("\n") else 2 * newline
        return f"{card}{gap}{section}"
    first, last = places
    ended = lines[last].endswith("\n")
    return "".join(lines[:first]) + (section if ended else section.rstrip()) + "".join(lines[last + 1 :])


def _put_results(card: str, index: str, newline: str) -> str:
    """Puts results into the front matter: a `model-index` of its own, or an entry of the one that is there."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?\n|)---[ \t]*(\r?\n|$)", card, flags=re.DOTALL)
    if match is None:
        block = f"---\n{YAML_BEGIN}\nmodel-index:\n{index}{YAML_END}\n---\n"
        return block.replace("\n", newline) + card
    lines = match[1].splitlines(keepends=True)
    places = _marker_lines(lines, YAML_BEGIN, YAML_END)
    others = lines[: places[0]] + lines[places[1] + 1 :] if places else lines
    heads = [number for number, line in enumerate(others) if line.startswith("model-index:")]
    if heads:
        end, indent = _index_end(others, heads[0])
        block = [f"{indent}{line}" for line in (YAML_BEGIN, *index.splitlines(), YAML_END)]
    else:
        end, block = len(others), [YAML_BEGIN, "model-index:", *index.splitlines(), YAML_END]
    at = places[0] if places else end
    front = others[:at] + [line + newline for line in block] + others[at:]
    return card[: match.start(1)] + "".join(front) + card[match.end(1) :]


def _index_end(lines: list[str], head: int) -> tuple[int, str]:
    """Returns where the entries of a `model-index` end, and their indentation.

    Raises:
        ValueError: If they aren't written one below the other.
    """
    entry = re.compile(r"[ \t]+\S|-(\s|$)")
    numbers = []
    for number in range(head + 1, len(lines)):
        if entry.match(lines[number]):
            numbers.append(number)
        elif lines[number].strip() and not lines[number].startswith("#"):
            break
    if not numbers or not lines[numbers[0]].lstrip().startswith("-"):
        raise ValueError("the card's `model-index` must be a list with one entry below the other; rewrite it so")
    first = lines[numbers[0]]
    return numbers[-1] + 1, first[: len(first) - len(first.lstrip())]


def _marker_lines(lines: list[str], begin: str, end: str, *, fenced: bool = False) -> tuple[int, int] | None:
    """Finds the lines of two markers; those in fenced code blocks don't count.

    Raises:
        ValueError: If one stands without the other.
    """
    found: dict[str, list[int]] = {begin: [], end: []}
    fence = ""
    for number, line in enumerate(lines):
        text = line.strip()
        opening = re.match(r"(`{3,}|~{3,})", text) if fenced else None
        if opening and not fence:
            fence = opening[1]
        elif fence and text.startswith(fence) and not text.strip(fence[0]):
            fence = ""
        elif not fence and text in found:
            found[text].append(number)
    counts = len(found[begin]), len(found[end])
    if counts == (0, 0):
        return None
    if counts != (1, 1) or found[begin][0] > found[end][0]:
        raise ValueError(
            f"the card must hold `{begin}` and `{end}` once each, in this order; remove what is left over"
        )
    return found[begin][0], found[end][0]
