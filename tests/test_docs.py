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
from kvplus_eval.pages import fill_page
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


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.stem)
def test_pages_can_be_filled(page):
    text = page.read_text()
    assert re.search(r"<!-- rows: .+? -->", text)
    assert text.count(BEGIN) == text.count(END) == 1
