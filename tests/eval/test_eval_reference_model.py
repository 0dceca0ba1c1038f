"""A model measured against the full cache of another one, as a converted checkpoint is against its original."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from test_eval_resume import environment
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from checkpoints import WORDS, one_thread, save_tiny_checkpoint, write_words
from hf_kvplus.cli import build_app
from hf_kvplus.gqa.convert import convert_to_gqa
from hf_kvplus.loading import load_model
from hf_kvplus.report import require_comparable
from kvplus_eval import commands
from kvplus_eval.compare import Tolerances, compare_runs
from kvplus_eval.html.page import render_page
from kvplus_eval.reference_model import require_same_vocabulary, require_same_windows
from kvplus_eval.results import read_rows

WINDOWS, TOKENS = 2, 320
SMALL = ["--windows", str(WINDOWS), "--window-tokens", str(TOKENS), "--chunk-tokens", "32", "--decode-tokens", "2"]
QUICK = [*SMALL, "--timing-rounds", "0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with an original, what was made of it with half its heads, and a text."""
    folder = tmp_path_factory.mktemp("place")
    with one_thread():
        save_tiny_checkpoint(folder / "original")
        model, tokenizer, _ = load_model(folder / "original", "cpu")
        convert_to_gqa(model, 1, "mean").save_pretrained(folder / "converted")
        tokenizer.save_pretrained(folder / "converted")
        write_words(folder / "text.txt", WINDOWS * TOKENS)
        yield folder


def evaluate(place: Path, out: Path, model: str, *arguments: str, reference: str | None = "original"):
    against = [] if reference is None else ["--reference-model", str(place / reference)]
    options = ["--model", str(place / model), "--text", str(place / "text.txt"), "--device", "cpu", "--out", str(out)]
    return CliRunner().invoke(build_app(), ["eval", *options, *against, *arguments])


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    options = [
        "--timing-rounds",
        "1",
        "--greedy-tokens",
        "8",
        "--noise",
        "chunking",
        "--strategies",
        "dynamic,fp,int4",
    ]
    result = evaluate(place, out, "converted", *SMALL, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    return out, result.stdout, read_rows(out / "results.jsonl")


@pytest.fixture(scope="module")
def plain(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    result = evaluate(place, out, "converted", *QUICK, "--strategies", "dynamic,int4", reference=None)
    assert result.exit_code == 0, result.output
    return read_rows(out / "results.jsonl")


def in_one_pass(place: Path, model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and tokens of all windows, by a forward pass over each."""
    loaded, tokenizer, _ = load_model(place / model, "cpu")
    ids = torch.tensor(tokenizer((place / "text.txt").read_text())["input_ids"]).view(WINDOWS, TOKENS)
    with torch.no_grad():
        return loaded(ids).logits[:, :-1].double().log_softmax(-1), ids[:, 1:, None]


def test_figures_are_those_of_one_model_against_the_other(place, finished):
    theirs, targets = in_one_pass(place, "original")
    ours, _ = in_one_pass(place, "converted")
    figures = finished[2][0]["metrics"]
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert figures["kl_mean_nats"] == pytest.approx(divergence.mean().item(), rel=1e-4)
    assert figures["kl_mean_nats"] > 0.01
    agreement = (theirs.argmax(-1) == ours.argmax(-1)).double().mean().item()
    assert figures["top1_agreement"] == pytest.approx(agreement, abs=2 / divergence.numel())
    losses = [-found.gather(2, targets).mean().item() for found in (theirs, ours)]
    assert figures["perplexity"] == pytest.approx(math.exp(losses[1]), rel=1e-4)
    change = 100 * (math.exp(losses[1] - losses[0]) - 1)
    assert figures["perplexity_change_percent"] == pytest.approx(change, rel=1e-3)
    assert figures["share_of_full_cache"] == 0.5


def test_what_compares_a_model_with_itself_still_does(finished, plain):
    """The gate let `fp` pass, noise is far below the distance of the models, strategies add theirs to it."""
    dynamic, fp, int4 = (row["metrics"] for row in finished[2])
    assert fp["kl_mean_nats"] == pytest.approx(dynamic["kl_mean_nats"], rel=1e-4)
    assert 0 < dynamic["noise_chunking_nats"] < 1e-6
    assert int4["perplexity"] == pytest.approx(plain[1]["metrics"]["perplexity"])
    assert abs(int4["kl_mean_nats"] - dynamic["kl_mean_nats"]) > 1e-6
    # Greedy text is compared with the other model's, and these two part
    assert dynamic["greedy_tokens"] == 8
    assert dynamic["greedy_agreement_tokens"] < 8


def test_rows_tables_and_reports_name_the_reference(place, finished):
    out, printed, rows = finished
    for row in rows:
        assert row["reference_model"].keys() == row["model"].keys()
        assert row["reference_model"]["name"] == str(place / "original")
        assert row["reference_model"]["revision"] != row["model"]["revision"]
    words = f"against the full cache of {place / 'original'}"
    assert words in " ".join(printed.split())
    assert json.loads(printed.strip().splitlines()[-1])["reference_model"] == str(place / "original")
    assert "- Compared with: the full cache of " in (out / "report.md").read_text()
    page = (out / "report.html").read_text()
    assert "<dt>Compared with</dt>" in page
    # Here `dynamic` has a loss, and a place among the others in both drawings of the chart
    without = render_page([{**row, "reference_model": None} for row in rows])
    assert page.count('data-strategy="dynamic"') == without.count('data-strategy="dynamic"') + 2


def test_a_model_against_itself_is_as_without_a_reference(place, plain, tmp_path):
    result = evaluate(place, tmp_path, "converted", *QUICK, "--strategies", "dynamic,int4", reference="converted")
    assert result.exit_code == 0, result.output
    for row, expected in zip(read_rows(tmp_path / "results.jsonl"), plain, strict=True):
        assert row["metrics"] == expected["metrics"]
        assert expected["reference_model"] is None


def test_the_reference_on_disk_serves_every_run_and_the_original_itself(place, tmp_path):
    alone = evaluate(place, tmp_path, "original", *QUICK, "--strategies", "dynamic", reference=None)
    assert f"(0 of {WINDOWS} windows reused" in alone.stdout
    against = evaluate(place, tmp_path, "converted", *QUICK, "--strategies", "dynamic")
    assert f"({WINDOWS} of {WINDOWS} windows reused" in against.stdout
    other = evaluate(place, tmp_path, "converted", *QUICK, "--strategies", "dynamic", "--chunk-tokens", "40")
    assert f"(0 of {WINDOWS} windows reused" in other.stdout


def test_a_finished_run_is_shown_again_only_for_the_same_reference(place, tmp_path):
    options = [*QUICK, "--strategies", "dynamic", "--reuse"]
    for reference, count in (("original", 1), ("original", 1), (None, 2), ("converted", 3), ("original", 3)):
        assert evaluate(place, tmp_path, "converted", *options, reference=reference).exit_code == 0
        assert len(read_rows(tmp_path / "results.jsonl")) == count


def test_runs_against_different_models_dont_mix(finished, plain):
    rows = finished[2]
    with pytest.raises(ValueError, match="differ in `reference_model`"):
        require_comparable([rows[0], plain[0]])
    with pytest.raises(ValueError, match=r"differ in reference_model\.name"):
        compare_runs(rows, plain, Tolerances())
    older = [{key: value for key, value in row.items() if key != "reference_model"} for row in plain]
    require_comparable([plain[0], older[1]])
    assert compare_runs(older, plain, Tolerances())


def test_other_tokenizers_are_refused_before_anything_is_computed(place, tmp_path):
    words = {word: number for number, word in enumerate((*WORDS[:-2], WORDS[-1], WORDS[-2]))}
    shutil.copytree(place / "converted", tmp_path / "other")
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "other")
    result = evaluate(place, tmp_path / "out", str(tmp_path / "other"), *QUICK, "--strategies", "dynamic")
    assert result.exit_code == 2
    assert "their vocabularies differ in 4 entries; choose a reference with the same tokenizer" in result.stderr
    assert not (tmp_path / "out").exists()


def test_equal_vocabularies_that_cut_otherwise_or_longer_logits_are_refused(place):
    model, tokenizer, _ = load_model(place / "original", "cpu")
    names, same, windows, other = ("a", "b"), (tokenizer, tokenizer), [torch.arange(4)], [torch.arange(1, 5)]
    require_same_vocabulary(names, same, (model.config, model.config))
    require_same_windows(names, (windows, windows))
    with pytest.raises(
        ValueError, match="`reference_model` a can't be compared with b: their tokenizers cut this text"
    ):
        require_same_windows(names, (windows, other))
    wider = type(model.config).from_dict({**model.config.to_dict(), "vocab_size": 80})
    with pytest.raises(ValueError, match="they predict over 64 and 80 tokens"):
        require_same_vocabulary(names, same, (model.config, wider))


def test_a_cache_that_moves_nothing_is_refused_against_another_model_too(place, tmp_path):
    """Its KL to the other model is large; the guard looks at that to the model's own full cache."""
    (tmp_path / "cheat.py").write_text(
        "from transformers import DynamicCache\n\n\ndef make_cache(config, max_length):\n"
        "    return DynamicCache(config=config)\n"
    )
    adapter = f"adapter:{tmp_path / 'cheat.py'},bits=15"
    result = evaluate(place, tmp_path, "converted", *QUICK, "--strategies", f"dynamic,{adapter}")
    assert result.exit_code == 1
    good, refused = read_rows(tmp_path / "results.jsonl")
    assert (good["status"], refused["status"]) == ("ok", "refused")


def test_no_two_models_are_held_at_a_time(place, tmp_path, monkeypatch):
    loaded: list[weakref.ref] = []

    def load(*arguments):
        assert all(model() is None for model in loaded)
        found = load_model(*arguments)
        loaded.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(commands, "load_model", load)
    assert evaluate(place, tmp_path, "converted", *QUICK, "--strategies", "dynamic").exit_code == 0
    assert len(loaded) == 2


def test_two_processes_find_what_one_finds(place, finished, tmp_path):
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += [
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        str(port),
        "-m",
        "kvplus_eval",
    ]
    options = ["--model", str(place / "converted"), "--reference-model", str(place / "original"), "--device", "cpu"]
    options += ["--text", str(place / "text.txt"), "--out", str(tmp_path), *QUICK, "--strategies", "dynamic,int4"]
    done = subprocess.run(
        [*launch, "eval", *options], capture_output=True, text=True, env=environment(), timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for row, alone in zip(read_rows(tmp_path / "results.jsonl"), (finished[2][0], finished[2][2]), strict=True):
        assert row["device"]["processes"] == 2
        assert row["reference_model"] == alone["reference_model"]
        for figure in ("kl_mean_nats", "perplexity", "perplexity_change_percent", "top1_agreement", "cache_bytes"):
            assert row["metrics"][figure] == pytest.approx(alone["metrics"][figure], rel=1e-6)


def test_a_plan_counts_the_reference_models_own_cost(place, tmp_path):
    model, _, _ = load_model(place / "original", "cpu")
    wide = type(model.config).from_dict({**model.config.to_dict(), "intermediate_size": 9600})
    LlamaForCausalLM(wide).save_pretrained(tmp_path / "wide")
    plans = []
    for reference in (None, str(tmp_path / "wide")):
        result = evaluate(
            place, tmp_path, "converted", *QUICK, "--strategies", "dynamic", "--dry-run", reference=reference
        )
        assert result.exit_code == 0, result.output
        plans.append(json.loads(result.stdout.strip().splitlines()[-1]))
    assert plans[1]["weight_bytes"] > 5 * plans[0]["weight_bytes"]
    costs = [{name: seconds for name, _, seconds in plan["parts"]} for plan in plans]
    assert costs[1]["reference"] / costs[1]["quality"] > 2 * costs[0]["reference"] / costs[0]["quality"]
