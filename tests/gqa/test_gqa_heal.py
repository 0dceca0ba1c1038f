"""Healing: the divergence falls, a stopped run goes on as if it hadn't been, and the command does it all."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from planted import windows
from test_gqa_convert import build
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from hf_kvplus import GQAProjection, convert_to_gqa
from hf_kvplus.cli import build_app
from hf_kvplus.gqa.heal import CURVE_FILE, STATE_FOLDER, Healing, heal, plot_curve, steps_done


def curve(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / CURVE_FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def pair():
    model = build("llama", vocab_size=128)
    return model, convert_to_gqa(model, 2, "mean", windows())


def student(pair):
    copied = type(pair[1])(pair[1].config).eval()
    copied.load_state_dict(pair[1].state_dict())
    return copied


def test_the_divergence_falls_and_only_attention_is_trained(pair, tmp_path):
    learner = student(pair)
    before = {name: weight.clone() for name, weight in learner.state_dict().items()}
    seen = []
    healing = Healing(steps=25, batch_size=2, learning_rate=3e-3, warmup_steps=3)
    heal(learner, pair[0], windows(12, 32), healing, tmp_path, advance=lambda step, loss: seen.append((step, loss)))
    rows = curve(tmp_path)
    assert [(row["step"], row["kl_nats"]) for row in rows] == seen
    assert [row["step"] for row in rows] == list(range(1, 26))
    assert sum(loss for _, loss in seen[-5:]) < 0.6 * sum(loss for _, loss in seen[:5])
    changed = {name for name, weight in learner.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed
    assert all("self_attn" in name for name in changed)
    assert not learner.training
    assert plot_curve(tmp_path).stat().st_size > 1000


def test_a_stopped_run_goes_on_as_if_it_had_not_been(pair, tmp_path):
    healing = Healing(steps=9, learning_rate=1e-3, warmup_steps=2, checkpoint_steps=4)
    whole = heal(student(pair), pair[0], windows(5, 32), healing, tmp_path / "whole")
    heal(student(pair), pair[0], windows(5, 32), healing, tmp_path / "parts", stop_after=6)
    # As after a crash: steps beyond the checkpoint are in the curve, and run again.
    with open(tmp_path / "parts" / CURVE_FILE, "a") as file:
        file.write(json.dumps({"step": 7, "kl_nats": 99.0}) + "\n")
    parts = heal(student(pair), pair[0], windows(5, 32), healing, tmp_path / "parts")
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert [row["step"] for row in curve(tmp_path / "parts")] == list(range(1, 10))
    assert curve(tmp_path / "parts")[-1]["kl_nats"] == pytest.approx(
        curve(tmp_path / "whole")[-1]["kl_nats"], rel=1e-4
    )


def test_a_run_that_ended_while_a_checkpoint_was_put_in_place_goes_on_from_it(pair, tmp_path):
    healing = Healing(steps=4, warmup_steps=2)
    heal(student(pair), pair[0], windows(5, 32), healing, tmp_path, stop_after=2)
    # The one before is out of the way, the new one not yet in its place.
    (tmp_path / STATE_FOLDER).rename(tmp_path / f"{STATE_FOLDER}.new")
    seen = []
    heal(student(pair), pair[0], windows(5, 32), healing, tmp_path, advance=lambda step, loss: seen.append(step))
    assert seen == [3, 4]
    assert steps_done(tmp_path) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [CURVE_FILE, STATE_FOLDER]


def test_a_run_with_other_settings_is_refused(pair, tmp_path):
    heal(student(pair), pair[0], windows(5, 32), Healing(steps=2), tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(steps 2, now 3\)"):
        heal(student(pair), pair[0], windows(5, 32), Healing(steps=3), tmp_path)


def test_a_run_on_another_text_is_refused(pair, tmp_path):
    heal(student(pair), pair[0], windows(5, 32), Healing(steps=2), tmp_path)
    with pytest.raises(
        ValueError, match=r"other settings \(text 5 windows, SHA-256 \w+, now 4 windows, SHA-256 \w+\)"
    ):
        heal(student(pair), pair[0], windows(4, 32), Healing(steps=2), tmp_path)
    heal(student(pair), pair[0], windows(5, 32), Healing(steps=2), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"steps": 1, "learning_rate": 0.0}, "`learning_rate` must be above 0"),
        ({"steps": 1, "trained": "norms"}, "`trained` must be one of attention, all"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Healing(**options)


def test_windows_must_be_alike(pair, tmp_path):
    with pytest.raises(ValueError, match=r"one length of at least 2 tokens, got \[16, 32\]"):
        heal(student(pair), pair[0], [*windows(1, 32), *windows(1, 16)], Healing(steps=1), tmp_path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    save_tiny_checkpoint(folder / "model")
    write_words(folder / "text.txt", 1200)
    return folder


def invoke(*arguments: str):
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


def test_the_command_makes_a_projection(place):
    common = ["--model", place / "model", "--text", place / "text.txt", "--windows", "4", "--window-tokens", "128"]
    out = place / "one.safetensors"
    result = invoke("calibrate-gqa", "--num-key-value-heads", "1", "--out", out, *common)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["latent_share"] == 0.5
    assert told["first_token"] == 1200 - 4 * 128
    assert GQAProjection.load(out).facts["tokens"] == 4 * 128
    result = invoke(
        "generate", "--model", place / "model", "--prompt", "w1 w2", "--strategy", f"gqa:1,projection={out}"
    )
    assert result.exit_code == 0, result.output


def test_the_command_converts_heals_and_goes_on(place):
    common = ["--model", place / "model", "--text", place / "text.txt", "--windows", "2", "--window-tokens", "64"]
    heals = ["--heal-steps", "4", "--heal-window-tokens", "32", "--heal-windows", "8"]
    out = place / "converted"
    first = invoke("convert-gqa", "--num-key-value-heads", "1", "--out", out, *common, *heals, "--stop-after", "2")
    assert first.exit_code == 0, first.output
    assert len(curve(out / "healing")) == 2
    told = json.loads((out / "kvplus-gqa.json").read_text())["healing"]
    assert (told["steps"], told["of_steps"]) == (2, 4)
    second = invoke("convert-gqa", "--num-key-value-heads", "1", "--out", out, *common, *heals)
    assert second.exit_code == 0, second.output
    assert "going on" in second.output
    assert len(curve(out / "healing")) == 4
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 1
    assert json.loads((out / "kvplus-gqa.json").read_text())["healing"]["steps"] == 4


def test_a_healing_that_was_deleted_isnt_begun_from_healed_weights(place):
    """The error for other settings says to delete the folder; what is healed then must be the conversion itself."""
    common = ["--model", place / "model", "--text", place / "text.txt", "--windows", "2", "--window-tokens", "64"]
    command = ["convert-gqa", "--num-key-value-heads", "1", *common, "--heal-window-tokens", "32"]
    command += ["--heal-windows", "8"]
    assert invoke(*command, "--out", place / "again", "--heal-steps", "3").exit_code == 0
    refused = invoke(*command, "--out", place / "again", "--heal-steps", "2")
    assert "other settings (steps 3, now 2" in refused.stderr
    shutil.rmtree(place / "again" / "healing")
    assert invoke(*command, "--out", place / "again", "--heal-steps", "2").exit_code == 0
    assert invoke(*command, "--out", place / "fresh", "--heal-steps", "2").exit_code == 0
    again, fresh = (AutoModelForCausalLM.from_pretrained(place / name).state_dict() for name in ("again", "fresh"))
    for name, weight in fresh.items():
        torch.testing.assert_close(again[name], weight, msg=name)


def test_other_windows_of_the_same_text_are_another_conversion(place):
    """Two windows of 64 tokens and four of 32 begin at the same token."""
    command = ["convert-gqa", "--num-key-value-heads", "1", "--model", place / "model", "--text", place / "text.txt"]
    command += ["--out", place / "cut", "--heal-steps", "1", "--heal-window-tokens", "32", "--heal-windows", "4"]
    assert invoke(*command, "--windows", "2", "--window-tokens", "64").exit_code == 0
    again = invoke(*command, "--windows", "4", "--window-tokens", "32")
    assert again.exit_code == 2
    assert "holds the healing of another conversion" in again.stderr


def test_two_processes_heal_as_one_does_with_twice_the_windows(place):
    """Each sees windows of its own; gradients are shared, and the first alone writes and prints."""
    common = ["--model", place / "model", "--text", place / "text.txt", "--windows", "2", "--window-tokens", "64"]
    command = ["convert-gqa", "--num-key-value-heads", "1", *common, "--heal-steps", "4", "--heal-window-tokens", "32"]
    command += ["--heal-windows", "8", "--heal-rate", "0.003"]
    assert invoke(*command, "--out", place / "one", "--heal-batch", "2").exit_code == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    (place / "program.py").write_text("from hf_kvplus.cli import main; main()")
    done = subprocess.run(
        [str(part) for part in (*launch, place / "program.py", *command, "--out", place / "two", "--device", "cpu")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum(line.startswith("{") for line in done.stdout.splitlines()) == 1
    ours, theirs = curve(place / "two" / "healing"), curve(place / "one" / "healing")
    assert [row["step"] for row in ours] == [1, 2, 3, 4]
    for one, other in zip(ours, theirs, strict=True):
        assert one["kl_nats"] == pytest.approx(other["kl_nats"], rel=1e-3)
    assert theirs[3]["kl_nats"] != pytest.approx(theirs[0]["kl_nats"], rel=1e-2)
    assert AutoModelForCausalLM.from_pretrained(place / "two").config.num_key_value_heads == 1


def test_a_process_that_accelerate_left_alone_is_told_of_it(place, monkeypatch):
    """As `accelerate launch --cpu --num_processes 2` does without MPI; alone it would be another run."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    command = ["convert-gqa", "--num-key-value-heads", "1", "--model", place / "model", "--text", place / "text.txt"]
    refused = invoke(*command, "--out", place / "alone", "--heal-steps", "1")
    assert refused.exit_code == 2
    assert "started one, as it does without MPI; use `torchrun --nproc_per_node N`" in refused.stderr
    assert not (place / "alone").exists()


def test_another_conversion_doesnt_go_on_from_the_healing_of_one(place):
    """Its steps and settings are the same, and its weights would have been those of the first."""
    common = ["--model", place / "model", "--text", place / "text.txt", "--windows", "2", "--window-tokens", "64"]
    heals = ["--heal-steps", "1", "--heal-window-tokens", "32", "--heal-windows", "4", "--out", place / "twice"]
    command = ["convert-gqa", "--num-key-value-heads", "1", *common, *heals]
    assert invoke(*command, "--method", "mean").exit_code == 0
    again = invoke(*command, "--method", "svd")
    assert again.exit_code == 2
    assert "holds the healing of another conversion in healing/; give another folder" in again.stderr
    assert json.loads((place / "twice" / "kvplus-gqa.json").read_text())["method"] == "mean"


def test_a_text_that_isnt_utf8_is_named(place, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"w1 w2 \xff" * 500)
    result = invoke(
        "calibrate-gqa", "--num-key-value-heads", "1", "--model", place / "model", "--text", tmp_path / "text.txt"
    )
    assert result.exit_code == 2
    assert "text.txt` isn't UTF-8 text: invalid start byte at byte 6" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert-gqa", "--num-key-value-heads", "1", "--out", "x"], "`text` must be given"),
        (
            ["convert-gqa", "--num-key-value-heads", "1", "--out", "x", "--method", "mean", "--heal-rate", "3e-4"],
            "`heal-rate` is for healing; say how long with --heal-steps",
        ),
        (["calibrate-gqa", "--num-key-value-heads", "1", "--text", "{place}/none.txt"], "no such file"),
        (["calibrate-gqa", "--num-key-value-heads", "1", "--text", "{place}/text.txt"], "fewer than the 8192 of 8"),
    ],
)
def test_bad_input_is_told_in_one_line(place, arguments, message):
    result = invoke(*(part.format(place=place) for part in arguments), "--model", place / "model")
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]  # what comes before tells that the model is loaded
    assert last.startswith(f"kvplus {arguments[0]}: ")
    assert message in last
