"""Interrupted runs go on where they were, and several processes find what one finds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from kvplus_eval.journal import Journal
from kvplus_eval.launching import asked_processes, count_processes, launcher_options, was_left_alone
from kvplus_eval.processes import Processes
from kvplus_eval.results import read_rows

WINDOWS = 6
OPTIONS = ["--windows", str(WINDOWS), "--window-tokens", "512", "--chunk-tokens", "8", "--timing-rounds", "0"]
OPTIONS += ["--strategies", "dynamic,int4", "--tasks", "copy", "--task-lengths", "200", "--device", "cpu"]
# Figures that depend on the clock or on who asks
PASSING = ("run", "date", "device", "git_commit")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    with one_thread():
        yield str(save_tiny_checkpoint(folder / "model")), str(write_words(folder / "text.txt", WINDOWS * 512))


def command(place, out):
    model, text = place
    return ["-m", "kvplus_eval", "eval", "--model", model, "--text", text, "--out", str(out), *OPTIONS]


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **changes}


def start(place, out, **changes):
    return subprocess.Popen(
        [sys.executable, *command(place, out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    process = start(place, out)
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    return printed, read_rows(out / "results.jsonl")


def lasting(rows):
    return [{key: value for key, value in row.items() if key not in PASSING} for row in rows]


def test_a_killed_run_goes_on_and_ends_with_the_same_rows(place, tmp_path, undisturbed):
    process = start(place, tmp_path)
    wanted = torch.randint(1, 2 * WINDOWS, (1,), generator=torch.Generator().manual_seed(os.getpid())).item()
    pieces = []
    deadline = time.monotonic() + 400
    while len(pieces) < wanted and process.poll() is None and time.monotonic() < deadline:
        pieces = list(tmp_path.glob("unfinished/*/*.piece"))
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "results.jsonl").exists()
    (note,) = tmp_path.glob("unfinished/*/run.json")
    begun = json.loads(note.read_text())

    process = start(place, tmp_path)
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert f"going on with run {begun['run']}" in printed
    rows = read_rows(tmp_path / "results.jsonl")
    assert lasting(rows) == lasting(undisturbed[1])
    assert {row["run"] for row in rows} == {begun["run"]}
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("machines", [1, 2])
def test_two_processes_find_what_one_finds(place, tmp_path, undisturbed, machines):
    """Side by side, and on two machines without a common disk, played by one."""
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", str(machines)]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    started = [
        subprocess.Popen(
            [*launch, "--machine_rank", str(rank), *command(place, tmp_path / str(rank))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(machines)
    ]
    ended = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0] * machines, [errors[-3000:] for _, errors in ended]
    assert [path.parent.name for path in tmp_path.glob("*/results.jsonl")] == ["0"]
    assert not list(tmp_path.glob("*/unfinished"))
    rows = read_rows(tmp_path / "0" / "results.jsonl")
    assert len(rows) == 2
    for row, alone in zip(rows, undisturbed[1], strict=True):
        assert row["device"]["processes"] == 2
        assert row["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            assert row["metrics"][name] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), name
        assert row["windows"]["kl_nats"] == pytest.approx(alone["windows"]["kl_nats"], rel=1e-9, abs=1e-12)
        assert [one["exact"] for one in row["tasks"]] == [one["exact"] for one in alone["tasks"]]
    # One writer: the table and the summary come once
    printed = "".join(output for output, _ in ended)
    assert sum('"kind": "eval-summary"' in line for line in printed.splitlines()) == 1


def test_windows_are_dealt_out_once_each():
    things = list("abcdefg")
    dealt = [pair for index in range(3) for pair in Processes(index, 3).mine(things)]
    assert sorted(dealt) == list(enumerate(things))


def test_each_process_of_several_on_gpus_takes_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Processes(5, 8, local_index=1).device("auto") == "cuda:1"
    assert Processes(5, 8, local_index=1).device("cuda:0") == "cuda:0"
    assert Processes(5, 8, local_index=1).device("cpu") == "cpu"
    assert Processes().device("auto") == "auto"


def test_a_journal_gives_back_what_it_was_given(tmp_path):
    journal = Journal.open(tmp_path, {"a": 1})
    journal.save({"x": torch.arange(3), "y": [1, "two"]}, "window", "int4,group=32", 0)
    again = Journal.open(tmp_path, {"a": 1})
    assert again == journal
    assert again.has("window", "int4,group=32", 0)
    assert not again.has("window", "int4_group=32", 0)
    assert again.load("window", "int4,group=32", 0)["y"] == [1, "two"]
    assert not Journal.open(tmp_path, {"a": 2}).has("window", "int4,group=32", 0)
    assert not Journal.open(tmp_path, {"a": 1}, fresh=True).has("window", "int4,group=32", 0)


def test_accelerates_lonely_process_is_recognized():
    asked = {"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}
    assert was_left_alone(asked)
    assert not was_left_alone({**asked, "WORLD_SIZE": "2"})
    assert not was_left_alone({**asked, "OMPI_COMM_WORLD_SIZE": "2"})
    assert not was_left_alone({"ACCELERATE_USE_CPU": "True"})
    assert not was_left_alone({"MASTER_PORT": "29500"})
    assert count_processes({}) == 1


def test_machines_share_the_processes():
    given = ["accelerate", "launch", "--cpu", "--num_processes", "6", "--num_machines", "3", "--machine_rank=2"]
    assert launcher_options(given) == ["--nnodes", "3", "--node_rank", "2", "--nproc_per_node", "2"]
    assert launcher_options(given[:5]) == ["--nnodes", "1", "--node_rank", "0", "--nproc_per_node", "6"]
    with pytest.raises(ValueError, match="5 processes can't be shared evenly by 3 machines"):
        launcher_options([*given[:4], "5", *given[5:]])


def test_the_number_of_processes_is_read_from_accelerates_command_line():
    assert asked_processes(["accelerate", "launch", "--cpu", "--num_processes", "3", "-m", "kvplus_eval"]) == 3
    assert asked_processes(["accelerate-launch", "--num_processes=12"]) == 12
    with pytest.raises(ValueError, match="torchrun --nproc_per_node N -m kvplus_eval"):
        asked_processes(["accelerate", "launch", "--config_file", "mine.yaml"])
