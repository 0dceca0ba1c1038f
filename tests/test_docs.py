"""Every snippet in the README and the pages runs: Python on a tiny model, commands as far as their options go."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import transformers
import typer.main

from checkpoints import one_thread, save_tiny_checkpoint
from hf_kvplus.cli import build_app
from hf_kvplus.loading import load_model
from kvplus_eval.pages import fill_bench_page, fill_page
from kvplus_eval.readme import BEGIN, END
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


@pytest.mark.parametrize("page", [*PAGES[:2], ROOT / "docs" / "evaluation.md"], ids=lambda page: page.stem)
def test_commands_have_the_options_that_the_pages_give_them(page):
    group = typer.main.get_command(build_app())
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kvplus ")]
    assert commands
    for name, *arguments in commands:
        group.commands[name].make_context(name, arguments)  # raises on an unknown option or a bad value


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
