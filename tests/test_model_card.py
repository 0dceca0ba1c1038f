"""A card gets measured rows between markers, keeps everything else byte for byte, and is valid."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from conftest import tiny_llama_config
from hf_kvplus import model_card
from hf_kvplus.memory_commands import read_results
from hf_kvplus.model_card import BEGIN, END, YAML_BEGIN, YAML_END, MemoryReport, update_card

FIGURES = {
    "stored_bits_per_element": 32.0,
    "packed_bits_per_element": None,
    "cache_bytes": 94_371_840,
    "share_of_full_cache": 1.0,
    "perplexity": 24.5165,
    "perplexity_change_percent": 0.0,
    "kl_mean_nats": 0.0,
    "top1_agreement": 1.0,
    "decode_ms_per_token": 68.2,
}


def row(strategy: str, **changes) -> dict:
    shared = {
        "schema": "kvplus-eval/1",
        "kind": "eval",
        "run": "r",
        "date": "2026-11-29T16:00:00+00:00",
        "status": "ok",
        "curve": [[64, 100_000], [128, 200_000]],
        "model": {"name": "SmolLM2-135M", "revision": "abc", "dtype": "float32", "parameters": 134_515_008},
        "text": {"name": "wikitext-2-raw test", "sha256": "f" * 64},
        "protocol": {"windows": 4, "window_tokens": 2048, "chunk_tokens": 64},
        "versions": {"torch": "2.13.0", "triton": None},
        "device": {"type": "cpu", "name": "a CPU", "threads": 2},
    }
    return {**shared, "strategy": strategy, "metrics": {**FIGURES, **changes}}


ROWS = [row("dynamic"), row("int4", kl_mean_nats=0.0015, cache_bytes=14_000_000, stored_bits_per_element=4.9)]
OWN_INDEX = """model-index:
- name: mine
  results:
  - task: {type: text-generation}
    dataset: {name: d, type: d}
    metrics: [{type: accuracy, value: 0.5}]
"""
CARDS = {
    "empty": "",
    "text_only": "# A model\n\nwith text",
    "front_matter": "---\nlicense: mit   # a comment\ntags: [a,  b]\n---\n# A model\n\n| a |\n|--:|\n| 1 |\n",
    "own_index": f"---\nlicense: mit\n{OWN_INDEX}\nlanguage:\n- en\n---\n# A model\n",
    "indented_index": "---\nmodel-index:\n  - name: mine\n    results: []\n---\ntext\n",
    "fences": f"---\ntags: []\n---\n# A model\n\n```html\n{BEGIN}\n{END}\n```\n\n~~~\n```\n{BEGIN}\n~~~\nlast line",
    "windows_lines": "---\r\nlicense: mit\r\n---\r\n# A model\r\n\r\ntext\r\n",
    "empty_front_matter": "---\n---\ntext\n",
}


@pytest.fixture
def report() -> MemoryReport:
    return MemoryReport.from_rows(ROWS)


def without_ours(card: str) -> str:
    """Takes out what lies between the last pair of markers, and the results; apart from the code under test."""
    first = card.rindex(BEGIN)
    card = card[:first] + card[card.index(END, first) + len(END) :]
    lines = card.splitlines(keepends=True)
    begin, end = (next(i for i, line in enumerate(lines) if line.strip() == mark) for mark in (YAML_BEGIN, YAML_END))
    return "".join(lines[:begin] + lines[end + 1 :])


@pytest.mark.parametrize("name", list(CARDS))
def test_everything_else_stays_and_the_second_time_changes_nothing(name, report, tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(CARDS[name].encode())
    assert update_card(path, report)
    once = path.read_bytes()
    rest = without_ours(once.decode()).rstrip()
    assert rest in (CARDS[name].rstrip(), f"---\n---\n{CARDS[name]}".rstrip())
    pictures = {picture.name: picture.read_bytes() for picture in (tmp_path / "kvplus").iterdir()}
    assert len(pictures) == 2
    assert not update_card(path, report)
    assert path.read_bytes() == once
    assert pictures == {picture.name: picture.read_bytes() for picture in (tmp_path / "kvplus").iterdir()}


@pytest.mark.parametrize("name", list(CARDS))
def test_results_are_valid_metadata_beside_those_of_others(name, report, tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(CARDS[name].encode())
    update_card(path, report, pictures=False)
    data = ModelCard(path.read_bytes().decode()).data
    ours = {result.metric_name: result.metric_value for result in data.eval_results if result.metric_name}
    assert ours["Perplexity, cache dynamic"] == 24.5165
    assert ours["KL to the full cache, cache int4"] == 0.0015
    assert ours["Cache bytes, cache int4"] == 14_000_000
    assert all(result.dataset_args == {"sha256": "f" * 64} for result in data.eval_results if result.metric_name)
    if name == "own_index":
        assert [result.metric_value for result in data.eval_results if not result.metric_name] == [0.5]
        assert data.language == ["en"]


def test_new_rows_replace_old_ones_in_place(report, tmp_path):
    path = tmp_path / "README.md"
    path.write_text("---\nlicense: mit\n---\n# A model\n")
    update_card(path, report, pictures=False)
    path.write_text(path.read_text().replace(END, f"{END}\n\n# After"))
    assert update_card(path, MemoryReport.from_rows([row("int8")]), pictures=False)
    text = path.read_text()
    assert "`int8`" in text
    assert "int4" not in text
    assert text.endswith(f"{END}\n\n# After\n")


def test_estimates_are_marked_as_such(report):
    text = report.with_estimates(tiny_llama_config(), [8192]).render("markdown")
    assert "Estimated from the configuration, one row, not measured:" in text
    assert "| `dynamic` | 4.0 MiB |" in text
    assert "not measured" not in report.render("markdown")


def test_every_format_has_every_strategy(report):
    table = list(csv.DictReader(io.StringIO(report.render("csv"))))
    assert [line["strategy"] for line in table] == ["dynamic", "int4"]
    assert float(table[1]["kl_mean_nats"]) == 0.0015
    assert table[1]["text_sha256"] == "f" * 64
    assert table[1]["measured_on"] == "a CPU, 2 threads; torch 2.13.0"
    assert table[1]["date"].startswith("2026-11-29")
    facts = json.loads(report.render("json"))
    assert facts["measured"][1]["cache_bytes"] == 14_000_000
    assert facts["text"]["sha256"] == "f" * 64
    assert facts["measured"][1]["versions"]["torch"] == "2.13.0"
    latex = report.render("latex")
    assert "\\begin{tabular}{lrrrrrrr}" in latex
    assert "% What key/value caches of this model take and cost, measured with hf_kvplus on 2026-11-29" in latex
    assert "int4 & 4.9 &" in latex
    assert "stored bits per element (bits)" in latex
    with pytest.raises(ValueError, match="did you mean `markdown`"):
        report.render("markdwn")


def test_rows_of_several_machines_and_days_each_keep_their_own():
    later = {**ROWS[1], "date": "2026-12-24T00:00:00+00:00", "device": {"type": "cpu", "name": "other", "threads": 8}}
    made = MemoryReport.from_rows([*ROWS, later, {**later, "strategy": "int8"}])
    text = made.render("markdown")
    assert "`dynamic`: 2026-11-29, a CPU, 2 threads; torch 2.13.0. " in text
    assert "`int4`, `int8`: 2026-12-24, other, 8 threads; torch 2.13.0." in text
    assert "measured with hf_kvplus on 2026" not in text
    assert [one["device"]["threads"] for one in json.loads(made.render("json"))["measured"]] == [2, 8, 8]
    assert "int8: 2026-12-24" in made.render("latex").replace("`", "")
    table = list(csv.DictReader(io.StringIO(made.render("csv"))))
    assert [line["date"][:10] for line in table] == ["2026-11-29", "2026-12-24", "2026-12-24"]


def test_the_published_rows_make_a_valid_card(tmp_path):
    rows = read_results(Path(__file__).parent.parent / "eval/results/cpu/results.jsonl")
    made = MemoryReport.from_rows(rows)
    path = tmp_path / "README.md"
    own = CARDS["front_matter"] + "\n```python\nprint(1)\n```\n"
    path.write_text(own)
    assert update_card(path, made)
    once = path.read_bytes()
    assert not update_card(path, made)
    assert path.read_bytes() == once
    assert without_ours(once.decode()).rstrip() == own.rstrip()
    data = ModelCard.load(path, ignore_metadata_errors=False).data
    assert data.model_name == "smollm2-135m"
    found = {result.metric_name: result.metric_value for result in data.eval_results}
    last = {row["strategy"]: row["metrics"] for row in rows if row["run"] == rows[-1]["run"]}
    assert {"dynamic", "int8", "int4", "int2"} <= set(last)
    for strategy, figures in last.items():
        assert found[f"KL to the full cache, cache {strategy}"] == figures["kl_mean_nats"]
        assert found[f"Cache bytes, cache {strategy}"] == figures["cache_bytes"]


def test_the_latest_row_of_a_strategy_counts():
    made = MemoryReport.from_rows([*ROWS, row("int4", kl_mean_nats=0.5)])
    assert [one["kl_mean_nats"] for one in made.figures()] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no row has figures"),
        ([{**ROWS[0], "status": "failed"}], "no row has figures"),
        ([{**ROWS[0], "versions": {}}], "lacks versions"),
        ([{**ROWS[0], "text": {"name": "t", "sha256": ""}}], "lacks the text's SHA-256"),
        ([ROWS[0], {**ROWS[1], "protocol": {"windows": 1}}], "differ in `protocol`"),
    ],
)
def test_rows_that_nobody_could_repeat_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        MemoryReport.from_rows(rows)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (f"text\n{BEGIN}\n", "once each"),
        (f"{END}\n{BEGIN}\n", "once each"),
        ("---\nmodel-index: [{name: a, results: []}]\n---\n", "one entry below the other"),
        ("---\n- a list\n---\ntext\n", "should be a dict"),
        ("---\na: [1\n---\ntext\n", "isn't valid YAML"),
    ],
)
def test_a_card_that_cannot_be_edited_safely_stays_as_it_is(card, message, report, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(card)
    with pytest.raises(ValueError, match=message):
        update_card(path, report, pictures=False)
    assert path.read_text() == card


def test_only_a_readme_is_pushed(report, tmp_path):
    with pytest.raises(ValueError, match=r"must be called README\.md"):
        report.push(tmp_path / "card.md", "someone/model")


def test_a_card_is_pushed_with_its_pictures_and_nothing_else(report, tmp_path, monkeypatch):
    given = {}

    class Hub:
        def upload_folder(self, **options):
            given.update(options)
            return SimpleNamespace(commit_url="the commit")

    monkeypatch.setattr(model_card, "HfApi", Hub)
    path = tmp_path / "README.md"
    update_card(path, report)
    (tmp_path / "weights.bin").write_bytes(b"0")
    assert report.push(path, "someone/model") == "the commit"
    assert given["repo_id"] == "someone/model"
    assert given["folder_path"] == tmp_path
    files = [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()]
    uploaded = set(filter_repo_objects(files, allow_patterns=given["allow_patterns"]))
    assert uploaded == {"README.md", "kvplus/bytes-by-context.png", "kvplus/kl-by-bits.png"}
