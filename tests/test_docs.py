"""Every snippet in the README and the pages runs: Python on a tiny model, commands as far as their options go."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import transformers
import typer.main
from typer.testing import CliRunner

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from hf_kvplus import available_strategies
from hf_kvplus.cli import build_app
from hf_kvplus.loading import load_config, load_model
from kvplus_eval import ablation, heldout, readme
from kvplus_eval.pages import fill_bench_page, fill_page
from kvplus_eval.readme import BEGIN, END
from kvplus_eval.results import read_rows
from test_model_card import ROWS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "choosing.md", *sorted((ROOT / "docs" / "strategies").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    with one_thread():
        yield load_model(str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))), "cpu")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_snippets_run(page, loaded, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model, tokenizer, _ = loaded
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    inputs = dict(tokenizer("w1 w2 w3 " * 30, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    snippets = blocks(page, "python")
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page.name, "exec"), {"model": model, "tokenizer": tokenizer, "inputs": inputs})


COMMAND = r"^(?: {4})?kvplus .*"
COMMAND_PAGES = [
    page for page in [PAGES[0], *sorted((ROOT / "docs").rglob("*.md"))] if re.search(COMMAND, page.read_text(), re.M)
]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_the_pages_give_them(page):
    group = typer.main.get_command(build_app())
    lines = re.findall(COMMAND, page.read_text().replace("\\\n", " "), flags=re.MULTILINE)
    # Lines with placeholders or remarks behind them aren't whole commands
    commands = [shlex.split(line, comments=True)[1:] for line in lines if not set("$[(") & set(line)]
    assert commands
    for name, *arguments in commands:
        group.commands[name].make_context(name, arguments)  # raises on an unknown option or a bad value


def test_every_strategy_has_a_page_that_says_what_it_does_costs_and_cannot():
    heads = {}
    for page in PAGES[2:]:
        text = page.read_text()
        for part in re.split(r"^#{1,2} (?=`)", text, flags=re.MULTILINE)[1:]:
            told = set(re.findall(r"^\*\*(What|When)\b", part, flags=re.MULTILINE))
            heads[part.splitlines()[0]] = told == {"What", "When"} and "can't do.**" in part and "cost" in part
    for info in available_strategies():
        name = "hf-..." if info.name.startswith("hf-") else info.name
        own = [head for head in heads if re.search(rf"`{re.escape(name)}[`:]", head)]
        assert own, f"no page for {info.name}"
        assert all(heads[head] for head in own), own


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """A folder with what the README's commands name: a model in the place of SmolLM2-135M, a text, an earlier run."""
    for package in ("matplotlib", "numba", "optimum.quanto"):
        pytest.importorskip(package)
    shapes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = save_tiny_checkpoint(tmp_path / "tiny", **shapes)
    write_words(tmp_path / "my.txt", 70_000)
    monkeypatch.chdir(tmp_path)
    return str(model)


# Smaller figures than those of the README, and what to add: enough to see that each command ends well.
SMALLER = {"16,2048,8192": "16,256,512", "100": "8"}
SMALLER_STILL = {
    "eval": ("--window-tokens", "512", "--timing-rounds", "1", "--greedy-tokens", "16"),
    "plan": ("--windows", "2", "--window-tokens", "512"),
    "calibrate-gqa": ("--windows", "2"),
    "convert-gqa": ("--windows", "2", "--heal-window-tokens", "128"),
    "bench": ("--tokens", "4", "--rounds", "1"),
}


def test_the_commands_of_the_readme_run_one_after_the_other(workshop):
    app, runner = build_app(), CliRunner()
    lines = [line for block in blocks(PAGES[0], "bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kvplus ")]
    assert len(commands) >= 12
    for name, *given in commands:
        # Memory is watched in processes of their own, which tests/eval does.
        arguments = [argument for argument in given if argument != "--peak-memory"]
        arguments = [SMALLER.get(argument, argument).replace("smollm2-135m", workshop) for argument in arguments]
        arguments += SMALLER_STILL.get(name, ()) if "--dry-run" not in arguments else ()
        if workshop not in arguments and name in ("generate", "eval", "bench"):
            arguments += ["--model", workshop]
        if name == "compare":
            shutil.copytree("runs/mine", "runs/before")
        result = runner.invoke(app, [name, *arguments], env={"COLUMNS": "160"})
        assert result.exit_code == 0, (name, arguments, result.output[-2000:])
    assert "kvplus: begin" in Path("README.md").read_text()
    assert load_config("converted").num_key_value_heads == 2


def test_pages_get_the_rows_of_their_strategies_and_the_yardstick():
    page = f"text\n<!-- rows: int4 -->\n{BEGIN}\n{END}\nafter"
    filled = fill_page(page, ROWS)
    assert "| `dynamic` |" in filled
    assert "| `int4` |" in filled
    assert filled.startswith("text\n")
    assert filled.endswith("\nafter")
    assert fill_page(page.replace("int4", "int2"), ROWS) == page.replace("int4", "int2")
    with pytest.raises(ValueError, match="must name its strategies"):
        fill_page("text", ROWS)


def test_a_page_of_times_gets_the_latest_run_that_has_all_its_strategies():
    page = f"<!-- bench rows: fp fp+offload:disk -->\n{BEGIN}\n{END}\n"
    model, device = {"name": "tiny", "attention": "sdpa"}, {"name": "slow", "threads": 2}

    def row(run: str, strategy: str, ms: float, **changes) -> dict:
        bench = {"context_tokens": 64, "fused": False, "decode_ms": [ms] * 3, "decode_ms_per_token": ms}
        bench |= {"cache_bytes": 2048, "disk_bytes": 4096}
        return {
            "run": run,
            "strategy": strategy,
            "status": "ok",
            "model": model,
            "device": device,
            "bench": bench | changes,
        }

    rows = [row("a", "fp", 50.0), row("a", "fp+offload:disk", 60.0)]
    rows += [
        row("b", "fp", 10.0),
        row("b", "fp+offload:disk", 15.0),
        row("b", "fp", 9.0, fused=True),
        row("c", "fp", 1.0),
    ]
    filled = fill_bench_page(page, rows)
    assert "| `fp` | 10.0 ms | – | 2.0 KiB | – |" in filled
    assert "| `fp+offload:disk` | 15.0 ms | 1.50 | 2.0 KiB | 4.0 KiB |" in filled
    assert "tiny at 64 tokens, sdpa attention, medians of 3 tokens in turns, slow with 2 threads" in filled
    assert fill_page(filled, ROWS) == filled
    assert fill_bench_page(page, rows[:1]) == page
    assert fill_bench_page("text", rows) == "text"


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.stem)
def test_pages_can_be_filled(page):
    text = page.read_text()
    assert re.search(r"<!-- (bench )?rows: .+? -->", text)
    assert text.count(BEGIN) == text.count(END) == 1


def test_tables_are_those_of_the_published_rows(tmp_path):
    results = ROOT / "eval" / "results" / "cpu"
    copy = tmp_path / "README.md"
    shutil.copy(PAGES[0], copy)
    files = [results / "results.jsonl", *sorted(results.glob("*/results.jsonl"))]
    readme.main([*map(str, files), str(copy)])
    assert copy.read_text() == PAGES[0].read_text()
    rows, timed = read_rows(results / "results.jsonl"), read_rows(results / "bench.jsonl")
    latest = [row for row in rows if row["run"] == rows[-1]["run"]]
    for page in PAGES[2:]:
        if page.stem != "gqa":  # its rows are in a file of their own
            assert fill_page(fill_bench_page(page.read_text(), timed), latest) == page.read_text(), page.stem
    for module in (ablation, heldout):
        name = module.__name__.rpartition(".")[2]
        own = read_rows(results / f"{name}.jsonl", module.SCHEMA)
        assert module.write_page(own) == (ROOT / "docs" / f"{name}.md").read_text(), name
