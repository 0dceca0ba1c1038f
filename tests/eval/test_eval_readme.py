"""The README's table is made of rows, between its markers and nowhere else."""

import json

import pytest

from kvplus_eval.readme import BEGIN, END, main, replace_section, results_section
from kvplus_eval.results import SCHEMA


def row(strategy, run="b", **changes):
    figures = {
        "stored_bits_per_element": 4.61,
        "packed_bits_per_element": 4.5,
        "share_of_full_cache": 0.144,
        "kl_mean_nats": 0.00503,
        "perplexity_change_percent": 0.41,
        "top1_agreement": 0.9712,
        "cache_bytes": 47185920,
    }
    return {
        "schema": SCHEMA,
        "run": run,
        "status": "ok",
        "strategy": strategy,
        "model": {"name": "smollm2-135m"},
        "text": {"name": "a.txt", "sha256": "0123456789abcdef"},
        "protocol": {"windows": 4, "window_tokens": 2048, "chunk_tokens": 64},
        "metrics": {**figures, **changes},
    }


def test_each_strategy_gets_a_line_with_its_figures():
    section = results_section([row("dynamic"), row("int4", kl_mean_nats=0.25)])
    assert "4 windows of 2048 tokens of a.txt" in section
    assert "0123456789ab`" in section
    line = next(line for line in section.splitlines() if line.startswith("| `int4`"))
    for figure in ("4.61", "4.5", "14.4", "0.25", "+0.41", "97.1"):
        assert figure in line


def test_only_the_latest_run_enters_and_the_rest_of_the_document_stays(tmp_path):
    results, readme = tmp_path / "results.jsonl", tmp_path / "README.md"
    rows = [row("old", run="a"), row("dynamic"), {**row("int4"), "status": "refused", "metrics": {}}]
    results.write_text("".join(json.dumps(item) + "\n" for item in rows))
    readme.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter \\1\n")
    main([str(results), str(readme)])
    first = readme.read_text()
    assert first.startswith(f"before\n{BEGIN}\n")
    assert first.endswith(f"\n{END}\nafter \\1\n")
    assert "dynamic" in first
    assert "stale" not in first
    assert "`old`" not in first
    assert "`int4`" not in first
    main([str(results), str(readme)])
    assert readme.read_text() == first


def test_several_models_get_a_table_each(tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in ("first", "second")]
    for file in files:
        file.write_text(json.dumps({**row("fp"), "model": {"name": file.stem}}) + "\n")
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    main([*map(str, files), str(readme)])
    text = readme.read_text()
    assert text.index("first, 4 windows") < text.index("second, 4 windows")
    assert text.count("| `fp` |") == 2


def test_models_that_were_compared_with_the_same_one_share_a_table(tmp_path):
    results, readme = tmp_path / "results.jsonl", tmp_path / "README.md"
    original = {"name": "original", "revision": "1"}

    def checkpoint(name, run, change, reference=original):
        figures = {"perplexity": 33.416, "perplexity_change_percent": change, "cache_bytes": 60 << 20}
        found = row("dynamic", run, share_of_full_cache=2 / 3, **figures)
        return {**found, "model": {"name": name}, "reference_model": reference}

    rows = [checkpoint("converted", "a", 99), checkpoint("healed", "b", 42), checkpoint("converted", "c", 116)]
    rows = [checkpoint("converted", "0", 7, reference=None), *rows]
    results.write_text("".join(json.dumps(item) + "\n" for item in rows))
    readme.write_text(f"{BEGIN}\n{END}\n")
    main([str(results), str(readme)])
    text = readme.read_text()
    assert text.splitlines()[1].startswith("Against the full cache of original, 4 windows")
    assert "full cache 90.0 MiB" in text
    lines = [line.split(" | ") for line in text.splitlines() if "| `dynamic` |" in line]
    assert [(cells[0], cells[6], cells[-1]) for cells in lines] == [
        ("| healed", "+42.00 %", "33.42 |"),
        ("| converted", "+116.00 %", "33.42 |"),
    ]
    with pytest.raises(ValueError, match="differ in `reference_model`"):
        results_section(rows)


def test_a_document_without_markers_and_rows_without_figures_are_refused():
    with pytest.raises(ValueError, match="must hold the markers"):
        replace_section("no markers", "table")
    with pytest.raises(ValueError, match="no row has figures"):
        results_section([{**row("int4"), "status": "failed"}])
